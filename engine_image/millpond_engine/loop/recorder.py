"""Turns what happens to requests and steps into metric cells, by the definitions of the metrics reference."""

from __future__ import annotations

from collections.abc import Iterable

from millpond_common.contract import metrics as m
from millpond_common.contract.engine_config import PriceConfig, SchedulingConfig
from millpond_common.contract.openai import ErrorCode
from millpond_engine.engine.costs import StepCosts
from millpond_engine.engine.step import StepReport
from millpond_engine.loop.ledger import Ledger, LiveRequest, note_prompt, note_tokens
from millpond_engine.loop.series import start_cells
from millpond_engine.loop.stats import StatCells
from millpond_engine.records.outputs import (
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    OwnerCount,
    Preempted,
    PromptOutput,
    SequenceOutput,
)
from millpond_engine.records.request import PreemptionMode, Refusal, Request

DEFAULT_CLASSES = ("interactive", "agent", "batch")

_VLLM_REASONS = {
    "stop": "stop",
    "tool_calls": "stop",
    "length": "length",
    "cancelled": "abort",
    "error": "error",
}


class Recorder:
    """Writes the metric cells. Owned by the engine thread."""

    def __init__(
        self,
        scheduling: SchedulingConfig,
        *,
        max_model_tokens: int,
        num_devices: int,
        price: PriceConfig | None = None,
    ) -> None:
        self.vllm = StatCells(m.make_vllm_families(max_model_tokens))
        self.own = StatCells(m.make_engine_families())
        self.classes = tuple(c.name for c in scheduling.classes) or DEFAULT_CLASSES
        self.tenants = (*(t.name for t in scheduling.tenants), m.OTHER_TENANT)
        self.ledger = Ledger()
        self.bytes_per_block = 0
        self.charged_seconds = 0.0
        self.price = price or PriceConfig()
        self._num_devices = num_devices
        self._block_tenants: dict[int, str] = {}
        self._costs = StepCosts()
        self._ttft = {c.name: c.ttft_milliseconds / 1000 for c in scheduling.classes if c.ttft_milliseconds}
        self._itl = {c.name: c.itl_milliseconds / 1000 for c in scheduling.classes if c.itl_milliseconds}
        self._default_class = scheduling.default_class
        currency = None if self.price.per_device_hour is None else self.price.currency
        start_cells(self.own, self.vllm, classes=self.classes, tenants=self.tenants, currency=currency)

    def label_class(self, name: str) -> str:
        """The class itself when declared, else the default class."""
        return name if name in self.classes else self._default_class

    def label_tenant(self, name: str) -> str:
        """The tenant itself when declared, else `other`."""
        return name if name in self.tenants else m.OTHER_TENANT

    # -- requests

    def refuse(self, class_name: str, tenant: str, code: str, refusal: Refusal | None = None) -> None:
        """Book a refusal: its outcome, its code and, when the queue was full, vLLM's counter of it."""
        who = self.label_class(class_name), self.label_tenant(tenant)
        self.own.add("requests_total", 1, *who, "refused")
        self.own.add("refusals_total", 1, *who, code)
        if code == ErrorCode.OVERLOADED:
            self.vllm.add(
                "admission_rejections_total",
                1,
                m.VLLM_ADMISSION_REASONS[refusal is not None and refusal.full_by_tokens],
            )

    def finish(self, live: LiveRequest, outcome: str, now: float) -> None:
        """Book the one outcome of a request that was queued, and its histograms."""
        self.own.add("requests_total", 1, live.class_label, live.tenant_label, outcome)
        self.vllm.add("request_success_total", 1, _VLLM_REASONS[outcome])
        if live.prompt_at is None and live.first_start is not None:  # ended in mid-prefill: its work counts
            self._book_prompt(live, computed=live.computed_end - live.first_start, cached=live.first_start)
        request = live.request
        self.vllm.observe("request_prompt_tokens", len(request.prompt))
        self.vllm.observe("request_generation_tokens", live.num_tokens)
        self.vllm.observe("request_max_num_generation_tokens", max(live.tokens_by_index.values(), default=0))
        self.vllm.observe("request_params_max_tokens", request.stop.max_tokens)
        self.vllm.observe("request_params_n", request.n)
        self.vllm.observe("request_num_preemptions", live.num_preemptions)
        end = live.last_token_at if live.last_token_at is not None else now
        self.vllm.observe("e2e_request_latency_seconds", end - live.received_at)
        self.own.observe("e2e_seconds", end - live.received_at, live.class_label)
        if live.scheduled_at is not None:
            self._finish_phases(live, live.scheduled_at)

    def _finish_phases(self, live: LiveRequest, scheduled_at: float) -> None:
        self.vllm.observe("request_prefill_kv_computed_tokens", len(live.request.prompt) - live.cached_tokens)
        if live.first_token_at is None or live.last_token_at is None:
            return
        decode = live.last_token_at - live.first_token_at
        self.vllm.observe("request_prefill_time_seconds", live.first_token_at - scheduled_at)
        self.vllm.observe("request_decode_time_seconds", decode)
        self.vllm.observe("request_inference_time_seconds", live.last_token_at - scheduled_at)
        longest = max(live.tokens_by_index.values())
        if longest < 2:
            return
        per_token = decode / (longest - 1)
        self.vllm.observe("request_time_per_output_token_seconds", per_token)
        target = self._itl.get(live.class_label)
        if target is not None and per_token > target:
            self.own.add("deadline_misses_total", 1, live.class_label, live.tenant_label, "itl")

    # -- steps

    def add_step(self, report: StepReport) -> None:
        """Book where a step's time went, and who used the device."""
        plan = report.plan
        for new in plan.new_rows:
            self._assign(new.row, new.request_id, new.prompt_tokens, report.planned_at)
        if plan.rows:
            decode, prefill = self._split(report)
            self.vllm.observe("iteration_tokens_total", plan.num_tokens)
            self.own.observe("step_tokens", prefill, "prefill")
            self.own.observe("step_tokens", decode, "decode")
            for part in m.STEP_PARTS:
                self.own.observe("step_seconds", getattr(report, f"{part}_seconds"), part)
        for direction, moves in (("out", plan.swap_out), ("in", plan.swap_in)):
            if moves:
                self.own.add("swapped_blocks_total", len(moves), direction, "host")
                self.own.add("swapped_bytes_total", len(moves) * self.bytes_per_block, direction, "host")
        for row in plan.dropped_rows:
            if not any(new.row == row for new in plan.new_rows):
                self.ledger.drop_row(row)

    def _assign(self, row: int, request_id: str, prompt_tokens: int, now: float) -> None:
        del prompt_tokens
        live = self.ledger.live.get(request_id)
        fresh = live is not None and live.scheduled_at is None
        self.ledger.assign_row(row, request_id, now)
        if live is not None and fresh:
            self.vllm.observe("request_queue_time_seconds", now - live.received_at)
            self.own.observe("queue_seconds", now - live.received_at, live.class_label)

    def _split(self, report: StepReport) -> tuple[int, int]:
        """Tokens of the step as (decode, prefill); charges its device time to the requests in it."""
        rows = report.plan.rows
        seconds = report.result.seconds if report.result else 0.0
        weights = [self._costs.weigh(row.num_tokens, row.start + row.num_tokens) for row in rows]
        self._costs.learn(report.plan, seconds)
        total = sum(weights) or 1.0
        self.charged_seconds += seconds * self._num_devices
        decode = prefill = 0
        for row, weight in zip(rows, weights, strict=True):
            live = self.ledger.find_row(row.row)
            is_decode = row.num_tokens == 1 and (live is None or row.start >= len(live.request.prompt))
            if live is not None and not is_decode:
                live.first_start = row.start if live.first_start is None else live.first_start
                live.computed_end = max(live.computed_end, row.start + row.num_tokens)
            decode += row.num_tokens if is_decode else 0
            prefill += 0 if is_decode else row.num_tokens
            who = (live.class_label, live.tenant_label) if live else (self._default_class, m.OTHER_TENANT)
            share = seconds * self._num_devices * weight / total
            self.own.add("gpu_seconds_total", share, *who, "decode" if is_decode else "prefill")
            if self.price.per_device_hour is not None:
                self.own.add("cost_total", self.compute_cost(share), *who, self.price.currency)
        return decode, prefill

    def compute_cost(self, device_seconds: float) -> float:
        """What device time costs; 0 without a price."""
        return device_seconds * (self.price.per_device_hour or 0.0) / 3600

    def note_residency(self, owners: Iterable[OwnerCount], seconds: float) -> None:
        """Book how long the blocks in use were held; read at every snapshot, so exact to its interval."""
        for owner in owners:
            who = self.label_class(owner.class_name), self.label_tenant(owner.tenant)
            self.own.add("kv_block_seconds_total", owner.used_blocks * seconds, *who)

    def note_prompt(self, live: LiveRequest, output: PromptOutput, now: float) -> None:
        """Book a computed prompt and where its KV came from."""
        note_prompt(live, output, now)
        self._book_prompt(
            live, computed=len(live.request.prompt) - output.cached_tokens, cached=output.cached_tokens
        )

    def _book_prompt(self, live: LiveRequest, *, computed: int, cached: int) -> None:
        who = live.class_label, live.tenant_label
        queried = len(live.request.prompt)
        self.vllm.add("prompt_tokens_total", computed + cached)
        self.vllm.add("prompt_tokens_cached_total", cached)
        self.vllm.add("prompt_tokens_by_source_total", computed, "local_compute")
        self.vllm.add("prompt_tokens_by_source_total", cached, "local_cache_hit")
        self.vllm.add("prefix_cache_queries_total", queried)
        self.vllm.add("prefix_cache_hits_total", cached)
        self.own.add("prompt_tokens_total", computed, *who, "computed")
        self.own.add("prompt_tokens_total", cached, *who, "cached_device")
        self.own.add("prefix_cache_query_tokens_total", queried, *who)
        self.own.add("prefix_cache_hit_tokens_total", cached, *who, "device")

    def note_tokens(self, live: LiveRequest, output: SequenceOutput, now: float) -> None:
        """Book new tokens and their latency."""
        news = note_tokens(live, output, now)
        if news is None:
            return
        who = live.class_label, live.tenant_label
        self.vllm.add("generation_tokens_total", news.num_tokens)
        self.own.add("generation_tokens_total", news.num_tokens, *who)
        if news.first:
            self._note_first(live, now)
        if news.gap_seconds is not None:
            gap = news.gap_seconds / news.num_gaps
            self.vllm.observe("inter_token_latency_seconds", gap, times=news.num_gaps)
            self.own.observe("inter_token_latency_seconds", gap, live.class_label, times=news.num_gaps)

    def _note_first(self, live: LiveRequest, now: float) -> None:
        seconds = now - live.received_at
        self.vllm.observe("time_to_first_token_seconds", seconds)
        self.own.observe("time_to_first_token_seconds", seconds, live.class_label)
        deadline = live.request.deadline_seconds
        target = self._ttft.get(live.class_label)
        late = now > deadline if deadline is not None else target is not None and seconds > target
        if late:
            self.own.add("deadline_misses_total", 1, live.class_label, live.tenant_label, "ttft")

    def note_preemption(self, preempted: Preempted) -> None:
        """Book a preemption and the tokens it costs."""
        live = self.ledger.live.get(preempted.request_id)
        who = (live.class_label, live.tenant_label) if live else (self._default_class, m.OTHER_TENANT)
        if live:
            live.num_preemptions += 1
        self.vllm.add("num_preemptions_total", 1)
        self.own.add("preemptions_total", 1, *who, preempted.mode.value, preempted.reason)
        if preempted.mode is PreemptionMode.RECOMPUTE:
            self.own.add("recomputed_tokens_total", preempted.lost_tokens, *who, "Preempted")

    def note_cache_event(self, event: CacheEvent) -> None:
        """Remember whose a stored block is, and book evicted ones to who computed them."""
        if isinstance(event, BlocksStored):
            tenant = self.label_tenant(event.namespace[2]) if len(event.namespace) > 2 else m.OTHER_TENANT
            self._block_tenants.update(dict.fromkeys(event.block_ids, tenant))
        elif isinstance(event, BlocksRemoved):
            for block in event.block_ids:
                tenant = self._block_tenants.pop(block, m.OTHER_TENANT)
                self.own.add("evicted_blocks_total", 1, tenant, "device", event.reason)
        else:
            for tenant in self._block_tenants.values():
                self.own.add("evicted_blocks_total", 1, tenant, "device", "Reset")
            self._block_tenants.clear()

    def make_live_labels(self, request: Request) -> tuple[str, str]:
        """Class and tenant labels of a request."""
        return self.label_class(request.class_name), self.label_tenant(request.tenant)
