"""The waiting queue and the policies that order it.

A policy names a bucket for each waiting request, a static key that orders the bucket, and yields the
candidates of a step. Higher classes go first (except under Fifo); inside a class go, in this order,
requests that already hold blocks, recently preempted ones (a bounded boost), then the policy's choice.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import islice

from millpond_engine.core.sequence import Account, Group
from millpond_engine.records.settings import SchedulerSettings

SortKey = tuple[float, ...]
Head = tuple[SortKey, float, int, Iterator[Group], Group]
CountHit = Callable[[Group], int]
"""Prompt tokens of a waiting request that are cached."""


def get_sort_key(group: Group) -> SortKey:
    """The key set when the request was queued."""
    return group.sort_key


class WaitingQueue:
    """Waiting requests in sorted buckets."""

    def __init__(self) -> None:
        self.buckets: dict[Hashable, list[Group]] = {}
        self.num_by_class: dict[str, int] = {}
        self.num_tokens = 0
        """Tokens to compute of all waiting requests, cache not considered."""
        self._where: dict[Group, tuple[Hashable, int]] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, group: Group) -> bool:
        return group in self._where

    def __iter__(self) -> Iterator[Group]:
        return iter(self._where)

    def push(self, group: Group, bucket: Hashable, key: SortKey) -> None:
        """Queue a request that is not queued."""
        group.sort_key = key
        num_tokens = group.num_queued_tokens
        self._where[group] = (bucket, num_tokens)
        insort(self.buckets.setdefault(bucket, []), group, key=get_sort_key)
        self.num_tokens += num_tokens
        self.num_by_class[group.rule.name] = self.num_by_class.get(group.rule.name, 0) + 1

    def remove(self, group: Group) -> None:
        """Take a request out; nothing happens if it is not queued."""
        bucket, num_tokens = self._where.pop(group, (None, -1))
        if num_tokens < 0:
            return
        groups = self.buckets[bucket]
        index = bisect_left(groups, group.sort_key, key=get_sort_key)
        while groups[index] is not group:
            index += 1
        del groups[index]
        if not groups:
            del self.buckets[bucket]
        self.num_tokens -= num_tokens
        self.num_by_class[group.rule.name] -= 1


class Policy:
    """First come, first served within a class; the base of the others."""

    crosses_classes = True
    """Higher classes go first, and a waiting request preempts running ones of lower classes."""

    def __init__(self, settings: SchedulerSettings, count_hit: CountHit) -> None:
        self.settings = settings
        self.count_hit = count_hit

    def get_bucket(self, group: Group) -> Hashable:
        """Requests of one bucket are ordered by key alone."""
        del group
        return 0

    def make_key(self, group: Group) -> SortKey:
        """Order inside the bucket."""
        level = -group.rule.priority if self.crosses_classes else 0
        return (level, self.rank(group), *self.prefer(group), group.request.arrival_seconds)

    def prefer(self, group: Group) -> SortKey:
        """What comes before arrival."""
        del group
        return ()

    def rank(self, group: Group) -> int:
        """0: holds blocks; 1: preempted a few times; 2: the rest."""
        if group.running:
            return 0
        return 1 if 0 < group.num_preemptions <= self.settings.max_boosts else 2

    def order(self, queue: WaitingQueue, now: float) -> Iterator[Group]:
        """Candidates of one step; a tenant's virtual time is read again after each of its candidates."""
        del now
        heads: list[Head] = []
        for number, groups in enumerate(queue.buckets.values()):
            _push(heads, number, iter(groups[: self.settings.max_candidates]))
        while heads:
            _, _, number, rest, group = heappop(heads)
            yield group
            _push(heads, number, rest)


class Fifo(Policy):
    """Arrival order, classes ignored."""

    crosses_classes = False


class Priority(Policy):
    """Class, then the request's own priority."""

    def prefer(self, group: Group) -> SortKey:
        """Lower numbers first."""
        return (group.request.priority,)


class Deadline(Policy):
    """Earliest deadline first inside a class.

    A request without deadline gets its class's target; every deadline is capped at arrival plus
    `starvation_seconds`, so no request waits longer than that behind later arrivals.
    """

    def prefer(self, group: Group) -> SortKey:
        """The effective deadline."""
        request = group.request
        latest = request.arrival_seconds + self.settings.starvation_seconds
        target = group.rule.ttft_seconds
        due = request.deadline_seconds
        if due is None:
            due = latest if target is None else request.arrival_seconds + target
        return (min(due, latest),)


class LongestPrefix(Policy):
    """Most cached prompt tokens first, so that hits are used before they are evicted.

    Falls back to arrival order on long queues, where sorting would cost more than it brings, and for
    requests that have waited `starvation_seconds`.
    """

    def order(self, queue: WaitingQueue, now: float) -> Iterator[Group]:
        """Candidates by class, rank and cached tokens."""
        groups = list(super().order(queue, now))
        if len(queue) > self.settings.max_prefix_sorted:
            return iter(groups)
        oldest = now - self.settings.starvation_seconds

        def key(group: Group) -> SortKey:
            starved = group.request.arrival_seconds < oldest
            hit = 0 if starved else self.count_hit(group)
            return (*group.sort_key[:2], 0 if starved else 1, -hit, group.sort_key[-1])

        return iter(sorted(groups, key=key))


class FairShare(Policy):
    """Weighted fair queueing of tenants inside a class, charged in computed tokens.

    The tenant with the least virtual time is served next; inside a tenant, priority, then deadline,
    then arrival (deficits in the spirit of VTC, arXiv 2401.00588).
    """

    def get_bucket(self, group: Group) -> Hashable:
        """One per class and tenant."""
        return group.account

    def prefer(self, group: Group) -> SortKey:
        """Inside a tenant."""
        deadline = group.request.deadline_seconds
        return (group.request.priority, float("inf") if deadline is None else deadline)


def _push(heads: list[Head], number: int, rest: Iterator[Group]) -> None:
    for group in islice(rest, 1):
        heappush(heads, (group.sort_key[:2], group.account.virtual_time, number, rest, group))


POLICIES: dict[str, type[Policy]] = {
    policy.__name__: policy for policy in (FairShare, Fifo, Priority, Deadline, LongestPrefix)
}


def wake_account(account: Account, busy: Iterable[Account]) -> None:
    """Let a tenant that was idle start at the active minimum, so that idleness earns no credit."""
    times = [other.virtual_time for other in busy if other.class_name == account.class_name]
    account.tokens = max(account.tokens, int(min(times, default=0.0) * account.weight))
