"""Tool calls in generated text, in the form that Qwen's, Hermes' and SmolLM's templates teach:
`<tool_call>` a JSON object with name and arguments `</tool_call>`.

What does not parse is given back as text: a model's slip must not become an invented call.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any, NoReturn

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

    def __init__(self, *, prefix: str = "", max_calls: int | None = None) -> None:
        self._buffer = prefix
        """`prefix` is what the prompt already began of a call (forced tool choice)."""
        self._max_calls = max_calls
        """Calls beyond it are left out, as `parallel_tool_calls: false` asks."""
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
        return self._admit(call) if call else [self._space + OPEN + buffer]

    def _admit(self, call: CallFound) -> list[Event]:
        return [call] if self._max_calls is None or call.index < self._max_calls else []

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
                events.extend(self._admit(call))
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
        """The call that `raw` spells. Its arguments are an object, or a text that spells one: what a client gets
        it sends back in its next request, where a template takes nothing else.
        """
        value = load_object(raw)
        if value is None or not isinstance(value.get("name"), str) or not _is_text(value["name"]):
            return None
        given = value.get("arguments", value.get("parameters", {}))
        arguments = load_object(given) if isinstance(given, str) else given
        if not isinstance(arguments, dict):
            return None
        text = given if isinstance(given, str) else json.dumps(arguments, ensure_ascii=False)
        if not _is_text(text):
            text = json.dumps(arguments)
        found = CallFound(self._num_calls, f"call_{secrets.token_hex(12)}", value["name"], text)
        self._num_calls += 1
        return found


def load_object(text: str) -> dict[str, Any] | None:
    """The JSON object that `text` spells, None when it spells none; JSON has no NaN and no infinity."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _is_text(text: str) -> bool:
    """It has no half characters, which JSON can spell and UTF-8 cannot."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _count_partial(text: str) -> int:
    """Length of the tail that may become the opening tag."""
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if text.endswith(OPEN[:length]):
            return length
    return 0
