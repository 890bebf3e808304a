"""`GET /metrics`: Prometheus text from the cells and the newest snapshot; nothing here touches the step loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import CollectorRegistry

from millpond_common.contract import metrics as m
from millpond_engine.core.outputs import SchedulerCounts
from millpond_engine.loop.recorder import Recorder
from millpond_engine.loop.snapshot import LoopPhase, LoopSnapshot
from millpond_engine.loop.stats import StatCells
from millpond_engine.server.context import CONTEXT, ServerContext
from millpond_engine.server.intake import get_now


async def handle_metrics(request: web.Request) -> web.Response:
    """The exposition."""
    body = render_metrics(request.app[CONTEXT])
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


def render_metrics(context: ServerContext) -> bytes:
    """All families as Prometheus text."""
    return generate_latest(EngineCollector(context))


class EngineCollector(CollectorRegistry):
    """Families of one engine, made anew for every scrape."""

    def __init__(self, context: ServerContext) -> None:
        super().__init__()
        self._context = context

    def collect(self) -> Iterator[Metric]:
        """VLLM's names, then Millpond's."""
        context = self._context
        snapshot, recorder = context.thread.snapshot, context.thread.recorder
        name = context.config.model_name
        yield from _make_cells(recorder.vllm, ("model_name", "engine"), (name, "0"))
        yield from _make_gauges(recorder.vllm, ("model_name", "engine"), (name, "0"), _read_vllm(snapshot))
        yield from _make_infos(context, snapshot)
        idle = _compute_idle(context, snapshot)
        yield from _make_cells(
            recorder.own, ("model",), (name,), extra={"gpu_seconds_total": {("", "", "idle"): idle}}
        )
        yield from _make_gauges(recorder.own, ("model",), (name,), _read_own(snapshot, recorder))


_Samples = dict[str, dict[tuple[str, ...], float]]


def _make_cells(
    cells: StatCells, names: tuple[str, ...], values: tuple[str, ...], extra: _Samples | None = None
) -> Iterator[Metric]:
    for short, counter in cells.counters.items():
        family = counter.family
        samples = dict(counter.values) | (extra or {}).get(short, {})
        if not samples:
            continue
        made = CounterMetricFamily(family.name, family.help, labels=_label_names(family, names))
        for labels, value in samples.items():
            made.add_metric([*_constant(family, values), *labels], value)
        yield made
    for histogram in cells.histograms.values():
        family = histogram.family
        made_h = HistogramMetricFamily(family.name, family.help, labels=[*names, *family.labels])
        for labels, cell in list(histogram.values.items()):
            buckets, total = _accumulate(family.buckets, list(cell))
            made_h.add_metric([*values, *labels], buckets=buckets, sum_value=total)
        yield made_h


def _label_names(family: m.Family, names: tuple[str, ...]) -> list[str]:
    return [*_constant(family, names), *family.labels]


def _constant(family: m.Family, given: tuple[str, ...]) -> tuple[str, ...]:
    """VLLM's counter of rejections carries no `engine` label."""
    return given[:1] if family.name == "vllm:admission_rejections_total" else given


