"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from millpond_engine.loop.stream import Delivery
from millpond_engine.records.step import TokenLogprobs
from millpond_engine.server import checks
from millpond_engine.server.answer import Answer, answer_call
from millpond_engine.server.binding import bind_grammar
from millpond_engine.server.choices import ChoicePiece
from millpond_engine.server.context import CONTEXT, ServerContext
from millpond_engine.server.errors import bad_value
from millpond_engine.server.intake import Caller, get_now, parse_body, read_body, read_caller
from millpond_engine.server.logprobs import MAX_LOGPROBS, LogprobWriter, TextOffsets, make_prompt_logprobs
from millpond_engine.server.prepare import (
    CallOptions,
    LengthRule,
    PreparedCall,
    encode_prompt,
    make_options,
    make_requests,
    truncate,
)
from millpond_engine.server.schema import CompletionBody
from millpond_engine.server.sse import encode_json
from millpond_engine.server.structured import read_constraint
from millpond_engine.text.tokenizer import Tokenizer, decode

_DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its tokens, and its text where `echo` needs it."""

    tokens: list[int]
    text: str


async def handle_completions(request: web.Request) -> web.StreamResponse:
    """Serve one completions call."""
    context = request.app[CONTEXT]
    body = parse_body(await read_body(request, context.limits), CompletionBody)
    now = get_now()
    caller = read_caller(request, default_class=context.config.scheduling.default_class, now=now)
    loop = asyncio.get_running_loop()
    call, prompts = await loop.run_in_executor(context.executor, prepare, context, body, caller, now)
    call = await bind_grammar(context, call, tenant=caller.tenant)
    renderer = CompletionRenderer(
        context.tokenizer, call, prompts if body.echo else None, body.max_tokens == 0
    )
    options = call.options
    reports = options.num_logprobs is not None or options.num_prompt_logprobs is not None
    if body.max_tokens == 0 and not reports and not options.stream:
        return _answer_echo(context, call, renderer)
    return await answer_call(context, request, call, renderer)


def prepare(
    context: ServerContext, body: CompletionBody, caller: Caller, received_at: float
) -> tuple[PreparedCall, list[Prompt]]:
    """Check and tokenize; runs off the event loop.

    Raises:
        RequestError: naming the field.
    """
    num_logprobs = body.logprobs
    if num_logprobs is not None and not 0 <= num_logprobs <= MAX_LOGPROBS:
        raise bad_value("logprobs", f"must be between 0 and {MAX_LOGPROBS}")
    if body.max_tokens == 0 and not body.echo:
        raise bad_value("max_tokens", "must be at least 1 unless echo is set")
    if body.echo and body.use_beam_search:
        raise bad_value("echo", "cannot be combined with use_beam_search")
    options = make_options(context, body, prefix="cmpl", num_logprobs=num_logprobs)
    constraint = read_constraint(body, context.limits)
    rule = LengthRule(_DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens, None)
    prompts = [_make_prompt(context, body, rule, prompt) for prompt in _split_prompts(context, body)]
    prompt_logprobs = [value for value in (options.num_prompt_logprobs,) if value is not None]
    if body.echo and num_logprobs is not None:
        prompt_logprobs.append(num_logprobs)
    call = make_requests(
        context,
        body,
        options,
        [prompt.tokens for prompt in prompts],
        caller=caller,
        rule=rule,
        received_at=received_at,
        num_prompt_logprobs=max(prompt_logprobs, default=None),
    )
    return replace(call, constraint=constraint), prompts


def _split_prompts(context: ServerContext, body: CompletionBody) -> Sequence[str | list[int]]:
    """The four forms of `prompt` as a list of texts or token lists."""
    given = body.prompt
    if given is None or given in ("", []):
        raise bad_value("prompt", "must not be empty")
    if isinstance(given, str):
        return [given]
    if all(isinstance(item, int) for item in given):
        return [[item for item in given if isinstance(item, int)]]
    prompts = [item for item in given if not isinstance(item, int)]
    if len(prompts) != len(given) or len({type(item) for item in prompts}) > 1:
        raise bad_value(
            "prompt", "must be one text, a list of texts, a list of token ids or a list of such lists"
        )
    if len(prompts) > context.limits.max_prompts:
        raise bad_value("prompt", f"at most {context.limits.max_prompts} prompts")
    return prompts


def _make_prompt(
    context: ServerContext, body: CompletionBody, rule: LengthRule, given: str | list[int]
) -> Prompt:
    tokenizer = context.tokenizer
    if isinstance(given, str):
        special = body.add_special_tokens is not False
        tokens = encode_prompt(context, given, add_special_tokens=special, param="prompt")
    else:
        checks.check_token_ids("prompt", given, context.vocabulary_size)
        tokens = given
    if not tokens:
        raise bad_value("prompt", "must not be empty")
    kept = truncate(tokens, body, context.max_model_tokens)
    rule.compute_max_tokens(len(kept), context.max_model_tokens)  # refuses before the next is tokenized
    if not body.echo:
        return Prompt(kept, "")
    whole = isinstance(given, str) and len(kept) == len(tokens)
    return Prompt(kept, str(given) if whole else decode(tokenizer, kept, skip_special_tokens=False))


def _answer_echo(context: ServerContext, call: PreparedCall, renderer: CompletionRenderer) -> web.Response:
    """`echo` with nothing to generate and no logprobs: the prompt comes back, the model is not asked."""
    answer = Answer(context, call, renderer)
    for index in range(call.num_choices):
        renderer.collect(index, ChoicePiece("", (), "length"))
    body = answer.make_envelope(
        renderer.object_name, [renderer.make_choice(i) for i in range(call.num_choices)]
    )
    body["usage"] = answer.make_usage()
    return web.Response(body=encode_json(body), content_type="application/json")


@dataclass(slots=True)
class _State:
    """What has been rendered of one choice."""

    offsets: TextOffsets
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Where each of the tokens begins in the text."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    begun: bool = False


class CompletionRenderer:
    """Choices of the completions endpoint."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(
        self, tokenizer: Tokenizer, call: PreparedCall, echo: list[Prompt] | None, prompt_only: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._call = call
        self._options: CallOptions = call.options
        self._echo = echo
        self._prompt_only = prompt_only
        skip = self._options.text.skip_special_tokens
        self._states = [
            _State(TextOffsets(tokenizer, skip_special_tokens=skip)) for _ in range(call.num_choices)
        ]
        self._prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        self._writer = LogprobWriter(
            tokenizer, self._options.num_logprobs or 0, as_ids=self._options.tokens_as_ids
        )

    def take_prompt(self, first_index: int, delivery: Delivery) -> None:
        """Keep the prompt's log-probabilities."""
        assert delivery.prompt is not None
        self._prompt_logprobs[first_index // self._options.n] = delivery.prompt.prompt_logprobs

    def make_chunks(self, index: int, piece: ChoicePiece) -> Iterable[dict[str, Any]]:
        """At most one choice object."""
        state = self._states[index]
        text, tokens, logprobs, places = self._extend(index, state, piece)
        self._note_end(state, piece)
        shown = tokens if self._options.num_logprobs is not None or self._options.return_token_ids else []
        if not text and not shown and piece.finish_reason is None:
            return
        choice = self._make_base(index, text, state)
        if self._options.num_logprobs is not None:
            choice["logprobs"] = self._writer.make_completion(tokens, logprobs, places)
        if self._options.return_token_ids:
            choice["token_ids"] = tokens
        yield choice

    def collect(self, index: int, piece: ChoicePiece) -> None:
        """Keep text, tokens and log-probabilities."""
        state = self._states[index]
        text, tokens, logprobs, places = self._extend(index, state, piece)
        state.texts.append(text)
        state.tokens.extend(tokens)
        state.logprobs.extend(logprobs)
        state.places.extend(places)
        self._note_end(state, piece)

    def make_choice(self, index: int) -> dict[str, Any]:
        """The whole choice."""
        state = self._states[index]
        choice = self._make_base(index, "".join(state.texts), state)
        if self._options.num_logprobs is not None:
            choice["logprobs"] = self._writer.make_completion(state.tokens, state.logprobs, state.places)
        if self._options.return_token_ids:
            choice["token_ids"] = state.tokens
            choice["prompt_token_ids"] = list(self._call.requests[index // self._options.n].prompt)
        if self._options.num_prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._make_prompt_logprobs(index // self._options.n)
        return choice

    def get_finish_reason(self, index: int) -> str:
        """How the choice ended."""
        return self._states[index].finish_reason or "stop"

    def _extend(
        self, index: int, state: _State, piece: ChoicePiece
    ) -> tuple[str, list[int], list[TokenLogprobs | None], list[int]]:
        """Text, tokens, log-probabilities and offsets that a piece adds, the echoed prompt in front of the first."""
        places: list[int] = []
        text, tokens = piece.text, [entry.token for entry in piece.entries]
        logprobs = [entry.logprobs for entry in piece.entries]
        if self._prompt_only:
            text, tokens, logprobs = "", [], []
        if self._echo is not None and not state.begun:
            prompt = self._echo[index // self._options.n]
            text = prompt.text + text
            if self._options.num_logprobs is not None:
                places = state.offsets.take_prompt(prompt.tokens, prompt.text)
            tokens = prompt.tokens + tokens
            known = self._prompt_logprobs.get(index // self._options.n, ())
            padded = [*known, *[None] * (len(prompt.tokens) - 1 - len(known))]
            logprobs = [None, *padded, *logprobs]
        if self._options.num_logprobs is not None:
            places += state.offsets.take(tokens[len(places) :])
        state.begun = True
        return text, tokens, logprobs, places

    def _note_end(self, state: _State, piece: ChoicePiece) -> None:
        if piece.finish_reason is not None:
            state.finish_reason = "length" if self._prompt_only else piece.finish_reason
            state.stop_reason = None if self._prompt_only else piece.stop_reason

    def _make_base(self, index: int, text: str, state: _State) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": state.finish_reason,
            "stop_reason": state.stop_reason,
        }

    def _make_prompt_logprobs(self, position: int) -> list[dict[str, Any] | None]:
        prompt = self._call.requests[position].prompt
        logprobs = self._prompt_logprobs.get(position, ())
        return make_prompt_logprobs(self._tokenizer, prompt, logprobs, self._options.num_prompt_logprobs or 0)
