"""State of requests and their sequences while the scheduler owns them: two integers, a block table, a row."""

from __future__ import annotations

from array import array
from dataclasses import replace

from millpond_engine.core.beam import BeamSearch
from millpond_engine.core.settings import ClassRule
from millpond_engine.core.tree import Namespace
from millpond_engine.records.request import FinishReason, Request, SamplingParams, WaitReason
from millpond_engine.records.step import TokenLogprobs

NO_ROW = -1
_MASK = (1 << 64) - 1


class Account:
    """What one tenant used in one class, in computed tokens; virtual time is tokens over weight."""

    __slots__ = ("class_name", "num_running", "tenant", "tokens", "weight")

    def __init__(self, class_name: str, tenant: str, weight: int) -> None:
        self.class_name = class_name
        self.tenant = tenant
        self.weight = weight
        self.tokens = 0
        self.num_running = 0
        """Requests in the batch."""

    @property
    def virtual_time(self) -> float:
        """Service received, relative to the weight."""
        return self.tokens / self.weight


class Sequence:
    """One continuation. It is running (has a row), waiting or finished.

    `computed` counts tokens whose KV exists or is being computed by a planned step; a step hands out
    work until it reaches the number of tokens. `pending` is 1 while a planned step samples a token
    that has not been read back.
    """

    __slots__ = (
        "account", "branches", "branching", "chosen", "computed", "dirty", "finish", "flights", "fresh",
        "group", "host_table", "index", "last_step", "limit", "logprob_sum", "logprobs", "lost", "pending",
        "plain", "prompt_tokens", "published", "ready_step", "row", "seed", "shared", "stale", "table", "tokens",
    )  # fmt: skip

    def __init__(self, group: Group, index: int, tokens: array[int]) -> None:
        self.group = group
        self.account = group.account
        self.index = index
        self.tokens = tokens
        self.prompt_tokens = len(group.request.prompt)
        self.limit = self.prompt_tokens + group.request.stop.max_tokens
        self.seed = mix_seed(group.seed, index)
        self.computed = 0
        self.pending = 0
        self.table: list[int] = []
        self.published = 0
        """Leading blocks of the table that are in the prefix tree."""
        self.shared = 0
        """Leading blocks that were there before this sequence came."""
        self.stale = False
        """The cache was reset under it: its blocks must not become findable."""
        self.row = NO_ROW
        self.fresh = True
        """The runner does not know the row yet."""
        self.dirty = False
        """The runner's block table is out of date."""
        self.chosen: int | None = None
        """Token chosen by beam search that the runner has not been told."""
        self.flights = 0
        """Planned steps not read back."""
        self.last_step = -1
        self.ready_step = -1
        """Step that computed the end of the prompt; -1: not since the last admission."""
        self.branching = group.beam.count_branches(len(group.ends)) if group.beam else 0
        self.branches: tuple[tuple[int, float], ...] | None = None
        self.plain = group.request.sampling.num_prompt_logprobs is None
        """No log-probabilities of its prompt are asked for."""
        self.logprob_sum = 0.0
        self.logprobs: list[TokenLogprobs] = []
        """Kept only when the output is held back until the end."""
        self.finish: FinishReason | None = None
        self.host_table: list[int] = []
        self.lost = 0
        """Tokens computed before a preemption that threw them away."""

    @property
    def running(self) -> bool:
        """In the batch."""
        return self.row != NO_ROW

    @property
    def num_tokens(self) -> int:
        """Tokens known or about to be."""
        return len(self.tokens) + self.pending

    @property
    def num_output(self) -> int:
        """Generated tokens that have been read back."""
        return len(self.tokens) - self.prompt_tokens


class Group:
    """One request: its sequences, where it stands in the queue, and what it may still become."""

    __slots__ = (
        "account", "admission", "beam", "cached_tokens", "done", "ends", "guaranteed", "held",
        "host_blocks", "namespace", "num_bypasses", "num_preemptions", "preempted_step",
        "prompt_bytes", "prompt_logprobs", "prompt_reported", "request", "rule", "running", "sampling", "seed",
        "sort_key", "spare_rows", "started_step", "unborn", "wait_reason", "waiting", "waiting_since",
    )  # fmt: skip

    def __init__(
        self, request: Request, rule: ClassRule, account: Account, *, seed: int, ends: frozenset[int]
    ) -> None:
        self.request = request
        self.rule = rule
        self.account = account
        self.seed = seed
        self.ends = ends
        """Tokens that end a sequence."""
        self.beam = BeamSearch(request.beam, request.n, request.stop.max_tokens) if request.beam else None
        self.held = self.beam is not None or request.best_of > request.n
        """All output comes at the end."""
        self.sampling = make_sampling(request)
        self.namespace: Namespace = request.namespace
        tokens = array("I", request.prompt)
        self.prompt_bytes = tokens.tobytes()
        count = 1 if self.beam else max(request.n, request.best_of)
        self.waiting: list[Sequence] = [Sequence(self, 0, tokens)]
        self.running: list[Sequence] = []
        """In order of admission."""
        self.unborn = list(range(1, count))
        """Indices of samples that start from the computed prompt."""
        self.done: list[Sequence] = []
        self.spare_rows: list[int] = []
        """Rows kept for beams to come."""
        self.admission = 0
        """Order of admission to the batch; the last is the first victim."""
        self.started_step = -1
        """Step of the last admission; a request is no victim in the step that let it in."""
        self.preempted_step = -1
        self.num_preemptions = 0
        self.num_bypasses = 0
        self.guaranteed = False
        """Admitted with its whole length accounted for; no longer a victim."""
        self.host_blocks: list[int] = []
        self.wait_reason = WaitReason.CAPACITY
        self.waiting_since = request.arrival_seconds
        self.sort_key: tuple[float, ...] = ()
        self.cached_tokens: int | None = None
        """Prompt tokens found in the cache at the first admission."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.prompt_reported = False

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait to be computed."""
        return sum(len(sequence.tokens) - sequence.computed for sequence in self.waiting)

    @property
    def finished(self) -> bool:
        """Nothing is left to run."""
        return not (self.waiting or self.running or self.unborn)

    @property
    def swapped(self) -> bool:
        """Its KV lies in host memory."""
        return bool(self.host_blocks)

    def is_waiting(self) -> bool:
        """Something of it wants to enter the batch now."""
        return bool(self.waiting) or bool(self.unborn and self.prompt_reported)


def make_sampling(request: Request) -> SamplingParams:
    """The request's parameters; ranking samples needs the chosen tokens' log-probabilities."""
    sampling = request.sampling
    if request.best_of <= request.n or sampling.num_logprobs is not None:
        return sampling
    return replace(sampling, num_logprobs=0)


def mix_seed(seed: int, index: int) -> int:
    """A seed of 63 bits for one sequence; index 0 keeps the seed (SplitMix64 for the others)."""
    if index == 0:
        return seed & (_MASK >> 1)
    value = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (value ^ (value >> 31)) >> 1
