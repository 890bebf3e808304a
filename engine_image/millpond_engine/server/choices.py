"""One choice of an answer: tokens in, text out, with stop strings, usage and the way it ended."""

from __future__ import annotations

from dataclasses import dataclass

from millpond_engine.records.outputs import SequenceOutput
from millpond_engine.records.request import FinishReason
from millpond_engine.records.step import TokenLogprobs
from millpond_engine.text.detokenizer import Detokenizer
from millpond_engine.text.stops import StopHit, StopMatcher
from millpond_engine.text.tokenizer import Tokenizer, describe_token


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become text."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    stop_token_ids: frozenset[int] = frozenset()
    """Those of the request, which `stop_reason` names; the model's own end tokens are not among them."""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A reported token and, when asked for, its log-probabilities."""

    token: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    """News of one choice."""

    text: str
    entries: tuple[TokenEntry, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Choice:
    """Assembles one sequence; after its end further tokens are ignored."""

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=options.skip_special_tokens)
        self._stops = StopMatcher(options.stops)
        self.num_tokens = 0
        """Generated tokens, the end token included."""
        self.ended = False

    def push(self, output: SequenceOutput) -> ChoicePiece | None:
        """Text and end that this news brings; None once the choice has ended."""
        if self.ended:
            return None
        texts: list[str] = []
        entries: list[TokenEntry] = []
        for position, token in enumerate(output.tokens):
            self.num_tokens += 1
            entries.append(TokenEntry(token, output.logprobs[position] if output.logprobs else None))
            text, hit = self._release(self._detokenizer.push((token,)))
            texts.append(text)
            if hit is not None:
                return self._end_at_stop(hit, texts, entries)
        if output.finish is None:
            return ChoicePiece("".join(texts), tuple(entries))
        return self._end(output, texts, entries)

    def _release(self, text: str) -> tuple[str, StopHit | None]:
        return self._stops.push(text, counts=self.num_tokens >= self._options.min_tokens)

    def _end_at_stop(self, hit: StopHit, texts: list[str], entries: list[TokenEntry]) -> ChoicePiece:
        self.ended = True
        if self._options.include_stop:
            texts.append(hit.stop)
        return ChoicePiece("".join(texts), tuple(entries), "stop", hit.stop)

    def _end(self, output: SequenceOutput, texts: list[str], entries: list[TokenEntry]) -> ChoicePiece:
        self.ended = True
        if output.stop_token is not None:
            self.num_tokens += 1
        text, hit = self._release(self._detokenizer.flush())
        texts.append(text)
        if hit is not None:
            return self._end_at_stop(hit, texts, entries)
        texts.append(self._stops.flush())
        reason = "length" if output.finish is FinishReason.LENGTH else "stop"
        stop_reason = output.stop_token if output.stop_token in self._options.stop_token_ids else None
        if stop_reason is not None and self._options.include_stop:
            texts.append(describe_token(self._tokenizer, stop_reason))
        return ChoicePiece("".join(texts), tuple(entries), reason, stop_reason)
