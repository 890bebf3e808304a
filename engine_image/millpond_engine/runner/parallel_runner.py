"""Rank 0 of an engine whose model is shared by several processes or GPUs of one node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from millpond_common.contract.engine_config import EngineConfig
from millpond_engine.engine.runner import PendingStep, Runner, RunnerError, RunnerInfo
from millpond_engine.model.split import Share
from millpond_engine.records.grammar import TokenMasks
from millpond_engine.records.step import StepPlan, StepResult
from millpond_engine.runner.collectives import TorchCollectives
from millpond_engine.runner.group import RankGroup
from millpond_engine.runner.load import LoadedRank, load_rank
from millpond_engine.runner.ranks import Order, RankProcesses


@dataclass(frozen=True, slots=True)
class ParallelStep:
    """A step that all ranks do."""

    pending: PendingStep
    ranks: RankProcesses

    def choose(self, masks: TokenMasks) -> None:
        """Let all ranks choose under the same masks.

        Raises:
            RankLostError: a rank is gone, hangs, or the step failed.
        """
        self.ranks.order(Order(masks=masks))
        try:
            self.pending.choose(masks)
        except RunnerError as error:
            raise self.ranks.explain(str(error)) from error

    def result(self) -> StepResult:
        try:
            return self.pending.result()
        except RuntimeError as error:
            raise self.ranks.explain(f"a step failed: {error}") from error


class ParallelRunner:
    """Sends every plan to all ranks and runs its own share of it; not thread-safe.

    All ranks choose the same tokens from the same gathered scores, so nothing but plans and
    masks goes to the others. A step
    that fails on one rank leaves the others elsewhere: it ends the engine, where a single rank's ends its requests.
    """

    def __init__(self, inner: Any, ranks: RankProcesses, collectives: TorchCollectives) -> None:
        self._inner = inner
        self._ranks = ranks
        self._collectives = collectives

    @property
    def info(self) -> RunnerInfo:
        info: RunnerInfo = self._inner.info
        return info

    @property
    def ranks(self) -> RankProcesses:
        """The other ranks."""
        return self._ranks

    def launch(self, plan: StepPlan) -> ParallelStep:
        """Start a step on all ranks.

        Raises:
            RankLostError: a rank is gone, hangs, or the step failed.
        """
        self._ranks.check()
        self._ranks.order(Order(plan))
        try:
            return ParallelStep(self._inner.launch(plan), self._ranks)
        except RunnerError as error:
            raise self._ranks.explain(str(error)) from error

    def check(self) -> None:
        """Raise when a rank is gone though no step runs.

        Raises:
            RankLostError: with the rank and how it ended.
        """
        self._ranks.check()

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        self._inner.close()
        self._ranks.close()
        self._collectives.close()

    def poison_blocks(self, blocks: tuple[int, ...]) -> None:
        """Fill freed blocks with NaN on every rank: a test's way to see a read of memory that was given back."""
        self._ranks.order(Order(poison=blocks))
        self._inner.poison_blocks(blocks)


def make_parallel_runner(
    config: EngineConfig, *, num_threads: int, progress: Callable[[int, int], None] | None = None
) -> Runner:
    """Start the other ranks, load rank 0's share beside them, and join.

    Raises:
        RankLostError: another rank failed; what rank 0 itself raises is in `load.load_rank`.
    """
    ranks = RankProcesses(config, num_threads=num_threads)
    try:
        last = (0, 1)

        def report(done: int, total: int) -> None:
            nonlocal last
            last = (done, total)
            ranks.check()
            if progress is not None:
                progress(done, total)

        rank, share = load_rank(config, size=ranks.size, progress=report)
        ranks.wait_loaded(lambda: report(*last))
        return _join(rank, share, ranks)
    except BaseException:
        ranks.close()
        raise


def _join(rank: LoadedRank, share: Share, ranks: RankProcesses) -> Runner:
    """Meet the other ranks, which have loaded too, and agree with them on the pool."""
    collectives: TorchCollectives | None = None
    try:
        collectives = TorchCollectives(ranks.folder, rank=0, size=ranks.size, device=rank.device)
        return ParallelRunner(rank.finish(RankGroup(share, collectives)), ranks, collectives)
    except RuntimeError as error:
        if collectives is not None:
            collectives.close()
        if type(error) is RuntimeError or isinstance(
            error, dist.DistError
        ):  # what torch raises for a lost peer
            raise ranks.explain(f"the ranks could not join: {error}") from error
        raise
