"""From the fields of a body to the scheduler's records: every rule of the HTTP reference, by field."""

from __future__ import annotations

import math
from collections.abc import Sequence

from millpond_engine.records.request import BeamParams, SamplingParams, StopParams
from millpond_engine.server.errors import bad_value, unsupported
from millpond_engine.server.limits import ServerLimits
from millpond_engine.server.schema import CommonBody
from millpond_engine.text.tokenizer import Tokenizer

_INT64 = 1 << 63
_REFUSED = (
    "prompt_embeds",
    "suffix",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "regex",
    "ebnf",
    "grammar",
    "json_schema",
    "structural_tag",
    "stop_regex",
    "logits_processors",
    "lora_path",
    "functions",
    "function_call",
    "modalities",
    "audio",
    "web_search_options",
)
"""Of OpenAI's interface and of other engines'."""
_HINTS = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "guided_json": 'use structured_outputs: {"json": ...}',
    "guided_regex": 'use structured_outputs: {"regex": ...}',
    "guided_choice": 'use structured_outputs: {"choice": ...}',
    "guided_grammar": 'use structured_outputs: {"grammar": ...}',
    "guided_decoding_backend": "there is one; remove the field",
    "json_schema": 'use response_format, or structured_outputs: {"json": ...}',
    "regex": 'use structured_outputs: {"regex": ...}',
    "ebnf": 'use structured_outputs: {"grammar": ...}',
    "grammar": 'use structured_outputs: {"grammar": ...}',
}
_HARMLESS = {"functions": [], "function_call": "none", "modalities": ["text"]}
"""What asks for nothing."""


def check_supported(body: CommonBody, *, has_grammars: bool) -> None:
    """Refuse fields whose being ignored would change the meaning; without grammars all that needs one.

    Raises:
        RequestError: naming the field.
    """
    for name in _REFUSED:
        value = getattr(body, name)
        if value is not None and (name not in _HARMLESS or value != _HARMLESS[name]):
            hint = _HINTS.get(name, "this engine does not serve it; remove the field")
            raise unsupported(name, hint)
    if has_grammars:
        return
    if body.structured_outputs is not None:
        raise unsupported("structured_outputs", "this engine has no grammar library; remove the field")
    if body.response_format is not None and body.response_format.type != "text":
        raise unsupported(
            "response_format", 'this engine has no grammar library; only {"type": "text"} is served'
        )


def check_stream(body: CommonBody) -> None:
    """Refuse combinations with `stream` that cannot be answered."""
    options = body.stream_options
    asked = options is not None and (options.include_usage or options.continuous_usage_stats)
    if asked and not body.stream:
        raise bad_value("stream_options", "needs stream: true")
    if body.stream and body.prompt_logprobs is not None:
        raise bad_value("prompt_logprobs", "cannot be streamed")
    if body.stream and body.use_beam_search:
        raise bad_value("use_beam_search", "cannot be streamed")


def get_n(body: CommonBody, limits: ServerLimits) -> int:
    """Number of choices."""
    n = 1 if body.n is None else body.n
    return _check_int("n", n, 1, limits.max_beams if body.use_beam_search else limits.max_n)


def get_best_of(body: CommonBody, n: int, limits: ServerLimits) -> int:
    """Number of samples drawn; more than `n` only without a stream."""
    if body.best_of is None:
        return n
    best_of = _check_int("best_of", body.best_of, 1, limits.max_n)
    if best_of == 1:
        return n
    if best_of < n:
        raise bad_value("best_of", f"must be at least n ({n})")
    if best_of > n and body.stream:
        raise bad_value("best_of", "more than n cannot be streamed")
    return best_of


def make_beam(body: CommonBody, n: int) -> BeamParams | None:
    """Beam search as wide as `n`, when asked for."""
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    if not math.isfinite(penalty) or abs(penalty) > 100:
        raise bad_value("length_penalty", "must be between -100 and 100")
    return BeamParams(width=n, length_penalty=penalty) if body.use_beam_search else None


