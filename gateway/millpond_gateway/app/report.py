"""The report for the operator, made on the data loop from what it knows."""

from __future__ import annotations

from millpond_common.contract.gateway_report import EndpointReport, GatewayReport, PoolReport
from millpond_gateway.app.fleet import Fleet
from millpond_gateway.app.pool import PoolState
from millpond_gateway.routing.records import EndpointView


def make_report(
    fleet: Fleet,
    *,
    gateway: str,
    epoch: str,
    now: float,
    unix_time: float,
    view_age_seconds: float,
    synced: bool,
) -> GatewayReport:
    """Demand and endpoints of every pool."""
    pools = tuple(_report_pool(name, state, now) for name, state in sorted(fleet.pools.items()))
    return GatewayReport(gateway, epoch, unix_time, view_age_seconds, synced, pools)


def _report_pool(name: str, state: PoolState, now: float) -> PoolReport:
    endpoints = tuple(_report_endpoint(state, endpoint) for endpoint in state.router.endpoints)
    demand = state.demand.view(now)
    return PoolReport(
        pool=name,
        endpoints=endpoints,
        uncached_tokens_per_second_15=demand.uncached_tokens_per_second_15,
        uncached_tokens_per_second_60=demand.uncached_tokens_per_second_60,
        output_tokens_per_second_60=demand.output_tokens_per_second_60,
        held_requests=len(state.queue),
        held_tokens=state.queue.num_tokens,
        queued_tokens=sum(endpoint.uncached_tokens for endpoint in endpoints),
        ttft_p90_milliseconds=demand.ttft_p90_milliseconds,
        last_request_seconds_ago=demand.last_request_seconds_ago,
        revisions=state.trials.report(),
    )


def _report_endpoint(state: PoolState, endpoint: EndpointView) -> EndpointReport:
    load = state.router.load.own_view(endpoint.uid)  # the reader sums over gateways
    cached_tokens, unique_cached_tokens = state.router.cached_tokens(endpoint.uid)
    return EndpointReport(
        pod=endpoint.pod,
        pod_uid=endpoint.uid,
        revision=endpoint.revision,
        role=endpoint.role.value,
        routable=endpoint.ready and not endpoint.cordoned,
        open_requests=load.num_own_open,
        uncached_tokens=load.queued_tokens,
        speed_tokens_per_second=state.router.speeds.measured(endpoint.uid),
        cached_tokens=cached_tokens,
        unique_cached_tokens=unique_cached_tokens,
        epoch=endpoint.epoch,
    )
