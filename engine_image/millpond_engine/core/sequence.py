"""State of requests and their sequences while the scheduler owns them: two integers, a block table, a row."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace

from millpond_engine.core.beam import BeamSearch
from millpond_engine.records.grammar import Guide
from millpond_engine.records.request import FinishReason, Request, SamplingParams, WaitReason
from millpond_engine.records.settings import ClassRule
from millpond_engine.records.step import TokenLogprobs

NO_ROW = -1
NO_ROW_TOLD = -1
"""The runner does not know the sequence."""
_MASK = (1 << 64) - 1


@dataclass(slots=True, eq=False)
class Account:
    """What one tenant used in one class, in computed tokens; virtual time is tokens over weight."""

    class_name: str
    tenant: str
    weight: int
    owner: int
    """Number under which its blocks are counted; tenants nobody declared share one a class."""
    tokens: int = 0
    num_running: int = 0
    """Requests in the batch."""

    @property
    def virtual_time(self) -> float:
        """Service received, relative to the weight."""
        return self.tokens / self.weight


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One continuation. It is running (has a row), waiting or finished.

    `computed` counts tokens whose KV exists or is being computed by a planned step; a step hands out
    work until it reaches the number of tokens. `pending` counts the tokens that planned steps sample
    and that have not been read back.
    """

    group: Group
    index: int
    tokens: array[int]
    prompt_tokens: int = field(init=False)
    limit: int = field(init=False)
    """Tokens it may have, prompt included."""
    computed: int = 0
    pending: int = 0
    table: list[int] = field(default_factory=list)
    told: int = NO_ROW_TOLD
    """Leading blocks of the table that the runner knows; 0: its whole table is out of date."""
    published: int = 0
    """Leading blocks of the table that are in the prefix tree."""
    shared: int = 0
    """Leading blocks that were there before this sequence came."""
    stale: bool = False
    """The cache was reset under it: its blocks must not become findable."""
    row: int = NO_ROW
    chosen: int | None = None
    """Token chosen by beam search that the runner has not been told."""
    flights: int = 0
    """Planned steps not read back."""
    last_step: int = -1
    ready_step: int = -1
    """Step that computed the end of the prompt; -1: not since the last admission."""
    branches: tuple[tuple[int, float], ...] | None = None
    logprob_sum: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Kept only when the output is held back until the end."""
    finish: FinishReason | None = None
    guide: Guide | None = None
    """Where it stands in its request's grammar; made when the first mask is asked for."""
    host_table: list[int] = field(default_factory=list)
    lost: int = 0
    """Tokens computed before a preemption that threw them away."""

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.group.request.prompt)
        self.limit = self.prompt_tokens + self.group.request.stop.max_tokens

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


@dataclass(slots=True, eq=False, repr=False)
class Group:
    """One request: its sequences, where it stands in the queue, and what it may still become."""

    request: Request
    rule: ClassRule
    account: Account
    seed: int
    ends: frozenset[int]
    """Tokens that end a sequence."""
    sampling: SamplingParams
    beam: BeamSearch | None = None
    branching: int = 0
    """Branches each beam reports instead of sampling."""
    held: bool = False
    """All output comes at the end."""
    prompt_bytes: bytes = b""
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    """In order of admission."""
    unborn: list[int] = field(default_factory=list)
    """Indices of samples that start from the computed prompt."""
    done: list[Sequence] = field(default_factory=list)
    spare_rows: list[int] = field(default_factory=list)
    """Rows kept for beams to come."""
    admission: int = 0
    """Order of admission to the batch; the last is the first victim."""
    started_step: int = -1
    """Step of the last admission; a request is no victim in the step that let it in."""
    preempted_step: int = -1
    num_preemptions: int = 0
    num_bypasses: int = 0
    guaranteed: bool = False
    """Admitted with its whole length accounted for; no longer a victim."""
    host_blocks: list[int] = field(default_factory=list)
    wait_reason: WaitReason = WaitReason.CAPACITY
    waiting_since: float = 0.0
    sort_key: tuple[float, ...] = ()
    cached_tokens: int | None = None
    """Prompt tokens found in the cache at the first admission."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_reported: bool = False

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait to be computed."""
        return sum(len(sequence.tokens) - sequence.computed for sequence in self.waiting)

    @property
    def finished(self) -> bool:
        """Nothing is left to run."""
        return not (self.waiting or self.running or self.unborn)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Log-probabilities of its prompt are asked for and not told yet."""
        return not self.prompt_reported and self.sampling.num_prompt_logprobs is not None

    def is_waiting(self) -> bool:
        """Something of it wants to enter the batch now."""
        return bool(self.waiting) or bool(self.unborn and self.prompt_reported)


def make_group(
    request: Request, rule: ClassRule, account: Account, *, seed: int, ends: frozenset[int]
) -> Group:
    """A request's first sequence, and the samples that will start from its computed prompt."""
    best_of, sampling = request.best_of > request.n, request.sampling
    if best_of and sampling.num_logprobs is None:  # ranking needs the chosen tokens' log-probabilities
        sampling = replace(sampling, num_logprobs=0)
    group = Group(request, rule, account, seed, ends, sampling, held=best_of)
    tokens = array("I", request.prompt)
    group.prompt_bytes = tokens.tobytes()
    group.waiting.append(Sequence(group, 0, tokens))
    if request.beam is None:
        group.unborn += range(1, max(request.n, request.best_of))
    else:
        group.beam = BeamSearch(request.beam, request.n, request.stop.max_tokens)
        group.branching = group.beam.count_branches(len(ends))
        group.held = True
    return group


def mix_seed(seed: int, index: int) -> int:
    """A seed of 63 bits for one sequence; index 0 keeps the seed (SplitMix64 for the others)."""
    if index == 0:
        return seed & (_MASK >> 1)
    value = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (value ^ (value >> 31)) >> 1
