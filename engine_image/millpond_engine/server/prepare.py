"""From a checked body to the scheduler's requests: prompts, lengths, namespaces, ids."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from millpond_common.contract.openai import ErrorCode
from millpond_engine.records.request import Request, SamplingParams, StopParams
from millpond_engine.server import checks
from millpond_engine.server.choices import TextOptions
from millpond_engine.server.context import ServerContext
from millpond_engine.server.errors import bad_value, make_error
from millpond_engine.server.intake import Caller
from millpond_engine.server.schema import CommonBody
from millpond_engine.server.structured import Constraint


@dataclass(frozen=True, slots=True)
class CallOptions:
    """How a call is answered; the same for all its prompts."""

    id: str
    created: int
    model: str
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    tokens_as_ids: bool
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    """Of the field `prompt_logprobs`."""
    text: TextOptions


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call ready to be submitted."""

    options: CallOptions
    requests: tuple[Request, ...]
    received_at: float
    constraint: Constraint | None = None
    """What the text must follow, not compiled yet."""

    @property
    def num_choices(self) -> int:
        """Choices of the answer: prompts times n."""
        return len(self.requests) * self.options.n


@dataclass(frozen=True, slots=True)
class LengthRule:
    """Output limits: `wanted` is the client's number, absent when it gave none."""

    wanted: int | None
    default: int | None
    """For clients that give none; absent: what is left of the context."""
    param: str = "max_tokens"
    prompt_param: str = "prompt"

    def compute_max_tokens(self, prompt_tokens: int, max_model_tokens: int) -> int:
        """Output limit of one prompt.

        Raises:
            RequestError: negative numbers, and prompt plus output beyond the context.
        """
        if self.wanted is not None and self.wanted < 0:
            raise bad_value(self.param, "must not be negative")
        room = max_model_tokens - prompt_tokens
        if self.wanted is not None and self.wanted <= room:
            return self.wanted
        if self.wanted is None and room >= 1:
            return min(room, self.default) if self.default is not None else room
        output = "output" if self.wanted is None else f"{self.wanted} tokens of output"
        message = (
            f"this model's context is {max_model_tokens} tokens; the prompt has {prompt_tokens} tokens and "
            f"{output} was asked for: shorten the prompt or lower the output limit"
        )
        raise make_error(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param=self.prompt_param)


def encode_prompt(context: ServerContext, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
    """Ids of a text. One that cannot fit the context however it is cut into tokens costs no tokenization.

    Raises:
        RequestError: so long a text, whatever `truncate_prompt_tokens` would leave of it.
    """
    limit = context.max_model_tokens * context.longest_token_bytes
    if len(text) > limit:
        message = (
            f"this model's context is {context.max_model_tokens} tokens; no text of more than {limit} characters "
            f"fits it, and this one has {len(text)}: shorten it"
        )
        raise make_error(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param=param)
    return context.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def truncate(tokens: list[int], body: CommonBody, max_model_tokens: int) -> list[int]:
    """Keep the tail that `truncate_prompt_tokens` allows; -1 is the model's context."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return tokens
    if limit == -1:
        limit = max_model_tokens
    if not 1 <= limit <= max_model_tokens:
        raise bad_value("truncate_prompt_tokens", f"must be -1 or between 1 and {max_model_tokens}")
    return tokens[-limit:]


def make_options(
    context: ServerContext, body: CommonBody, *, prefix: str, num_logprobs: int | None
) -> CallOptions:
    """Check the fields that do not depend on the prompt's text.

    Raises:
        RequestError: naming the field.
    """
    checks.check_supported(body, has_grammars=context.grammars is not None)
    checks.check_stream(body)
    model, _ = context.find_model(body.model)
    stream = body.stream_options
    return CallOptions(
        id=f"{prefix}-{secrets.token_hex(16)}",
        created=int(time.time()),
        model=model,
        n=checks.get_n(body, context.limits),
        stream=bool(body.stream),
        include_usage=bool(stream and stream.include_usage),
        continuous_usage=bool(stream and stream.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=checks.get_prompt_logprobs(body),
        text=TextOptions(
            stops=checks.get_stops(body, context.limits),
            include_stop=bool(body.include_stop_str_in_output),
            min_tokens=body.min_tokens or 0,
            skip_special_tokens=body.skip_special_tokens is not False,
            stop_token_ids=frozenset(body.stop_token_ids or ()),
        ),
    )


def make_requests(
    context: ServerContext,
    body: CommonBody,
    options: CallOptions,
    prompts: Sequence[Sequence[int]],
    *,
    caller: Caller,
    rule: LengthRule,
    received_at: float,
    num_prompt_logprobs: int | None,
) -> PreparedCall:
    """The scheduler's requests, one per prompt.

    Raises:
        RequestError: naming the field.
    """
    _, adapter = context.find_model(body.model)
    salt = checks.check_salt(body, context.limits)
    sampling = checks.make_sampling(
        body,
        context.tokenizer,
        context.limits,
        vocabulary=context.vocabulary_size,
        num_logprobs=options.num_logprobs,
    )
    sampling = replace(sampling, num_prompt_logprobs=num_prompt_logprobs)
    base = Request(
        request_id=options.id,
        prompt=(),
        sampling=sampling,
        stop=StopParams(max_tokens=1),
        arrival_seconds=received_at,
        n=options.n,
        best_of=checks.get_best_of(body, options.n, context.limits),
        beam=checks.make_beam(body, options.n),
        namespace=(context.config.model_name, adapter, caller.tenant, salt),
        adapter=adapter,
        class_name=caller.class_name,
        tenant=caller.tenant,
        priority=checks.check_priority(body),
        deadline_seconds=caller.deadline_seconds,
    )
    requests = tuple(_fit(context, body, base, index, prompt, rule) for index, prompt in enumerate(prompts))
    return PreparedCall(options, requests, received_at)


def _fit(
    context: ServerContext,
    body: CommonBody,
    base: Request,
    index: int,
    prompt: Sequence[int],
    rule: LengthRule,
) -> Request:
    if not prompt:
        raise bad_value("prompt", "must not be empty")
    limit = context.max_model_tokens
    max_tokens = rule.compute_max_tokens(len(prompt), limit)
    sampling: SamplingParams = base.sampling
    if sampling.seed is not None and index > 0:
        sampling = replace(sampling, seed=_mix_seed(sampling.seed, index))
    return replace(
        base,
        request_id=f"{base.request_id}-{index}",
        prompt=tuple(prompt),
        sampling=sampling,
        stop=checks.make_stop(body, context.vocabulary_size, context.limits, max_tokens=max_tokens),
    )


def _mix_seed(seed: int, index: int) -> int:
    """Another seed for another prompt of the same call, inside int64."""
    return (seed + index * 0x9E3779B97F4A7C15 + (1 << 63)) % (1 << 64) - (1 << 63)
