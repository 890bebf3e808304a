"""Latest known objects of every watched kind, fed by watches, corrected by full lists, and by our own writes.

One store serves all pools, so an idle pool costs no call. Resource versions decide which of two copies is newer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from millpond_common.contract import labels
from millpond_operator.desired.kinds import DEPLOYMENT, POOL, Kind
from millpond_operator.plan.adoption import is_create_note

Obj = Mapping[str, Any]
T = TypeVar("T")
K = TypeVar("K")
Key = tuple[str, str]
"""Namespace and name."""

GATEWAY_OWNER = ""
"""Stands for a namespace's gateway where a pool's name is expected."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One object without its bulky bookkeeping."""

    body: Obj
    version: int
    replicas_manager: str = ""
    """Who set `spec.replicas` of a Deployment last; of a pool, who did through the scale subresource."""
    scaled_by: str = ""
    """Who set `spec.replicas` of a Deployment through the scale subresource."""
    created: bool = False
    """Whether fields of the operator are noted as written by a create."""


class Store:
    """Objects by kind, namespace and name, with indices by the pool they belong to, by namespace and, of pools, by model."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[Key, Stored]] = defaultdict(dict)
        self._by_namespace: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._read: dict[tuple[str, Key], object] = {}
        self._changes: dict[str, int] = defaultdict(int)
        self._by_pool: dict[str, dict[Key, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._by_model: dict[Key, set[str]] = defaultdict(set)
        self._removed: dict[str, dict[Key, int]] = defaultdict(dict)
        self._synced: set[str] = set()

    def put(self, kind: Kind, obj: Obj) -> bool:
        """Keep the object unless a newer copy is known; True when something changed."""
        stored, key = _slim(kind, obj), _key(obj)
        known = self._objects[kind.plural].get(key)
        if known is not None and known.version >= stored.version:
            return False
        if stored.version <= self._removed[kind.plural].get(key, -1):
            return False
        self._removed[kind.plural].pop(key, None)
        if known is not None:
            self._unindex(kind, known.body)
        self._objects[kind.plural][key] = stored
        self._index(kind, obj)
        self._note_change(kind, key)
        return True

    def remove(self, kind: Kind, obj: Obj) -> bool:
        """Forget the object unless another one took its name meanwhile; True when something changed."""
        key = _key(obj)
        known = self._objects[kind.plural].get(key)
        if known is None or known.body["metadata"].get("uid") != obj["metadata"].get("uid"):
            return False
        self._unindex(kind, known.body)
        del self._objects[kind.plural][key]
        self._note_change(kind, key)
        self._removed[kind.plural][key] = max(known.version, _version(obj))
        return True

    def replace(self, kind: Kind, objects: Iterable[Obj], *, version: int) -> set[Key]:
        """Take over a full list; objects seen after its resource version stay. Returns the keys that changed."""
        listed = {_key(obj): obj for obj in objects}
        changed = {key for key, obj in listed.items() if self.put(kind, obj)}
        for key, known in list(self._objects[kind.plural].items()):
            if key not in listed and known.version <= version:
                self.remove(kind, known.body)
                changed.add(key)
        self._removed[kind.plural] = {k: v for k, v in self._removed[kind.plural].items() if v > version}
        self._synced.add(kind.plural)
        return changed

    def is_synced(self, kinds: Iterable[Kind]) -> bool:
        """Whether a full list of every kind has been taken over since the start."""
        return all(kind.plural in self._synced for kind in kinds)

    def get(self, kind: Kind, namespace: str, name: str) -> Stored | None:
        """One object."""
        return self._objects[kind.plural].get((namespace, name))

    def list_of_pool(self, kind: Kind, namespace: str, pool: str) -> list[Stored]:
        """Objects that carry the pool's label, by name; GATEWAY_OWNER means the gateway's."""
        names = self._by_pool[kind.plural].get((namespace, pool), set())
        return [self._objects[kind.plural][(namespace, name)] for name in sorted(names)]

    def list_in_namespace(self, kind: Kind, namespace: str) -> list[Stored]:
        """All objects of a namespace, by name."""
        names = self._by_namespace[kind.plural].get(namespace, set())
        return [self._objects[kind.plural][(namespace, name)] for name in sorted(names)]

    def list_pools_of_model(self, namespace: str, model_name: str) -> list[Stored]:
        """Pools of a namespace that serve a model under this name, by name."""
        names = self._by_model.get((namespace, model_name), set())
        return [self._objects[POOL.plural][(namespace, name)] for name in sorted(names)]

    def read(self, kind: Kind, namespace: str, name: str, parse: Callable[[Stored], T]) -> T | None:
        """One object as `parse` reads it, parsed once per copy; None when it is gone. One kind is read by one parser.

        What `parse` raises is raised again each time.
        """
        key = (namespace, name)
        stored = self._objects[kind.plural].get(key)
        if stored is None:
            return None
        slot = (kind.plural, key)
        if slot not in self._read:
            self._read[slot] = parse(stored)
        found: Any = self._read[slot]
        return found  # type: ignore[no-any-return]

    def read_of_pool(self, kind: Kind, namespace: str, pool: str, parse: Callable[[Stored], T]) -> list[T]:
        """Objects that carry the pool's label, by name, each as `parse` reads it."""
        names = sorted(self._by_pool[kind.plural].get((namespace, pool), ()))
        found = (self.read(kind, namespace, name, parse) for name in names)
        return [entry for entry in found if entry is not None]

    def count_changes(self, kind: Kind) -> int:
        """A number that grows with every change of the kind: while it stays, so does what was derived from them."""
        return self._changes[kind.plural]

    def keys(self, kind: Kind) -> list[Key]:
        """Namespaces and names of all objects of a kind."""
        return list(self._objects[kind.plural])

    def _note_change(self, kind: Kind, key: Key) -> None:
        self._changes[kind.plural] += 1
        self._read.pop((kind.plural, key), None)

    def _index(self, kind: Kind, obj: Obj) -> None:
        namespace, name = _key(obj)
        self._by_namespace[kind.plural][namespace].add(name)
        if kind == POOL:
            self._by_model[(namespace, find_model_name(obj))].add(name)
        pool = find_owner_pool(obj)
        if pool is not None:
            self._by_pool[kind.plural][(namespace, pool)].add(name)

    def _unindex(self, kind: Kind, obj: Obj) -> None:
        namespace, name = _key(obj)
        _discard(self._by_namespace[kind.plural], namespace, name)
        if kind == POOL:
            _discard(self._by_model, (namespace, find_model_name(obj)), name)
        pool = find_owner_pool(obj)
        if pool is not None:
            _discard(self._by_pool[kind.plural], (namespace, pool), name)


