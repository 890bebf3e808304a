"""Whether a model can fit the memory its replicas get, from its size and before a replica starts.

The estimate is a lower bound: weights in the type they are loaded in, and the KV of one sequence of maxModelTokens. What
exceeds the memory by this count cannot run, so it is refused; what fits by it may still be too large with
activations, which the engine measures when it loads. Where a number is unknown nothing is refused, and the condition says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millpond_common.contract.model_facts import BYTES, ModelFacts
from millpond_common.contract.reasons import ConditionReason, ConditionType
from millpond_operator.api.pool import InferencePool, RoleView
from millpond_operator.api.quantity import parse_bytes
from millpond_operator.api.status import Judgement, get_condition
from millpond_operator.desired.engine_config import has_gpu
from millpond_operator.plan.snapshot import DeviceMemory

OVERRIDES = ("--runner", "--device", "--dtype", "--max-model-tokens", "--kv-cache", "--tensor-parallel-size")
"""Arguments that change what is loaded; with one of them the spec no longer tells how much that is."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Need:
    """What one replica must hold, in bytes over all its devices."""

    weights: int
    kv: int
    tokens: int | None
    """Length of the one sequence the KV is of; None where engine.kvCache.deviceMemory names the bytes."""


@dataclass(frozen=True, slots=True)
class Room:
    """The memory one replica gets."""

    total: int
    """Bytes over all its devices."""
    kv_percent: int
    """Share of what the weights leave that may hold KV."""
    source: str


def judge_fit(
    pool: InferencePool,
    role: RoleView,
    facts: ModelFacts | None,
    memory: DeviceMemory | None,
) -> Judgement:
    """Judge one role; status False is a refusal, None means allowed without knowing.

    Args:
        pool: the pool.
        role: what a replica asks for.
        facts: the model's size, if a fetch step has told it.
        memory: of the accelerators, where the role asks for some by count and nodes were looked at.
    """
    if facts is None:
        text = f"the size of {pool.spec.model.source} is not known yet, so nothing is refused; the fetch step of the first replica tells it"
        return _judge(None, ConditionReason.MODEL_SIZE_UNKNOWN, text)
    override = next((a for a in pool.spec.engine.extra_args if a.startswith(OVERRIDES)), None)
    if override is not None:
        text = f"engine.extraArgs has {override.partition('=')[0]}, which changes what is loaded, so nothing is refused"
        return _judge(None, ConditionReason.MODEL_SIZE_UNKNOWN, text)
    on_gpu = has_gpu(role.resources)
    need = compute_need(pool, facts, on_gpu=on_gpu)
    room = find_room(pool, role, memory, on_gpu=on_gpu)
    if isinstance(room, str):
        text = f"{_describe_need(need)}; how much memory a replica gets is not known ({room}), so nothing is refused"
        return _judge(None, ConditionReason.DEVICE_MEMORY_UNKNOWN, text)
    return _compare(need, room)


def compute_need(pool: InferencePool, facts: ModelFacts, *, on_gpu: bool) -> Need:
    """Weights as they are loaded, and the KV that must be there at least."""
    engine = pool.spec.engine
    size = BYTES[choose_dtype(engine.dtype, facts, on_gpu=on_gpu)]
    weights = facts.num_parameters * size
    if engine.kv_cache.device_memory is not None:
        return Need(weights, parse_bytes(engine.kv_cache.device_memory), None)
    tokens = min(engine.max_model_tokens, facts.max_model_tokens)
    blocks = -(-tokens // engine.kv_cache.block_tokens)
    per_token = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * size
    return Need(weights, blocks * engine.kv_cache.block_tokens * per_token, tokens)


def choose_dtype(wanted: str, facts: ModelFacts, *, on_gpu: bool) -> str:
    """The type weights are loaded in: the engine's own rule for Auto."""
    if wanted != "Auto":
        return wanted
    if facts.dtype == "Float32":
        return "BFloat16" if on_gpu else "Float32"
    return facts.dtype if on_gpu else "BFloat16"


def find_room(
    pool: InferencePool, role: RoleView, memory: DeviceMemory | None, *, on_gpu: bool
) -> Room | str:
    """The memory of a replica, or why it is not known."""
    cache = pool.spec.engine.kv_cache
    if on_gpu:
        if memory is None:
            return "nothing tells the memory of the devices"
        if memory.num_bytes is None:
            return memory.source
        devices = pool.spec.engine.tensor_parallel_size
        percent = 100 if cache.device_memory is not None else cache.device_percent
        return Room(devices * memory.num_bytes, percent, memory.source)
    limit = role.resources.limits.get("memory")
    if limit is None:
        return "resources.limits names no memory"
    host = parse_bytes(cache.host_memory) if cache.host_memory is not None else 0
    source = "resources.limits.memory less engine.kvCache.hostMemory" if host else "resources.limits.memory"
    return Room(parse_bytes(limit) - host, 100, source)


def _compare(need: Need, room: Room) -> Judgement:
    free = max(0, room.total - need.weights)
    usable = free * room.kv_percent // 100
    share = f" ({room.kv_percent} % of it for KV: {_gib(usable)})" if room.kv_percent < 100 else ""
    numbers = f"{_describe_need(need)}; a replica gets {_gib(room.total)} ({room.source}), free after weights {_gib(free)}{share}"
    if need.weights < room.total and need.kv <= usable:
        return _judge(True, ConditionReason.MODEL_FITS, numbers)
    return _judge(False, ConditionReason.MODEL_TOO_LARGE, f"{numbers}; {_advise(need, room, usable)}")


def _advise(need: Need, room: Room, usable: int) -> str:
    if need.weights >= room.total:
        return "the weights alone do not fit: give a replica more memory, or choose a smaller model or engine.dtype"
    if need.tokens is None:
        return "lower engine.kvCache.deviceMemory or give a replica more memory"
    fitting = need.tokens * usable // need.kv
    return f"lower engine.maxModelTokens (about {fitting} fit) or give a replica more memory"


def keep_judgement(pool: InferencePool, found: Judgement, *, looked: bool) -> Judgement:
    """The judgement of before where this one only lacks a look at the nodes, for the same generation."""
    before = get_condition(pool.status, ConditionType.MODEL_FITS)
    stale = before is None or before.observed_generation != pool.metadata.generation
    if looked or stale or found.reason != ConditionReason.DEVICE_MEMORY_UNKNOWN:
        return found
    if before is None or before.reason not in {reason.value for reason in ConditionReason}:
        return found  # written by another release
    status = {"True": True, "False": False}.get(before.status)
    return Judgement(ConditionType.MODEL_FITS, status, ConditionReason(before.reason), before.message)


def merge_fits(fits: Mapping[str, Judgement]) -> Judgement:
    """The pool's condition from its roles': what is refused first, then what is not known."""
    (name, worst) = min(fits.items(), key=lambda entry: {False: 0, None: 1, True: 2}[entry[1].status])
    text = worst.message if len(fits) == 1 else f"{name}: {worst.message}"
    return Judgement(ConditionType.MODEL_FITS, worst.status, worst.reason, text)


def _describe_need(need: Need) -> str:
    of = "engine.kvCache.deviceMemory" if need.tokens is None else f"one sequence of {need.tokens} tokens"
    return f"weights {_gib(need.weights)}, KV of {of} {_gib(need.kv)}"


def _judge(status: bool | None, reason: ConditionReason, message: str) -> Judgement:
    return Judgement(ConditionType.MODEL_FITS, status, reason, message)


def _gib(amount: int) -> str:
    return f"{amount / GIB:.2f} GiB"