def _accumulate(bounds: Iterable[float], cell: list[float]) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets and the sum of one histogram cell."""
    total = 0.0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*bounds, float("inf")), cell, strict=False):
        total += count
        buckets.append(
            ("+Inf" if bound == float("inf") else f"{bound:g}" if bound < 1 else str(float(bound)), total)
        )
    return buckets, cell[-1]


def _make_gauges(
    cells: StatCells, names: tuple[str, ...], values: tuple[str, ...], samples: _Samples
) -> Iterator[Metric]:
    for short, family in cells.gauges.items():
        made = GaugeMetricFamily(family.name, family.help, labels=[*names, *family.labels])
        for labels, value in samples.get(short, {}).items():
            made.add_metric([*values, *labels], value)
        yield made


def _read_vllm(snapshot: LoopSnapshot) -> _Samples:
    counts = snapshot.counts
    total = counts.free_blocks + counts.cached_blocks + counts.used_blocks
    deferred = sum(
        number
        for queue in counts.queues
        for reason, number in queue.waiting.items()
        if reason not in {"Capacity", "Preempted"}
    )
    asleep = snapshot.phase is LoopPhase.ASLEEP
    return {
        "num_requests_running": {(): counts.num_running},
        "num_requests_waiting": {(): counts.num_waiting},
        "num_requests_waiting_by_reason": {
            ("capacity",): max(0, counts.num_waiting - deferred),
            ("deferred",): min(deferred, counts.num_waiting),
        },
        "kv_cache_usage_perc": {(): counts.used_blocks / total if total else 0.0},
        "engine_sleep_state": {
            ("awake",): float(not asleep),
            ("weights_offloaded",): 0.0,
            ("discard_all",): float(asleep),
        },
    }


def _read_own(snapshot: LoopSnapshot, recorder: Recorder) -> _Samples:
    counts = snapshot.counts
    running: dict[tuple[str, ...], float] = {(c, t): 0.0 for c in recorder.classes for t in recorder.tenants}
    waiting: dict[tuple[str, ...], float] = {
        (*who, reason): 0.0 for who in running for reason in m.WAIT_REASONS
    }
    oldest: dict[tuple[str, ...], float] = {(c,): 0.0 for c in recorder.classes}
    now = get_now()
    for queue in counts.queues:
        who = recorder.label_class(queue.class_name), recorder.label_tenant(queue.tenant)
        running[who] += queue.running
        for reason, number in queue.waiting.items():
            waiting[*who, reason] = waiting.get((*who, reason), 0.0) + number
        if queue.oldest_waiting_since is not None:
            oldest[who[0],] = max(oldest[who[0],], now - queue.oldest_waiting_since)
    return {
        "num_requests_running": running,
        "num_requests_waiting": waiting,
        "oldest_waiting_seconds": oldest,
        "kv_num_blocks": _read_blocks(counts),
        "num_leaked_blocks": {(): counts.leaked_blocks},
    }


def _read_blocks(counts: SchedulerCounts) -> dict[tuple[str, ...], float]:
    return {
        ("device", "free"): counts.free_blocks,
        ("device", "cached"): counts.cached_blocks,
        ("device", "in_use"): counts.used_blocks,
        ("host", "free"): counts.free_host_blocks,
        ("host", "cached"): 0,
        ("host", "in_use"): counts.used_host_blocks,
    }


def _compute_idle(context: ServerContext, snapshot: LoopSnapshot) -> float:
    """Device seconds since ready that no request was charged for."""
    if snapshot.ready_at is None:
        return 0.0
    wall = (get_now() - snapshot.ready_at) * context.config.tensor_parallel_size
    return max(0.0, wall - snapshot.charged_seconds)


def _make_infos(context: ServerContext, snapshot: LoopSnapshot) -> Iterator[Metric]:
    """Facts as labels of gauges whose value is 1."""
    info = snapshot.info
    cache = {
        "block_size": str(info.block_tokens if info else context.config.kv_cache.block_tokens),
        "num_gpu_blocks": str(info.num_blocks if info else 0),
        "cache_dtype": info.dtype if info else "auto",
        "enable_prefix_caching": "True",
        "engine": "0",
    }
    yield _make_info("vllm:cache_config_info", "Facts of the KV cache.", cache, 1.0)
    if context.config.adapters:
        names = ",".join(adapter.name for adapter in context.config.adapters)
        lora = {
            "max_lora": str(len(context.config.adapters)),
            "running_lora_adapters": names if snapshot.counts.num_running else "",
            "waiting_lora_adapters": names if snapshot.counts.num_waiting else "",
        }
        yield _make_info(
            "vllm:lora_requests_info", "Adapters in use; the value is unix time.", lora, context.created
        )
    facts = {
        "model": context.config.model_name,
        "version": context.version,
        "role": context.config.role,
        "epoch": context.epoch,
    }
    yield _make_info("millpond_engine_info", "Facts of this start.", facts, 1.0)


def _make_info(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    made = GaugeMetricFamily(name, text, labels=list(labels))
    made.add_metric(list(labels.values()), value)
    return made
