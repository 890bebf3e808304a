"""A request as the scheduler receives it: frozen, validated by the server, free of tensors and text."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from millpond_engine.records.grammar import Grammar


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; neutral values mean "off"."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """Absent: the engine draws one per sequence."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token runs that must not be completed."""
    num_logprobs: int | None = None
    """Alternatives reported beside the sampled token; absent: no logprobs at all."""
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a sequence ends. Stop strings live in the server, which sees text."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search, scored as log-probability / length ** length_penalty, end token counted."""

    width: int
    length_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """One user call for one prompt.

    `namespace` separates caches: prefixes match only inside one namespace, which the server
    derives from model, adapter, tenant and the caller's salt.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams
    arrival_seconds: float
    """Monotonic time of arrival."""
    n: int = 1
    best_of: int = 1
    """Samples drawn; the `n` with the highest mean log-probability are returned."""
    beam: BeamParams | None = None
    namespace: tuple[str, ...] = ()
    adapter: str = ""
    class_name: str = "interactive"
    tenant: str = ""
    priority: int = 0
    """Order inside the tenant only; lower runs first."""
    deadline_seconds: float | None = None
    """Monotonic time the first token is due."""
    grammar: Grammar | None = None
    """What every sequence's text must follow."""
    metadata: dict[str, str] = field(default_factory=dict, hash=False, compare=False)


class FinishReason(StrEnum):
    """Terminal outcome of a sequence; each sequence has exactly one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class RefusalReason(StrEnum):
    """Why a request was refused; the names are the error codes the client sees."""

    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    KV_CAPACITY_EXCEEDED = "kv_capacity_exceeded"
    INVALID_VALUE = "invalid_value"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    TENANT_CONCURRENCY = "tenant_concurrency"
    PREEMPTED = "overloaded"
    """Preempted under the policy Reject."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that will not run, with numbers in the message."""

    request_id: str
    reason: RefusalReason
    message: str
    retry_after_seconds: float | None = None
    full_by_tokens: bool = False
    """The queue was full by its tokens, not by its requests."""


class WaitReason(StrEnum):
    """Why a request is not in the batch."""

    CAPACITY = "Capacity"
    TENANT_CAP = "TenantCap"
    CLASS_GATE = "ClassGate"
    KV_LOAD = "KvLoad"
    ADAPTER_LOAD = "AdapterLoad"
    PREEMPTED = "Preempted"


class PreemptionMode(StrEnum):
    """What happens to a victim's KV."""

    SWAP = "swap"
    RECOMPUTE = "recompute"
    REJECT = "reject"
