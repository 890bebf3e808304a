"""`GET /metrics`: Prometheus text from the cells and the newest snapshot; nothing here touches the step loop.

The text is written here, not by prometheus-client: with 200 tenants its writer took 220 ms for 13,000
series, this one remembers the unchanging part of every line. Tests read the result with that library's parser.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from aiohttp import web

from millpond_common.contract.metrics import Family
from millpond_engine.loop.stats import CounterCells, HistogramCells, Labels, StatCells
from millpond_engine.server.context import CONTEXT, ServerContext
from millpond_engine.server.gauges import compute_idle_seconds, list_infos, read_own_gauges, read_vllm_gauges

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MAX_PREFIXES = 200_000


async def handle_metrics(request: web.Request) -> web.Response:
    """The exposition."""
    body = render_metrics(request.app[CONTEXT])
    return web.Response(body=body.encode(), headers={"Content-Type": CONTENT_TYPE})


def render_metrics(context: ServerContext) -> str:
    """All families as Prometheus text: vLLM's names, then Millpond's."""
    snapshot, recorder = context.thread.snapshot, context.thread.recorder
    name = context.config.model_name
    vllm, own = {"model_name": name, "engine": "0"}, {"model": name}
    lines: list[str] = []
    _write_cells(lines, recorder.vllm, vllm, {})
    _write_gauges(lines, recorder.vllm, vllm, read_vllm_gauges(snapshot))
    for family, labels, value in list_infos(context, snapshot):
        _write_family(lines, family)
        lines.append(f"{_format_series(family.name, labels)} {_format(value)}")
    seconds = compute_idle_seconds(context, snapshot)
    idle: dict[str, dict[Labels, float]] = {"gpu_seconds_total": {("", "", "idle"): seconds}}
    if recorder.price.per_device_hour is not None:
        idle["cost_total"] = {("", "", recorder.price.currency): recorder.compute_cost(seconds)}
    _write_cells(lines, recorder.own, own, idle)
    _write_gauges(lines, recorder.own, own, read_own_gauges(snapshot, recorder))
    lines.append("")
    return "\n".join(lines)


def _write_cells(
    lines: list[str],
    cells: StatCells,
    constant: Mapping[str, str],
    extra: Mapping[str, Mapping[Labels, float]],
) -> None:
    for short, counter in cells.counters.items():
        _write_counter(lines, counter, constant, extra.get(short, {}))
    for histogram in cells.histograms.values():
        _write_histogram(lines, histogram, constant)


def _write_counter(
    lines: list[str], counter: CounterCells, constant: Mapping[str, str], extra: Mapping[Labels, float]
) -> None:
    family, samples = counter.family, [*list(counter.values.items()), *extra.items()]
    if not samples:  # a family without any series: no price is configured
        return
    if family.name == "vllm:admission_rejections_total":  # vLLM's own exception: no `engine` label
        constant = {"model_name": constant["model_name"]}
    _write_family(lines, family)
    _write_samples(lines, family, constant, samples)


def _write_samples(
    lines: list[str], family: Family, constant: Mapping[str, str], samples: Iterable[tuple[Labels, float]]
) -> None:
    for labels, value in samples:
        lines.append(f"{_find_series(family.name, '', family, constant, labels)} {_format(value)}")


def _write_histogram(lines: list[str], histogram: HistogramCells, constant: Mapping[str, str]) -> None:
    family = histogram.family
    _write_family(lines, family)
    bounds = [*(repr(float(bound)) for bound in family.buckets), "+Inf"]
    for labels, cell in list(histogram.values.items()):
        counts = list(cell)
        total = 0.0
        for bound, count in zip(bounds, counts, strict=False):
            total += count
            lines.append(f"{_find_series(family.name, bound, family, constant, labels)} {_format(total)}")
        series = _find_series(family.name, "", family, constant, labels)
        name, brace, rest = series.partition("{")
        lines.append(f"{name}_sum{brace}{rest} {_format(counts[-1])}")
        lines.append(f"{name}_count{brace}{rest} {_format(total)}")


def _write_gauges(
    lines: list[str],
    cells: StatCells,
    constant: Mapping[str, str],
    samples: Mapping[str, Mapping[Labels, float]],
) -> None:
    for short, family in cells.gauges.items():
        _write_family(lines, family)
        _write_samples(lines, family, constant, samples.get(short, {}).items())


def _write_family(lines: list[str], family: Family) -> None:
    lines.append(f"# HELP {family.name} {family.help}")
    lines.append(f"# TYPE {family.name} {family.kind}")


_prefixes: dict[tuple[str, str, str, Labels], str] = {}


def _find_series(name: str, bound: str, family: Family, constant: Mapping[str, str], labels: Labels) -> str:
    """Name and labels of one series, remembered; with `bound` it is a histogram's bucket."""
    key = (name, bound, next(iter(constant.values())), labels)
    known = _prefixes.get(key)
    if known is None:
        if len(_prefixes) >= _MAX_PREFIXES:
            _prefixes.clear()
        pairs = dict(constant) | dict(zip(family.labels, labels, strict=True))
        if bound:
            name, pairs = f"{name}_bucket", pairs | {"le": bound}
        known = _prefixes[key] = _format_series(name, pairs)
    return known


def _format_series(name: str, labels: Mapping[str, str]) -> str:
    if not labels:
        return name
    pairs = ",".join(f'{key}="{_escape(value)}"' for key, value in labels.items())
    return f"{name}{{{pairs}}}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _format(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
