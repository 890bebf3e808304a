"""Own traces in the Mooncake format: sessions of several turns under shared system prompts.

A session opens with one of `num_prompts` system prompts, chosen with Zipf's weights; every turn repeats all that
was said before, the last answer included, and adds the user's words, after a pause to read and think. The pause is
never shorter than the answer takes: a turn that holds an answer cannot come before it. Nothing is taken from a
public file; the presets only resemble their kinds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

import msgspec

from millpond_gateway.routing.splitmix import SplitMix
from millpond_simulator.trace import BLOCK_TOKENS, TraceRequest


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a generated trace; lengths are medians of log-normal distributions."""

    num_requests: int = 4000
    sessions_per_second: float = 1.0
    mean_turns: float = 3.0
    think_seconds: float = 20.0
    num_prompts: int = 40
    prompt_tokens: int = 1500
    zipf: float = 1.0
    user_tokens: int = 900
    output_tokens: int = 250
    seconds_per_output_token: float = 0.0125
    """Of an unhurried engine; a turn that came sooner would reach gateways that have not heard of the one before."""
    spread: float = 0.9
    """Sigma of the logarithm of user and output lengths."""
    max_input_tokens: int = 120_000
    """No prompt is longer; the session whose turn reaches it ends there."""


CHAT = Workload(
    sessions_per_second=5.0,
    mean_turns=2.5,
    think_seconds=12.0,
    num_prompts=200,
    prompt_tokens=400,
    user_tokens=4000,
    output_tokens=350,
    spread=1.1,
)
"""Long-document chat: little is shared between sessions, much between turns."""
AGENT = Workload(
    sessions_per_second=10.0,
    mean_turns=8.0,
    think_seconds=0.6,
    num_prompts=12,
    prompt_tokens=9000,
    user_tokens=700,
    output_tokens=120,
)
"""Tool-calling agents: a few long prompts shared by all, quick turns."""
MIXED = Workload(
    sessions_per_second=6.0,
    mean_turns=4.0,
    think_seconds=3.0,
    num_prompts=60,
    prompt_tokens=6000,
    user_tokens=2500,
    output_tokens=120,
    spread=1.0,
)
"""More long prompts than one replica's cache holds together with its sessions."""
WORKLOADS = {"chat": CHAT, "agent": AGENT, "mixed": MIXED}


class _Ids:
    """Ids of blocks by the prefix they end."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], int] = {}

    def find(self, parent: int, content: int) -> int:
        return self._ids.setdefault((parent, content), len(self._ids))


class _Session:
    def __init__(self, number: int, prompt: int, prompt_tokens: int) -> None:
        self.number = number
        self.prompt = prompt
        self.prompt_tokens = prompt_tokens
        self.tokens = prompt_tokens
        """Tokens of the conversation so far."""


class _Generator:
    def __init__(self, workload: Workload, seed: int) -> None:
        self.workload = workload
        self.random = SplitMix(seed)
        self.ids = _Ids()
        weights = [1.0 / (rank + 1) ** workload.zipf for rank in range(workload.num_prompts)]
        self.shares = [total / sum(weights) for total in accumulate(weights)]
        self.prompt_lengths = [self.draw_length(workload.prompt_tokens) for _ in weights]

    def draw_length(self, median: int) -> int:
        angle = 2.0 * math.pi * self.random.uniform()
        radius = math.sqrt(-2.0 * math.log(1.0 - self.random.uniform()))
        return max(round(median * math.exp(self.workload.spread * radius * math.cos(angle))), 1)

    def draw_pause(self, mean: float) -> float:
        return -mean * math.log(1.0 - self.random.uniform())

    def open_session(self, number: int) -> _Session:
        prompt = min(bisect_left(self.shares, self.random.uniform()), len(self.shares) - 1)
        return _Session(number, prompt, self.prompt_lengths[prompt])

    def take_turn(self, session: _Session, seconds: float) -> TraceRequest:
        said = session.tokens + self.draw_length(self.workload.user_tokens)
        session.tokens = min(said, self.workload.max_input_tokens)
        output = self.draw_length(self.workload.output_tokens)
        request = TraceRequest(round(seconds * 1000), session.tokens, output, self._hash_ids(session))
        session.tokens += output
        return request

    def _hash_ids(self, session: _Session) -> tuple[int, ...]:
        """One id per block, the partial last one included: prompt blocks are shared, later ones the session's own."""
        parent = -1
        found: list[int] = []
        shared = session.prompt_tokens // BLOCK_TOKENS
        for position in range(math.ceil(session.tokens / BLOCK_TOKENS)):
            full = (position + 1) * BLOCK_TOKENS <= session.tokens
            owner = -1 - session.prompt if position < shared else session.number
            content = (owner << 32) + (position if full else (1 << 31) + session.tokens)
            parent = self.ids.find(parent, content)
            found.append(parent)
        return tuple(found)


def generate_trace(workload: Workload, *, seed: int) -> list[TraceRequest]:
    """Requests in order of time; the same seed gives the same trace."""
    generator = _Generator(workload, seed)
    requests: list[TraceRequest] = []
    started_at = 0.0
    number = 0
    while len(requests) < workload.num_requests:
        started_at += generator.draw_pause(1.0 / workload.sessions_per_second)
        session = generator.open_session(number)
        number += 1
        seconds = started_at
        keep_on = 1.0 - 1.0 / workload.mean_turns
        while session.tokens < workload.max_input_tokens:
            requests.append(generator.take_turn(session, seconds))
            if generator.random.uniform() >= keep_on:
                break
            answer_seconds = requests[-1].output_length * workload.seconds_per_output_token
            seconds += max(generator.draw_pause(workload.think_seconds), answer_seconds)
    last_start = started_at * 1000
    kept = [request for request in requests if request.timestamp <= last_start]
    return sorted(kept, key=lambda request: request.timestamp)
