"""Tool calls in generated text, in the form that Qwen's, Hermes' and SmolLM's templates teach:
`<tool_call>` a JSON object with name and arguments `</tool_call>`.

What does not parse is given back as text: a model's slip must not become an invented call.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


@dataclass(frozen=True, slots=True)
class CallFound:
    """A complete tool call."""

    index: int
    id: str
    name: str
    arguments: str
    """JSON text."""


Event = str | CallFound


def is_taught_by(template: str | None) -> bool:
    """The chat template asks the model for this form."""
    return template is not None and OPEN in template


class ToolCallParser:
    """Splits text that comes in pieces into text and calls; holds back only what may still be a call."""

    def __init__(self, *, prefix: str = "") -> None:
        self._buffer = prefix
        """`prefix` is what the prompt already began of a call (forced tool choice)."""
        self._inside = False
        self._num_calls = 0
        self._space = ""
        """White space behind a call: released only when text follows it."""

    @property
    def num_calls(self) -> int:
        """Calls found so far."""
        return self._num_calls

    def push(self, text: str) -> list[Event]:
        """Text and calls that are certain now."""
        self._buffer += text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def flush(self) -> list[Event]:
        """What is left at the end; a call without its closing tag counts when its JSON is complete."""
        buffer, self._buffer = self._buffer, ""
        if not self._inside:
            events: list[Event] = []
            self._release(events, buffer)
            return events
        self._inside = False
        call = self._parse(buffer)
        return [call] if call else [self._space + OPEN + buffer]

    def _step(self, events: list[Event]) -> bool:
        """Take one text or call off the buffer; False when more input is needed."""
        if self._inside:
            end = self._buffer.find(CLOSE)
            if end < 0:
                return False
            raw, self._buffer = self._buffer[:end], self._buffer[end + len(CLOSE) :]
            self._inside = False
            call = self._parse(raw)
            if call:
                self._space = ""
                events.append(call)
            else:
                self._release(events, OPEN + raw + CLOSE)
            return True
        start = self._buffer.find(OPEN)
        if start >= 0:
            self._release(events, self._buffer[:start])
            self._buffer = self._buffer[start + len(OPEN) :]
            self._inside = True
            return True
        keep = _count_partial(self._buffer)
        self._release(events, self._buffer[: len(self._buffer) - keep])
        self._buffer = self._buffer[len(self._buffer) - keep :]
        return False

    def _release(self, events: list[Event], text: str) -> None:
        """Emit text; once there was a call, hold back white space at its end."""
        text, self._space = self._space + text, ""
        if self._num_calls > 0:
            body = text.rstrip()
            text, self._space = body, text[len(body) :]
        if text:
            events.append(text)

    def _parse(self, raw: str) -> CallFound | None:
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        found = CallFound(self._num_calls, f"call_{secrets.token_hex(12)}", value["name"], text)
        self._num_calls += 1
        return found


def _count_partial(text: str) -> int:
    """Length of the tail that may become the opening tag."""
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if text.endswith(OPEN[:length]):
            return length
    return 0
