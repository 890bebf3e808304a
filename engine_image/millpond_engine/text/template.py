"""Chat templates: Jinja in a sandbox, with bounds on output, on repeated sequences and on time.

The template of a model is data from the internet and a template in a request is data from a client, so
neither may reach attributes of Python objects, change them, or keep the processor for long.

Errors:
    TemplateFailedError   the template does not compile, raises, or breaks a bound: the caller's fault
"""

from __future__ import annotations

import ctypes
import json
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NoReturn, Self

import jinja2
import jinja2.sandbox
from jinja2.ext import Extension

MAX_OUTPUT_CHARACTERS = 8_000_000
MAX_SECONDS = 5.0
_MAX_REPEATED = 1_000_000


class TemplateFailedError(ValueError):
    """The chat template cannot render these messages; the message holds no prompt text."""


class TemplateTimeoutError(Exception):
    """Raised inside the rendering thread when its time is over."""


@dataclass(frozen=True, slots=True)
class ChatInput:
    """What a template sees. Message content is text or None, tool calls are plain data."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None = None
    documents: Sequence[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] | None = None
    """Further names from the request (`chat_template_kwargs`) and the vocabulary (bos_token, …)."""


class _Generation(Extension):
    """`{% generation %}` … `{% endgeneration %}` marks the assistant's part for training; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a class attribute

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox plus bounds on operators that make large values out of small ones."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(right) > 64 or abs(left) > 1_000_000):
            raise TemplateFailedError("the chat template raises a number to too high a power")
        if operator == "*":
            size = _count_repeated(left, right)
            if size > _MAX_REPEATED:
                raise TemplateFailedError("the chat template repeats a sequence too often")
        if operator == "%" and isinstance(left, str):
            raise TemplateFailedError("the chat template formats with %; use ~ or format")
        return super().call_binop(context, operator, left, right)


def _count_repeated(left: Any, right: Any) -> int:
    for sequence, number in ((left, right), (right, left)):
        if isinstance(number, int) and isinstance(sequence, (str, list, tuple)):
            return len(sequence) * number
    return 0


def _raise_exception(message: str) -> NoReturn:
    raise TemplateFailedError(f"the chat template refused the messages: {message[:200]}")


def _format_now(pattern: str) -> str:
    return datetime.now(tz=UTC).strftime(pattern)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    allowed = {k: v for k, v in options.items() if k in {"ensure_ascii", "separators", "sort_keys"}}
    return json.dumps(
        value, indent=min(indent, 8) if indent else indent, **{"ensure_ascii": False, **allowed}
    )


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    for name in ("center", "indent", "wordwrap", "pprint", "xmlattr", "urlize"):
        environment.filters.pop(name, None)
    environment.filters["indent"] = _indent
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _format_now
    return environment


def _indent(text: str, width: int = 4, first: bool = False) -> str:
    pad = " " * min(int(width), 64)
    lines = str(text).split("\n")
    return "\n".join((pad + line if line and (first or i) else line) for i, line in enumerate(lines))


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise TemplateFailedError(f"the chat template does not compile: {str(error)[:200]}") from error


def render_chat(source: str, chat: ChatInput, *, max_seconds: float = MAX_SECONDS) -> str:
    """Prompt text of a conversation.

    Runs in the calling thread, which must not be the event loop's; a watchdog ends it after `max_seconds`.

    Raises:
        TemplateFailedError: with the reason, free of the messages' text.
    """
    template = _compile(source)
    names = dict(chat.variables or {})
    messages, mark = list(chat.messages), f"[{secrets.token_hex(16)}]"
    last = str(messages[-1].get("content") or "") if chat.continue_final_message else ""
    if chat.continue_final_message:
        messages[-1] = {**messages[-1], "content": f"{last}{mark} "}
    names.update(
        messages=messages,
        tools=list(chat.tools) if chat.tools else None,
        documents=list(chat.documents) if chat.documents else None,
        add_generation_prompt=chat.add_generation_prompt,
    )
    try:
        with _Deadline(max_seconds):
            text = _render(template, names)
    except TemplateFailedError:
        raise
    except TemplateTimeoutError as error:
        raise TemplateFailedError(f"the chat template did not finish within {max_seconds:g} s") from error
    except jinja2.TemplateError as error:
        raise TemplateFailedError(f"the chat template failed: {type(error).__name__}") from error
    except Exception as error:  # a template may raise anything through the values it touches
        raise TemplateFailedError(f"the chat template failed: {type(error).__name__}") from error
    return _cut_at(mark, text, last) if chat.continue_final_message else text


def _render(template: jinja2.Template, names: dict[str, Any]) -> str:
    pieces: list[str] = []
    size = 0
    for piece in template.generate(names):
        size += len(piece)
        if size > MAX_OUTPUT_CHARACTERS:
            raise TemplateFailedError(f"the chat template wrote more than {MAX_OUTPUT_CHARACTERS} characters")
        pieces.append(piece)
    return "".join(pieces)


def _cut_at(mark: str, text: str, last: str) -> str:
    """The text up to the mark behind the last message's content, so that the model goes on with it.

    What follows the message in the template may repeat its words, so they cannot show where it ends. A template
    that trims the space behind the mark would have trimmed the message's own.
    """
    position = text.rfind(mark)
    if position < 0:
        raise TemplateFailedError(
            "continue_final_message: the last message is not found in the rendered text"
        )
    if text.startswith(" ", position + len(mark)) or not last.strip():
        return text[:position]
    return text[:position].removesuffix(last[len(last.rstrip()) :])


class _Deadline:
    """Raises TemplateTimeoutError in this thread when the block takes too long."""

    def __init__(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._fire)
        self._timer.daemon = True
        self._thread_id = threading.get_ident()
        self._lock = threading.Lock()
        self._over = False

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over = True
        self._timer.cancel()

    def _fire(self) -> None:
        with self._lock:
            if not self._over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread_id), ctypes.py_object(TemplateTimeoutError)
                )
