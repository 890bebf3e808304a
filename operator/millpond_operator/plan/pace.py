"""When the scaling loop looks at a pool again: often where a count may move, seldom where nothing can. Pure."""

from __future__ import annotations

import zlib

from millpond_common.contract.gateway_report import PoolReport
from millpond_operator.api.pool import list_roles
from millpond_operator.plan.autoscale import ScalingView
from millpond_operator.plan.scale import find_owner
from millpond_operator.plan.snapshot import PoolSnapshot

QUIET_SECONDS = 60.0
"""Since the last request: then the rates of a gateway's longest window are zero."""


def choose_pause(
    snapshot: PoolSnapshot, view: ScalingView, *, interval: float, rest_interval: float
) -> float:
    """Seconds until the next look.

    A pool whose count the autoscaler or somebody else moves by our numbers needs them each interval, and so do those
    who watch a pool that serves. Of a fixed pool that serves nobody only the idle time changes. A gateway that is
    silent says nothing about who is served.
    """
    if any(role.scaling is not None for role in list_roles(snapshot.pool)) or find_owner(snapshot):
        return interval
    is_resting = view.num_silent == 0 and all(is_quiet(sample.report) for sample in view.gateways)
    return rest_interval if is_resting else interval


def is_quiet(report: PoolReport) -> bool:
    """Whether the gateway neither has nor lately had a request of the pool."""
    if is_wanted(report) or any(endpoint.open_requests for endpoint in report.endpoints):
        return False
    rates = (
        report.uncached_tokens_per_second_15,
        report.uncached_tokens_per_second_60,
        report.output_tokens_per_second_60,
    )
    last = report.last_request_seconds_ago
    return not any(rates) and (last is None or last > QUIET_SECONDS)


def is_called(report: PoolReport, *, since_seconds: float) -> bool:
    """Whether somebody has wanted a pool at zero since a look that long ago, also when nobody waits any more."""
    last = report.last_request_seconds_ago
    return is_wanted(report) or (last is not None and last <= since_seconds)


def is_wanted(report: PoolReport) -> bool:
    """Whether a request waits for a replica."""
    return report.held_requests > 0 or report.held_tokens > 0 or report.queued_tokens > 0


def find_next_look(now: float, pause: float, *, namespace: str, interval: float) -> float:
    """Time of the next look: the namespace's turn that is nearest to `pause` from now.

    Pools of a namespace have their turns together, so that one report of each gateway serves them all; namespaces have
    theirs apart.
    """
    phase = zlib.crc32(namespace.encode()) % 1024 / 1024 * interval
    turns = max(1, round((now + pause - phase) / interval) - int((now - phase) // interval))
    return phase + ((now - phase) // interval + turns) * interval
