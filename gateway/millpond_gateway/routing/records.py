"""What passes between routing and its callers: frozen records, no behaviour beyond a derived property."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from millpond_gateway.routing.score import Score


class Policy(StrEnum):
    """How a pool chooses; the values of `spec.gateway.routing`."""

    AUTO = "Auto"
    PREFIX = "Prefix"
    LEAST_LOADED = "LeastLoaded"
    ROUND_ROBIN = "RoundRobin"


class Role(StrEnum):
    """What an engine computes."""

    BOTH = "Both"
    PREFILL = "Prefill"
    DECODE = "Decode"


class DropReason(StrEnum):
    """Why an endpoint is no candidate."""

    NOT_READY = "NotReady"
    CORDONED = "Cordoned"
    EJECTED = "Ejected"
    CANNOT_FIT = "CannotFit"
    WRONG_ROLE = "WrongRole"
    WRONG_REVISION = "WrongRevision"
    ADAPTER_MISSING = "AdapterMissing"
    ALREADY_TRIED = "AlreadyTried"


class ChoiceReason(StrEnum):
    """Why this endpoint, or why none."""

    LOWEST_COST = "LowestCost"
    TIE = "Tie"
    """Several costs lay inside the tie band; the seeded generator picked one."""
    ONLY_CANDIDATE = "OnlyCandidate"
    NEXT_IN_ROTATION = "NextInRotation"
    PARTITION_HASH = "PartitionHash"
    """Peers are unreachable: bounded-load consistent hashing."""
    NO_ENDPOINT = "NoEndpoint"
    """The pool has no endpoint at all."""
    NO_CANDIDATE = "NoCandidate"
    """Every endpoint was dropped; the drops say why."""


class KeyKind(StrEnum):
    """What a prompt's block keys were computed from."""

    TOKENS = "Tokens"
    TEXT = "Text"
    """Fallback: chunks of text, where the engine's tokens are unknown."""
    NONE = "None"
    """No key: the prompt is shorter than one block, or its key took too long."""


class EndpointView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A replica as the gateway sees it. Identity is (`uid`, `epoch`), never an address."""

    uid: str
    """UID of the pod, or the configured name of a static endpoint."""
    pod: str
    address: str
    """`host:port`; opaque to routing."""
    prefix: str = ""
    """Path in front of the engine's own, where something else answers at its address too; opaque as well."""
    epoch: str | None = None
    """Random number of this engine start; None until the engine told it."""
    revision: str = ""
    role: Role = Role.BOTH
    ready: bool = False
    """The model answers; a running process whose weights still load is not ready."""
    cordoned: bool = False
    """Marked to leave: no new requests, open streams run on."""
    block_tokens: int = 16
    num_blocks: int | None = None
    """KV blocks on the device; None while unknown."""
    max_model_tokens: int | None = None
    prefill_tokens_per_second: float | None = None
    """The engine's own measurement: a prior until this fleet of gateways learned better."""
    adapters: frozenset[str] | None = None
    """LoRA adapters it can serve; None means every one."""


class PromptKeys(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A prompt as the index knows it: chained keys of its full blocks, in order."""

    keys: Sequence[int] = ()
    """Unsigned 64-bit numbers; each one identifies the whole prefix that ends with its block."""
    tokens_per_key: float = 16.0
    """Prompt tokens that one key stands for; an estimate for text keys."""
    num_tokens: int = 0
    """Prompt tokens, counted or estimated."""
    kind: KeyKind = KeyKind.NONE


class RequestView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request as routing sees it."""

    request_id: str
    prompt: PromptKeys
    max_output_tokens: int | None = None
    """The caller's limit; None when it named none."""
    expected_output_tokens: int = 256
    """What the decode load is estimated from; at most `max_output_tokens`."""
    budget_tokens: int = 0
    """Most that it may use, prompt and all its answers: what its tenant's budget is charged until it ends."""
    traffic_class: str = ""
    tenant: str = ""
    session: int | None = None
    """64-bit hash of the session header; None without one."""
    role: Role = Role.BOTH
    """Which leg is placed: Both for an aggregated request, Prefill or Decode for one leg of a pair."""
    revision: str | None = None
    """Only this revision may serve it; None lets the weights decide."""
    adapter: str = ""


class Drop(msgspec.Struct, frozen=True, gc=False):
    """One endpoint that was no candidate."""

    uid: str
    reason: DropReason


class Choice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Answer to one request: an endpoint, or none, with the reason and the numbers behind it."""

    endpoint: EndpointView | None
    reason: ChoiceReason
    policy: Policy
    scores: tuple[Score, ...] = ()
    drops: tuple[Drop, ...] = ()
    score: Score | None = None
    """The chosen endpoint's own."""

    @property
    def fastest_wait(self) -> tuple[float, float]:
        """Queue seconds and own prefill seconds of the candidate that would give the first token soonest."""
        waits = [
            (score.queue_seconds, score.uncached_tokens / score.tokens_per_second) for score in self.scores
        ]
        return min(waits, key=sum, default=(0.0, 0.0))


class Reservation(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Load booked on one replica for one request, before any byte is sent."""

    id: int
    """Unique for this gateway process."""
    request_id: str
    uid: str
    epoch: str | None
    uncached_tokens: int
    """Freed at the first chunk."""
    cached_tokens: int
    """What the index predicted, all layers together."""
    kv_blocks: int
    """Freed at the end, with the output tokens."""
    output_tokens: int
    reserved_at: float
    session: int | None = None
    tenant: str = ""
    routed_tokens: int = 0
    held_tokens: int | None = None
    tokens_per_key: float = 16.0
    """Of the keys that go with it."""
    budget_tokens: int = 0
    """Charged to its tenant."""


class TenantHolds(msgspec.Struct, frozen=True, gc=False):
    """What one gateway process holds of a pool, by tenant."""

    requests: dict[str, int] = {}
    tokens: dict[str, int] = {}
    """Charged to the tenant's budget for them."""
    claims: dict[str, tuple[int, int]] = {}
    """Requests that wait for their turn at a limit which all gateways share, and their tokens; nothing is charged yet."""


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the engine counted for one finished request; the audit of the prediction."""

    prompt_tokens: int
    cached_tokens: int | None = None
    """None when the engine does not report it."""
    output_tokens: int = 0


class ReplicaLoad(msgspec.Struct, frozen=True, gc=False):
    """What is reserved on one replica at one instant."""

    queued_tokens: int
    """Uncached prompt tokens whose first token has not come."""
    output_tokens: int
    """Expected output tokens of open requests."""
    kv_blocks: int
    decoding_blocks: int
    """Part of them whose first token has come: requests still queued in the engine hold none yet."""
    num_prefilling: int
    num_decoding: int
    num_own_open: int
    """Requests this gateway process has open on it."""