def find_owner_pool(obj: Obj) -> str | None:
    """Name of the pool an object belongs to, GATEWAY_OWNER for the gateway's, None for others."""
    own = obj["metadata"].get("labels") or {}
    if labels.POOL in own:
        return str(own[labels.POOL])
    if own.get(labels.COMPONENT) == labels.GATEWAY_COMPONENT and own.get(labels.PART_OF) == "millpond":
        return GATEWAY_OWNER
    return None


def find_model_name(pool: Obj) -> str:
    """The name under which a pool's model is served: its own where it gives none."""
    model = (pool.get("spec") or {}).get("model") or {}
    return str(model.get("name") or pool["metadata"]["name"])


def find_replicas_manager(obj: Obj, *, subresource: str | None = None) -> str:
    """Field manager that owns `spec.replicas` and wrote last; empty when none does, or not through the subresource."""
    entries = obj["metadata"].get("managedFields") or ()
    entries = [e for e in entries if subresource is None or e.get("subresource") == subresource]
    owners = [e for e in entries if "f:replicas" in ((e.get("fieldsV1") or {}).get("f:spec") or {})]
    owners.sort(key=lambda entry: str(entry.get("time") or ""))
    return str(owners[-1].get("manager") or "") if owners else ""


def was_created(obj: Obj) -> bool:
    """Whether the operator's fields are noted as those of a create."""
    return any(is_create_note(entry) for entry in obj["metadata"].get("managedFields") or ())


def _slim(kind: Kind, obj: Obj) -> Stored:
    metadata = {name: value for name, value in obj["metadata"].items() if name != "managedFields"}
    scaled_by = find_replicas_manager(obj, subresource="scale") if kind in (DEPLOYMENT, POOL) else ""
    manager = find_replicas_manager(obj) if kind == DEPLOYMENT else scaled_by
    return Stored({**obj, "metadata": metadata}, _version(obj), manager, scaled_by, was_created(obj))


def _discard(index: dict[K, set[str]], key: K, name: str) -> None:
    index[key].discard(name)
    if not index[key]:
        del index[key]


def _key(obj: Obj) -> Key:
    metadata = obj["metadata"]
    return str(metadata.get("namespace") or ""), str(metadata["name"])


def _version(obj: Obj) -> int:
    return int(obj["metadata"].get("resourceVersion") or 0)
