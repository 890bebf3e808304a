"""How each revision of a pool does since it was first seen: what a rollout's gate is judged from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from millpond_common.contract.gateway_report import RevisionReport
from millpond_gateway.flow.outliers import Evidence

_MAX_REVISIONS: Final = 16
_BUCKET_FLOOR_MILLISECONDS: Final = 1.0
_BUCKET_RATIO: Final = 1.1
"""Time buckets grow by a tenth: a percentile is at most that much too high."""
_NUM_BUCKETS: Final = 160


class _Trial:
    """Counts of one revision."""

    __slots__ = ("buckets", "num_failed", "num_requests")

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_failed = 0
        self.buckets: dict[int, int] = {}


class TrialBook:
    """Attempts and times to first token by revision, whole numbers that readers of several gateways can add up."""

    def __init__(self) -> None:
        self._trials: dict[str, _Trial] = {}
        self._revisions: dict[str, str] = {}

    def set_endpoints(self, revisions: Mapping[str, str]) -> None:
        """Follow the replicas (revision by pod); a revision without one is forgotten and would be measured anew."""
        self._revisions = dict(revisions)
        living = set(self._revisions.values())
        self._trials = {name: trial for name, trial in self._trials.items() if name in living}

    def note_attempt(self, pod: str, evidence: Evidence) -> None:
        """Count an attempt if it says something about the replica: a client's fault or an overload does not."""
        trial = self._find(pod)
        if trial is not None and evidence in {Evidence.SUCCESS, Evidence.FAULT}:
            trial.num_requests += 1
            trial.num_failed += evidence is Evidence.FAULT

    def note_first_token(self, pod: str, seconds: float) -> None:
        """Count the time to the first token of a request that the replica answered."""
        trial = self._find(pod)
        if trial is not None:
            bucket = _find_bucket(seconds)
            trial.buckets[bucket] = trial.buckets.get(bucket, 0) + 1

    def report(self) -> tuple[RevisionReport, ...]:
        """All revisions, by name."""
        return tuple(
            RevisionReport(
                revision=name,
                num_requests=trial.num_requests,
                num_failed=trial.num_failed,
                ttft_counts=tuple((_find_bound(b), n) for b, n in sorted(trial.buckets.items())),
            )
            for name, trial in sorted(self._trials.items())
        )

    def _find(self, pod: str) -> _Trial | None:
        revision = self._revisions.get(pod, "")
        trial = self._trials.get(revision)
        if trial is None and revision and len(self._trials) < _MAX_REVISIONS:
            trial = self._trials[revision] = _Trial()
        return trial


def _find_bucket(seconds: float) -> int:
    bucket, bound = 0, _BUCKET_FLOOR_MILLISECONDS
    while seconds * 1000 > bound and bucket < _NUM_BUCKETS - 1:
        bound *= _BUCKET_RATIO
        bucket += 1
    return bucket


def _find_bound(bucket: int) -> int:
    """Upper bound of a bucket, whole milliseconds."""
    return round(_BUCKET_FLOOR_MILLISECONDS * _BUCKET_RATIO**bucket)
