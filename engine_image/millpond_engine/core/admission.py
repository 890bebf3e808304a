"""Admission: which waiting requests enter the batch in this step, and why the others do not.

A request enters when its next tokens have room now and the pool, as far as expected output lengths
tell, will not overflow later. One that does not fit may be passed a bounded number of times, then
the queue waits for it. One whose next block a running prefill is about to compute waits for that.
"""

from __future__ import annotations

from bisect import insort

from millpond_engine.core.blocks import count_blocks
from millpond_engine.core.builder import PlanBuilder
from millpond_engine.core.estimate import compute_peak_blocks
from millpond_engine.core.limits import count_group_blocks
from millpond_engine.core.preemption import CLASS, find_lower_class_victims, preempt
from millpond_engine.core.request import WaitReason
from millpond_engine.core.sequence import Group, Sequence
from millpond_engine.core.shares import check_gates
from millpond_engine.core.state import State
from millpond_engine.core.step import BlockMove
from millpond_engine.core.tree import make_child_key

BlockIdentity = tuple[object, bytes]
"""A block to be computed: its parent (block, or namespace at the root) and its tokens."""


class Admission:
    """Admits within one step."""

    def __init__(self, state: State, builder: PlanBuilder, now: float) -> None:
        self.state = state
        self.builder = builder
        self.now = now
        self._size = state.capacity.block_tokens
        self._load: list[tuple[int, int]] | None = None
        self._allocated = 0
        self._coming: dict[BlockIdentity, int] | None = None
        self._deferred = False
        """The request just tried waits for a peer's prefix."""
        self._displaced = False
        """Others made way for the request just tried."""

    def run(self) -> None:
        """Go through the queue in the policy's order."""
        state = self.state
        passed: list[Group] = []
        for number, group in enumerate(state.policy.order(state.queue, self.now)):
            if self.builder.budget <= 0 or number >= state.settings.max_candidates:
                break
            if group.preempted_step == self.builder.step:
                continue
            self._deferred = self._displaced = False
            reason = self._try_group(group)
            if reason is None:
                self._count_bypasses(passed)
                continue
            group.wait_reason = reason
            if reason is not WaitReason.CAPACITY or self._deferred:
                continue
            if (
                self._displaced
                or group.num_bypasses >= state.settings.max_bypasses
                or not self._has_rows(group)
            ):
                break
            passed.append(group)

    def _count_bypasses(self, passed: list[Group]) -> None:
        self.state.counters.bypasses += len(passed)
        for group in passed:
            group.num_bypasses += 1

    def _try_group(self, group: Group) -> WaitReason | None:
        """Admit what can be admitted of a request; None if that is anything."""
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
        if not self._has_rows(group):
            return False
        if group.swapped and any(sequence.host_table for sequence in group.waiting):
            return self._swap_in(group)
        if group.swapped:  # what was swapped out has ended
            self.state.drop_host(group)
        admitted = False
        while self.builder.budget > 0 and self._has_rows(group):
            if not group.waiting:
                if not group.unborn or not group.prompt_reported:
                    break
                self.state.make_sample(group)
            sequence = group.waiting[0]
            if sequence.flights or not self._admit_sequence(sequence):
                break
            admitted = True
        return admitted

    def _admit_sequence(self, sequence: Sequence) -> bool:
        state, group = self.state, sequence.group
        source = self._find_source(sequence)
        if source is not None:
            hit, computed = (
                source.table[: count_blocks(sequence.prompt_tokens, self._size)],
                len(sequence.tokens) - 1,
            )
        else:
            hit, computed = self._find_start(sequence)
        if self._deferred:
            return False
        shared_tail = computed < len(hit) * self._size and state.cache.pool.counts[hit[-1]] > 0
        needed = count_blocks(len(sequence.tokens), self._size) - len(hit) + shared_tail
        if not self._fits(sequence, hit, needed):
            return False
        state.cache.retain(hit)
        self._start(sequence, hit, computed)
        if source is not None:
            sequence.published, sequence.stale = min(source.published, len(hit)), source.stale
        if group.cached_tokens is None:
            group.cached_tokens = computed
            state.counters.prefix_query_tokens += sequence.prompt_tokens
            state.counters.prefix_hit_tokens += computed
        self._schedule_first(sequence, len(sequence.tokens))
        return True

    def _start(self, sequence: Sequence, table: list[int], computed: int) -> None:
        state, group = self.state, sequence.group
        if group.beam is not None and not group.running:
            group.spare_rows = [state.free_rows.pop() for _ in range(group.beam.width)]
        group.guaranteed = group.guaranteed or group.num_preemptions >= state.settings.max_preemptions
        state.start(sequence, table, computed)
        sequence.shared = sequence.published = len(table)
        state.counters.recomputed_tokens += max(0, sequence.lost - computed)
        sequence.lost = 0

    def _schedule_first(self, sequence: Sequence, max_tokens: int) -> None:
        """Give the first chunk; the room was checked, so nobody is preempted for it."""
        cache, builder = self.state.cache, self.builder
        start, table = sequence.computed, sequence.table
        index = start // self._size
        if index < len(table) and cache.pool.counts[table[index]] > 1:
            target = cache.allocate(1)[0]
            builder.copy_block(sequence, table[index], target)
            cache.release([table[index]], None)
            table[index] = target
            sequence.published = min(sequence.published, index)
            sequence.shared = min(sequence.shared, index)
        num_tokens = min(len(sequence.tokens) - start, builder.budget, max_tokens)
        missing = count_blocks(start + num_tokens, self._size) - len(table)
        table += cache.allocate(missing)
        builder.schedule(sequence, num_tokens, ())
        self._announce(sequence)
        self._add_load(sequence)

    def _find_start(self, sequence: Sequence) -> tuple[list[int], int]:
        """Cached blocks to take over and tokens computed in them; notes if a peer is computing the next block."""
        group, total = sequence.group, len(sequence.tokens)
        if group.sampling.num_prompt_logprobs is not None and not group.prompt_reported:
            return [], 0
        tokens = group.prompt_bytes if total == sequence.prompt_tokens else sequence.tokens.tobytes()
        hit = self.state.cache.lookup(group.namespace, tokens)
        self._deferred = self.state.cache.enabled and self._is_coming(sequence, hit, tokens)
        return hit, min(len(hit) * self._size, total - 1)

    def _find_source(self, sequence: Sequence) -> Sequence | None:
        """A sample of the same request whose prompt was computed by an earlier step, for one that starts there."""
        if sequence.num_output or sequence.index == 0 or sequence.group.beam is not None:
            return None
        step = self.builder.step
        peers = (peer for peer in sequence.group.running if 0 <= peer.ready_step < step)
        return next(peers, None)

    # -- room

    def _fits(self, sequence: Sequence, hit: list[int], needed: int) -> bool:
        """Room now for all known tokens, and later for the expected growth of everybody."""
        state = self.state
        available = state.cache.count_available_without(hit) - self._count_promised()
        if needed > available:
            return False
        load = self._get_load()
        if not load:
            return True
        if sequence.group.num_preemptions >= state.settings.max_preemptions and not self._fits_guaranteed(
            sequence.group
        ):
            return False
        mine = (self._expect(sequence), needed)
        merged = list(load)
        insort(merged, mine, key=lambda entry: -entry[0])
        watermark = count_blocks(state.capacity.num_blocks * state.settings.watermark_percent, 100)
        return (
            compute_peak_blocks(merged, self._size)
            <= available + self._count_promised() + self._allocated - watermark
        )

    def _fits_guaranteed(self, group: Group) -> bool:
        """All guaranteed requests together fit the pool at their full length."""
        running = {sequence.group for sequence in self.state.running}
        groups = [other for other in running if other.guaranteed and other is not group]
        total = sum(count_group_blocks(other.request, self.state.settings, self.state.capacity) for other in [*groups, group])
        return total <= self.state.capacity.num_blocks

    def _count_promised(self) -> int:
        """Blocks that admitted, unfinished prefills and the waiting beams of running searches still need."""
        promised = 0
        for sequence in self.state.running:
            missing = count_blocks(sequence.num_tokens, self._size) - len(sequence.table)
            promised += max(0, missing)
        return promised

    def _get_load(self) -> list[tuple[int, int]]:
        if self._load is None:
            self._load = []
            for sequence in self.state.running:
                self._add_load(sequence)
        return self._load

    def _add_load(self, sequence: Sequence) -> None:
        """Note a running sequence's expected end and the blocks it will then give back."""
        if self._load is None:
            return
        private = len(sequence.table) - sequence.shared
        planned = max(private, count_blocks(sequence.num_tokens, self._size) - sequence.shared)
        insort(self._load, (self._expect(sequence), planned), key=lambda entry: -entry[0])
        self._allocated += private

    def _expect(self, sequence: Sequence) -> int:
        limit = sequence.group.request.stop.max_tokens
        if sequence.group.guaranteed:
            return limit - sequence.num_output
        return self.state.estimate.compute_remaining(sequence.num_output, limit)

    # -- higher classes

    def _displace(self, group: Group) -> bool:
        """Preempt requests of lower classes if that lets this one in; True when it now may fit."""
        state = self.state
        if not state.policy.crosses_classes or (group.waiting and group.waiting[0].flights):
            return False
        victims = find_lower_class_victims(state, self.builder, group)
        if not victims or state.cache.count_fenced():
            return False
        needed = count_blocks(len(group.request.prompt), self._size)
        gain = state.cache.num_available + sum(len(s.table) for victim in victims for s in victim.running)
        if needed > gain:
            return False
        preempt(state, self.builder, victims[0], CLASS, self.now)
        self._displaced = True
        self._load = None
        self._allocated = 0
        self._coming = None
        return True

    # -- prefixes about to be computed

    def _is_coming(self, sequence: Sequence, hit: list[int], tokens: bytes) -> bool:
        offset = len(hit) * self._size
        if len(sequence.tokens) - 1 < offset + self._size:
            return False
        if self._coming is None:
            self._coming = {}
            for running in self.state.running:
                self._announce(running)
        parent: object = hit[-1] if hit else sequence.group.namespace
        key = (parent, make_child_key(tokens, offset * 4, self._size * 4))
        priority = self._coming.get(key)
        return priority is not None and priority >= sequence.group.rule.priority

    def _announce(self, sequence: Sequence) -> None:
        """Note the next block of a running prefill that is not findable yet."""
        start = sequence.published * self._size
        if self._coming is None or len(sequence.tokens) < start + self._size or sequence.stale:
            return
        parent: object = (
            sequence.table[sequence.published - 1] if sequence.published else sequence.group.namespace
        )
        key = (parent, sequence.tokens[start : start + self._size].tobytes())
        self._coming[key] = max(
            sequence.group.rule.priority, self._coming.get(key, sequence.group.rule.priority)
        )

    # -- swapped requests

    def _swap_in(self, group: Group) -> bool:
        """Bring a swapped request back as a whole: cached blocks are taken over, the rest is copied in."""
        state = self.state
        sequences = [sequence for sequence in group.waiting if sequence.host_table]
        if any(sequence.flights for sequence in sequences):
            return False
        if len(state.free_rows) < (group.beam.width if group.beam else len(sequences)):
            return False
        hits = {s: self._find_cached(s) for s in sequences}
        kept = list(dict.fromkeys(block for blocks in hits.values() for block in blocks))
        hosts = list(dict.fromkeys(host for s in sequences for host in s.host_table[len(hits[s]) :]))
        missing = sum(count_blocks(len(s.tokens), self._size) - len(s.host_table) for s in sequences)
        missing += len(sequences) if group.beam else 0  # shared tails are copied before they are written
        if self.builder.budget < len(sequences) or not self._fits(sequences[0], kept, len(hosts) + missing):
            return False
        for blocks in hits.values():
            state.cache.retain(blocks)
        place = dict(zip(hosts, state.cache.allocate(len(hosts)), strict=True))
        self.builder.swap_in += [BlockMove(device, host) for host, device in place.items()]
        used: set[int] = set()
        for sequence in sequences:
            tail = [place[host] for host in sequence.host_table[len(hits[sequence]) :]]
            state.cache.retain(block for block in tail if block in used)
            used.update(tail)
            self._start(sequence, hits[sequence] + tail, sequence.computed)
            sequence.shared = sequence.published = len(hits[sequence])
            sequence.host_table = []
            sequence.ready_step = self.builder.step - 1 if sequence.computed >= sequence.prompt_tokens else -1
        for number, sequence in enumerate(sequences, 1):
            self._schedule_first(sequence, self.builder.budget - (len(sequences) - number))
        state.host.release(group.host_blocks, self.builder.step)
        group.host_blocks = []
        group.swapped = False
        return True

    def _find_cached(self, sequence: Sequence) -> list[int]:
        hit = self.state.cache.lookup(sequence.group.namespace, sequence.tokens.tobytes())
        return hit[: sequence.computed // self._size]
