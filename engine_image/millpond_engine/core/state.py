"""Everything the scheduler knows, and the transitions every phase of a step uses.

A request is in the queue when something of it wants to enter the batch, in the batch while a
sequence of it has a row; with several samples it can be both. Blocks and rows are given back in one
place, `release`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from itertools import product

from millpond_engine.core.blocks import HostPool
from millpond_engine.core.builder import PlanBuilder
from millpond_engine.core.cache import KvCache
from millpond_engine.core.estimate import OutputEstimate
from millpond_engine.core.queue import POLICIES, WaitingQueue, wake_account
from millpond_engine.core.sequence import NO_ROW, NO_ROW_TOLD, Account, Group, Sequence, make_group, mix_seed
from millpond_engine.records.capacity import Capacity
from millpond_engine.records.outputs import Preempted, PromptOutput, SequenceOutput, StepOutput
from millpond_engine.records.request import FinishReason, PreemptionMode, Refusal, Request
from millpond_engine.records.settings import ClassRule, SchedulerSettings, TenantRule

_MAX_ACCOUNTS = 1024
"""Beyond this many, accounts of tenants without an open request are forgotten."""


@dataclass(slots=True)
class Counters:
    """Totals since the start, by the names they have in `SchedulerCounts`."""

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    recomputed_tokens: int = 0
    failed_allocations: int = 0
    preemptions: int = 0
    bypasses: int = 0


@dataclass(slots=True)
class News:
    """What the next StepOutput will say."""

    sequences: list[SequenceOutput]
    prompts: list[PromptOutput]
    finished: list[str]
    refusals: list[Refusal]
    preemptions: list[Preempted]


class State:
    """The scheduler's memory."""

    def __init__(self, settings: SchedulerSettings, capacity: Capacity) -> None:
        self.settings = settings
        self.capacity = capacity
        self.host = HostPool(capacity.num_host_blocks)
        self.queue = WaitingQueue()
        self.policy = POLICIES[settings.policy](settings, self.count_hit)
        self.groups: dict[str, Group] = {}
        self.running: dict[Sequence, None] = {}
        self.free_rows = list(range(settings.max_sequences - 1, -1, -1))
        self.dropped_rows: list[int] = []
        """Rows the runner must forget with the next plan."""
        self.flights: dict[int, tuple[Sequence, ...]] = {}
        """Planned steps not read back, with the sequences of their rows."""
        self.step = 0
        self.estimate = OutputEstimate()
        self.prefill_speed: float | None = None
        """Measured prompt tokens per second."""
        self.counters = Counters()
        self.last_mode: PreemptionMode | None = None
        self.accounts: dict[tuple[str, str], Account] = {}
        self._classes = {rule.name: rule for rule in settings.classes}
        self._tenants = {rule.name: rule for rule in settings.tenants}
        classes, tenants = {*self._classes, settings.default_class}, {*self._tenants, ""}
        self.owners = {pair: number for number, pair in enumerate(product(sorted(classes), sorted(tenants)))}
        """Numbers of (class, declared tenant or nothing)."""
        self.cache = KvCache(settings, capacity, self.owners)
        self._num_admissions = 0
        self._num_seeds = 0
        self.news = News([], [], [], [], [])

    # -- rules

    def get_class(self, name: str) -> ClassRule:
        """Rule of a class; an undeclared one has the default class's rule."""
        rule = self._classes.get(name) or self._classes.get(self.settings.default_class)
        return rule or ClassRule(self.settings.default_class)

    def get_tenant(self, name: str) -> TenantRule:
        """Rule of a tenant."""
        return self._tenants.get(name) or TenantRule(name)

    def count_running(self, tenant: str) -> int:
        """Requests of a tenant in the batch, all classes together."""
        return sum(account.num_running for account in self.accounts.values() if account.tenant == tenant)

    def count_hit(self, group: Group) -> int:
        """Prompt tokens of a request that are cached now."""
        return (
            len(self.cache.lookup(group.request.namespace, group.prompt_bytes)) * self.capacity.block_tokens
        )

    # -- life of a request

    def make_group(self, request: Request) -> Group:
        """Set up the state of a new request."""
        rule, stop, seed = self.get_class(request.class_name), request.stop, request.sampling.seed
        ends = {*stop.stop_token_ids, *(() if stop.ignore_eos else self.capacity.eos_token_ids)}
        if seed is None:
            self._num_seeds += 1
            seed = mix_seed(self.settings.base_seed, self._num_seeds)
        account = self._get_account(rule.name, request.tenant)
        return make_group(request, rule, account, seed=seed, ends=frozenset(ends))

    def enqueue(self, group: Group, now: float) -> None:
        """Put a request with waiting sequences into the queue, or move it to its new place."""
        if group in self.queue:
            self.queue.remove(group)
        else:
            group.waiting_since = now
        if group.is_waiting():
            self.queue.push(group, self.policy.get_bucket(group), self.policy.make_key(group))

    def start(self, sequence: Sequence, table: list[int], computed: int) -> None:
        """Give a waiting sequence a row and a table whose references it already holds."""
        group = sequence.group
        if not group.running:
            self._num_admissions += 1
            group.admission = self._num_admissions
            group.account.num_running += 1
        group.started_step = self.step
        sequence.row = group.spare_rows.pop() if group.spare_rows else self.free_rows.pop()
        sequence.table, sequence.computed = table, computed
        sequence.told = NO_ROW_TOLD
        sequence.stale = False
        sequence.ready_step = -1
        group.waiting.remove(sequence)
        group.running.append(sequence)
        self.running[sequence] = None

    def release(self, sequence: Sequence, builder: PlanBuilder | None = None) -> None:
        """Take row and blocks from a running sequence; blocks of a step in flight wait for its end."""
        group = sequence.group
        fence = self.newest_flight() if sequence.flights else None
        if (
            builder is not None
            and fence is None
            and not builder.list_copy_sources().isdisjoint(sequence.table)
        ):
            fence = builder.step
        self.cache.release(sequence.table, fence)
        if sequence.told != NO_ROW_TOLD:
            self.dropped_rows.append(sequence.row)
        (self.free_rows if group.beam is None else group.spare_rows).append(sequence.row)
        sequence.row = NO_ROW
        sequence.table = []
        sequence.published = sequence.shared = 0
        sequence.chosen = None
        del self.running[sequence]
        group.running.remove(sequence)
        if not group.running:
            self.free_rows += group.spare_rows
            group.spare_rows.clear()
            group.account.num_running -= 1

    def forget(self, group: Group, finish: FinishReason) -> None:
        """Drop all that is left of a request: running, waiting, swapped and unborn sequences."""
        for sequence in [*group.running, *group.waiting]:
            sequence.finish = finish
        for sequence in list(group.running):
            self.release(sequence)
        group.waiting.clear()
        group.unborn.clear()
        self.drop_host(group)
        self.queue.remove(group)
        del self.groups[group.request.request_id]

    def drop_host(self, group: Group) -> None:
        """Give back the host blocks of a request that no longer needs them."""
        if group.host_blocks:
            self.host.release(group.host_blocks, self.newest_flight())
            group.host_blocks = []

    def end_step(self, step: int) -> None:
        """Release what was fenced behind a step."""
        self.cache.end_step(step)
        self.host.end_step(step)

    def newest_flight(self) -> int | None:
        """The last planned step that has not been read back."""
        return max(self.flights, default=None)

    def make_sample(self, group: Group) -> Sequence:
        """Bring the next sample of a request to life; it starts from the prompt."""
        sequence = Sequence(group, group.unborn.pop(0), array("I", group.request.prompt))
        group.waiting.append(sequence)
        return sequence

    def fork(self, parent: Sequence) -> Sequence:
        """Copy a running beam: the child shares all blocks; who writes the last one first copies it."""
        child = replace(
            parent, tokens=array("I", parent.tokens), table=list(parent.table), shared=len(parent.table)
        )
        child.row, child.told = parent.group.spare_rows.pop(), NO_ROW_TOLD
        self.cache.retain(child.table)
        parent.group.running.append(child)
        self.running[child] = None
        return child

    def take_output(self) -> StepOutput:
        """Hand out the news."""
        news, self.news = self.news, News([], [], [], [], [])
        return StepOutput(
            sequences=tuple(news.sequences),
            prompts=tuple(news.prompts),
            finished_requests=tuple(news.finished),
            refusals=tuple(news.refusals),
            cache_events=self.cache.take_events(),
            preemptions=tuple(news.preemptions),
        )

    def _get_account(self, class_name: str, tenant: str) -> Account:
        busy = {group.account for group in self.groups.values()}
        if len(self.accounts) >= _MAX_ACCOUNTS:  # idle ones start at the active minimum anyway
            self.accounts = {key: account for key, account in self.accounts.items() if account in busy}
        account = self.accounts.get((class_name, tenant))
        if account is None:
            owner = self.owners[class_name, tenant if tenant in self._tenants else ""]
            account = Account(class_name, tenant, self.get_tenant(tenant).weight, owner)
            self.accounts[class_name, tenant] = account
        if account not in busy:
            wake_account(account, busy)
        return account