def make_sampling(
    body: CommonBody,
    tokenizer: Tokenizer,
    limits: ServerLimits,
    *,
    vocabulary: int,
    num_logprobs: int | None,
) -> SamplingParams:
    """Sampling parameters; ranges are those of the HTTP reference.

    Raises:
        RequestError: naming the field.
    """
    top_k = _check_int("top_k", body.top_k or 0, -1, _INT64)
    top_p = _check_float("top_p", body.top_p, 1.0, 0.0, 1.0)
    if top_p == 0:
        raise bad_value("top_p", "must be greater than 0")
    # beyond these bounds edited scores would not be numbers any more
    repetition = _check_float("repetition_penalty", body.repetition_penalty, 1.0, 1e-6, 1e6)
    if body.seed is not None:
        _check_int("seed", body.seed, -_INT64, _INT64 - 1)
    return SamplingParams(
        temperature=_check_float("temperature", body.temperature, 1.0, 0.0, 2.0),
        top_p=top_p,
        top_k=0 if top_k < 1 or top_k >= vocabulary else top_k,
        min_p=_check_float("min_p", body.min_p, 0.0, 0.0, 1.0),
        presence_penalty=_check_float("presence_penalty", body.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=_check_float("frequency_penalty", body.frequency_penalty, 0.0, -2.0, 2.0),
        repetition_penalty=repetition,
        seed=body.seed,
        logit_bias=_make_biases(body.logit_bias, vocabulary, limits),
        allowed_token_ids=_check_tokens(
            "allowed_token_ids",
            body.allowed_token_ids,
            vocabulary,
            limits.max_allowed_tokens,
            may_be_empty=False,
        ),
        bad_words=_make_bad_words(body.bad_words, tokenizer, vocabulary, limits),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=get_prompt_logprobs(body),
    )


def get_prompt_logprobs(body: CommonBody) -> int | None:
    """Alternatives per prompt token."""
    if body.prompt_logprobs is None:
        return None
    return _check_int("prompt_logprobs", body.prompt_logprobs, 0, 20)


def make_stop(body: CommonBody, vocabulary: int, limits: ServerLimits, *, max_tokens: int) -> StopParams:
    """Ends that the scheduler sees: tokens and lengths."""
    return StopParams(
        max_tokens=max_tokens,
        min_tokens=_check_int("min_tokens", body.min_tokens or 0, 0, max(max_tokens, 0)),
        stop_token_ids=_check_tokens(
            "stop_token_ids", body.stop_token_ids, vocabulary, limits.max_stop_tokens
        ),
        ignore_eos=bool(body.ignore_eos),
    )


def get_stops(body: CommonBody, limits: ServerLimits) -> tuple[str, ...]:
    """Stop strings: at most 4, none empty."""
    if body.stop is None:
        return ()
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if isinstance(body.stop, str) and not body.stop:
        return ()
    if len(stops) > 4:
        raise bad_value("stop", "at most 4 strings")
    if any(not stop for stop in stops):
        raise bad_value("stop", "strings must not be empty")
    if any(len(stop) > limits.max_stop_characters for stop in stops):
        raise bad_value("stop", f"strings must not be longer than {limits.max_stop_characters} characters")
    return stops


def check_salt(body: CommonBody, limits: ServerLimits) -> str:
    """The caller's salt, empty when there is none."""
    if body.cache_salt is None:
        return ""
    if not 1 <= len(body.cache_salt) <= limits.max_salt_characters:
        raise bad_value("cache_salt", f"must have 1 to {limits.max_salt_characters} characters")
    return body.cache_salt


def check_priority(body: CommonBody) -> int:
    """Order inside the tenant."""
    return _check_int("priority", body.priority or 0, -(1 << 31), (1 << 31) - 1)


def check_token_ids(param: str, tokens: Sequence[int], vocabulary: int) -> None:
    """Every id names a token.

    Raises:
        RequestError: naming the field.
    """
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocabulary):
        raise bad_value(param, f"token ids must be in [0, {vocabulary})")


def _make_biases(
    biases: dict[str, float] | None, vocabulary: int, limits: ServerLimits
) -> tuple[tuple[int, float], ...]:
    if not biases:
        return ()
    if len(biases) > limits.max_biases:
        raise bad_value("logit_bias", f"at most {limits.max_biases} entries")
    pairs = []
    for key, bias in biases.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10 or int(key) >= vocabulary:
            raise bad_value("logit_bias", f"keys must be token ids in [0, {vocabulary})")
        if not -100 <= bias <= 100:
            raise bad_value("logit_bias", "values must be between -100 and 100")
        pairs.append((int(key), bias))
    return tuple(pairs)


def _make_bad_words(
    words: list[str] | None, tokenizer: Tokenizer, vocabulary: int, limits: ServerLimits
) -> tuple[tuple[int, ...], ...]:
    """Token runs of each word, with and without a space in front, since both spell it inside a text."""
    if not words:
        return ()
    if len(words) > limits.max_bad_words:
        raise bad_value("bad_words", f"at most {limits.max_bad_words} words")
    runs: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word or len(word) > limits.max_stop_characters:
            raise bad_value("bad_words", f"words must have 1 to {limits.max_stop_characters} characters")
        for text in (word, f" {word.lstrip()}"):
            runs[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(run for run in runs if run and max(run) < vocabulary)  # the model cannot say the others


def _check_tokens(
    param: str, tokens: list[int] | None, vocabulary: int, limit: int, *, may_be_empty: bool = True
) -> tuple[int, ...]:
    if tokens is None:
        return ()
    if not tokens and not may_be_empty:
        raise bad_value(param, "must not be empty")
    if len(tokens) > limit:
        raise bad_value(param, f"at most {limit} ids")
    check_token_ids(param, tokens, vocabulary)
    return tuple(tokens)


def _check_int(param: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise bad_value(param, f"must be between {low} and {high}")
    return value


def _check_float(param: str, value: float | None, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    if not low <= value <= high:
        raise bad_value(param, f"must be between {low:g} and {high:g}")
    return float(value)
