"""Admission: which waiting requests enter the batch in this step, and why the others do not.

A request enters when its known tokens have room now and the forecast says that the pool will not
overflow later. One that does not fit may be passed a bounded number of times, then the queue waits
for it. One whose next block a running prefill is about to compute waits for that.
"""

from __future__ import annotations

from millpond_engine.core.blocks import count_blocks
from millpond_engine.core.builder import PlanBuilder
from millpond_engine.core.forecast import ComingBlocks, Forecast, is_due_a_guarantee
from millpond_engine.core.limits import check_gates
from millpond_engine.core.preemption import CLASS, get_victim_key, list_victims, preempt, schedule_chunk
from millpond_engine.core.sequence import Group, Sequence
from millpond_engine.core.state import State
from millpond_engine.records.request import WaitReason
from millpond_engine.records.step import BlockMove


class Admission:
    """Admits within one step."""

    def __init__(self, state: State, builder: PlanBuilder, now: float) -> None:
        self.state = state
        self.builder = builder
        self.now = now
        self._size = state.capacity.block_tokens
        self._look_again()
        self._deferred = False
        """The request just tried waits for a peer's prefix."""
        self._displaced = False
        """Others made way for the request just tried."""

    def _look_again(self) -> None:
        """Forget what was measured of the batch: somebody has left it."""
        self._forecast = Forecast(self.state)
        self._coming = ComingBlocks(self.state)

    def run(self) -> None:
        """Go through the queue in the policy's order."""
        settings = self.state.settings
        passed: list[Group] = []
        for number, group in enumerate(self.state.policy.order(self.state.queue, self.now)):
            if self.builder.budget <= 0 or number >= settings.max_candidates:
                break
            if group.preempted_step == self.builder.step:
                continue
            reason = self._try_group(group)
            if reason is None:
                self.state.counters.bypasses += len(passed)
                for other in passed:
                    other.num_bypasses += 1
                continue
            group.wait_reason = reason
            if reason is not WaitReason.CAPACITY or self._deferred:
                continue
            if self._displaced or group.num_bypasses >= settings.max_bypasses or not self.state.free_rows:
                break
            passed.append(group)

    def _try_group(self, group: Group) -> WaitReason | None:
        """Admit what can be admitted of a request; None if that is anything."""
        self._deferred = self._displaced = False
        reason = check_gates(self.state, group)
        if reason is not None:
            return reason
        admitted = self._admit(group)
        while not admitted and not self._deferred and self._displace(group):
            admitted = self._admit(group)
        if not admitted:
            return WaitReason.CAPACITY
        group.num_bypasses = 0
        self.state.enqueue(group, self.now)  # to the front with what is left of it, or out of the queue
        return None

    def _has_rows(self, group: Group) -> bool:
        needed = group.beam.width if group.beam and not group.running else 1
        return bool(group.spare_rows) or len(self.state.free_rows) >= needed

    def _admit(self, group: Group) -> bool:
        swapped = [sequence for sequence in group.waiting if sequence.host_table]
        if swapped:
            return self._swap_in(group, swapped)
        self.state.drop_host(group)
        admitted = False
        while self.builder.budget > 0 and self._has_rows(group):
            if not group.waiting:
                if not group.unborn or not group.prompt_reported:
                    break
                self.state.make_sample(group)
            if not self._admit_sequence(group.waiting[0]):
                break
            admitted = True
        return admitted

    def _admit_sequence(self, sequence: Sequence) -> bool:
        state, group, total = self.state, sequence.group, len(sequence.tokens)
        if sequence.flights:
            return False
        source = self._find_source(sequence)
        if source is None:
            hit = self._look_up(sequence)
            computed = min(len(hit) * self._size, total - 1)
        else:
            hit, computed = source.table[: count_blocks(total, self._size)], total - 1
        shares_last = computed < len(hit) * self._size and state.cache.pool.counts[hit[-1]] > 0
        needed = count_blocks(total, self._size) - len(hit) + shares_last
        if self._deferred or not self._forecast.fits(sequence, hit, needed):
            return False
        state.cache.retain(hit)
        self._start(sequence, hit, computed, len(hit))
        if source is not None:
            sequence.published, sequence.stale = min(source.published, len(hit)), source.stale
        if group.cached_tokens is None:
            group.cached_tokens = computed
            state.counters.prefix_query_tokens += sequence.prompt_tokens
            state.counters.prefix_hit_tokens += computed
        self._schedule(sequence, self.builder.budget)
        return True

    def _start(self, sequence: Sequence, table: list[int], computed: int, num_shared: int) -> None:
        state, group = self.state, sequence.group
        if group.beam is not None and not group.running:
            group.spare_rows = [state.free_rows.pop() for _ in range(group.beam.width)]
        group.guaranteed = group.guaranteed or is_due_a_guarantee(state, group)
        state.start(sequence, table, computed)
        sequence.shared = sequence.published = num_shared
        state.counters.recomputed_tokens += max(0, sequence.lost - computed)
        sequence.lost = 0

    def _schedule(self, sequence: Sequence, max_tokens: int) -> None:
        """Give the first chunk; the forecast found room, so nobody is preempted for it."""
        num_tokens = min(len(sequence.tokens) - sequence.computed, max_tokens)
        schedule_chunk(self.state, self.builder, sequence, num_tokens, self.now)
        self._forecast.add(sequence)
        self._coming.add(sequence)

    def _look_up(self, sequence: Sequence) -> list[int]:
        """Cached blocks to start from; notes when a peer is computing the next one."""
        group, cache = sequence.group, self.state.cache
        if not cache.enabled or group.wants_prompt_logprobs:
            return []
        tokens = sequence.tokens.tobytes() if sequence.num_output else group.prompt_bytes
        hit = cache.lookup(group.request.namespace, tokens)
        self._deferred = self._coming.includes(sequence, hit, tokens)
        return hit

    def _find_source(self, sequence: Sequence) -> Sequence | None:
        """A sample of the same request whose prompt was computed by an earlier step, for one that starts there."""
        if sequence.num_output or sequence.index == 0 or sequence.group.beam is not None:
            return None
        step = self.builder.step
        return next((peer for peer in sequence.group.running if 0 <= peer.ready_step < step), None)

    def _displace(self, group: Group) -> bool:
        """Preempt a request of a lower class if enough of them hold what this one needs."""
        state = self.state
        one_class = len(state.settings.classes) < 2
        if one_class or not state.policy.crosses_classes or state.cache.count_fenced():
            return False
        victims = [g for g in list_victims(state, self.builder) if g.rule.priority < group.rule.priority]
        gain = sum(len(sequence.table) for victim in victims for sequence in victim.running)
        needed = count_blocks(len(group.request.prompt), self._size)
        if not victims or needed > state.cache.pool.num_available + gain:
            return False
        preempt(state, self.builder, min(victims, key=get_victim_key), CLASS, self.now)
        self._displaced = True
        self._look_again()
        return True

    def _swap_in(self, group: Group, sequences: list[Sequence]) -> bool:
        """Bring a swapped request back as a whole: cached blocks are taken over, the rest is copied in."""
        state, builder = self.state, self.builder
        num_rows = group.beam.width if group.beam else len(sequences)
        if (
            any(s.flights for s in sequences)
            or len(state.free_rows) < num_rows
            or builder.budget < len(sequences)
        ):
            return False
        hits = {
            s: state.cache.lookup(group.request.namespace, s.tokens.tobytes())[: s.computed // self._size]
            for s in sequences
        }
        kept = dict.fromkeys(block for blocks in hits.values() for block in blocks)
        hosts = list(dict.fromkeys(host for s in sequences for host in s.host_table[len(hits[s]) :]))
        missing = sum(count_blocks(len(s.tokens), self._size) - len(s.host_table) for s in sequences)
        missing += (
            len(sequences) if group.beam else 0
        )  # shared last blocks are copied before they are written
        if not self._forecast.fits(sequences[0], kept, len(hosts) + missing):
            return False
        for blocks in hits.values():
            state.cache.retain(blocks)
        fresh = state.cache.allocate(len(hosts), group.account.owner)
        place = dict(zip(hosts, fresh, strict=True))
        builder.swap_in += [BlockMove(device, host) for host, device in place.items()]
        state.host.release(group.host_blocks, builder.step)
        group.host_blocks = []
        for sequence in sequences:
            hit = hits[sequence]
            tail = [place[host] for host in sequence.host_table[len(hit) :]]
            state.cache.retain(tail)
            self._start(sequence, hit + tail, sequence.computed, len(hit))
            sequence.host_table = []
            if sequence.computed >= sequence.prompt_tokens:
                sequence.ready_step = builder.step - 1
        state.cache.release(fresh, None)  # every table has its own references now
        for number, sequence in enumerate(sequences, 1):
            self._schedule(sequence, builder.budget - (len(sequences) - number))
        return True
