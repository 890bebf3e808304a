"""Which tokens the fake runner says: a pure function of the prompt, the seed and the position.

So the text does not depend on batching, chunking, caching, preemption or speed, and a test can
compute the expected answer without running the engine.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

DEFAULT_TEXT = (
    "The mill stands by the pond and turns when the water is high. "
    "A heron waits in the reeds for the first fish of the morning. "
    "Grain comes in by the cart, and flour goes out by the sack. "
    "In the evening the miller closes the sluice and counts the day. "
    "Frost draws ferns on the window while the wheel rests. "
    "When the ice breaks, the stones sing again. "
)


class Script(Protocol):
    """Chooses the token after `generated` tokens of one sequence."""

    def start(self, prompt: Sequence[int], seed: int | None) -> int:
        """A number that stands for this sequence; `seed` is None under greedy sampling."""
        ...

    def next_token(self, start: int, generated: int) -> int:
        """Token at that position."""
        ...


@dataclass(frozen=True, slots=True)
class StoryScript:
    """Sentences of a text, begun at a place that prompt and seed choose, ended after `output_tokens` tokens.

    A sequence that does not end there (ignored or banned end token) reads on after the end token.
    """

    story: tuple[int, ...]
    starts: tuple[int, ...]
    """Positions in `story` where a sentence begins."""
    end_token: int
    output_tokens: int

    def start(self, prompt: Sequence[int], seed: int | None) -> int:
        """Position in the story."""
        digest = zlib.crc32(array("I", prompt).tobytes())
        if seed is not None:
            digest = zlib.crc32(seed.to_bytes(8, "little", signed=True), digest)
        return self.starts[digest % len(self.starts)]

    def next_token(self, start: int, generated: int) -> int:
        """Token of the story, or the end token every `output_tokens` tokens."""
        rounds, position = divmod(generated, self.output_tokens + 1)
        if position == self.output_tokens:
            return self.end_token
        return self.story[(start + rounds * self.output_tokens + position) % len(self.story)]


@dataclass(frozen=True, slots=True)
class FixedScript:
    """The same tokens for every prompt, then the end token for ever."""

    tokens: tuple[int, ...]
    end_token: int

    def start(self, prompt: Sequence[int], seed: int | None) -> int:
        """Nothing to choose."""
        del prompt, seed
        return 0

    def next_token(self, start: int, generated: int) -> int:
        """Token at the position."""
        return self.tokens[start + generated] if generated < len(self.tokens) else self.end_token


def make_story(sentences: Sequence[Sequence[int]], *, end_token: int, output_tokens: int) -> StoryScript:
    """Join encoded sentences into a script.

    Raises:
        ValueError: without any token there is nothing to say.
    """
    story: list[int] = []
    starts: list[int] = []
    for sentence in sentences:
        if sentence:
            starts.append(len(story))
            story.extend(sentence)
    if not story or output_tokens < 1:
        raise ValueError("a story needs at least one token of text and output_tokens of at least 1")
    return StoryScript(tuple(story), tuple(starts), end_token, output_tokens)
