"""Start times of all pools by the model they serve, for the pools that have measured none themselves."""

from __future__ import annotations

from millpond_operator.scaling.starts import Start

Model = tuple[str, str | None, int]
"""What makes start times of two pools comparable: source, revision and tensor parallelism."""
MAX_OTHER_STARTS = 128


class StartIndex:
    """What each pool has measured; only pools with a start are in it."""

    def __init__(self) -> None:
        self._models: dict[str, Model] = {}
        self._starts: dict[Model, dict[str, tuple[Start, ...]]] = {}

    def put(self, uid: str, model: Model, starts: tuple[Start, ...]) -> None:
        """Take what a pool knows now."""
        if self._models.get(uid) == model and self._starts[model][uid] == starts:
            return
        self.forget(uid)
        if starts:
            self._models[uid] = model
            self._starts.setdefault(model, {})[uid] = starts

    def forget(self, uid: str) -> None:
        """Drop a pool."""
        model = self._models.pop(uid, None)
        if model is not None:
            del self._starts[model][uid]
            if not self._starts[model]:
                del self._starts[model]

    def list_others(self, uid: str, model: Model) -> tuple[Start, ...]:
        """Starts of other pools of the model, at most MAX_OTHER_STARTS, of those whose knowledge changed last."""
        found: list[Start] = []
        for other, starts in reversed(self._starts.get(model, {}).items()):
            if len(found) >= MAX_OTHER_STARTS:
                break
            if other != uid:
                found += reversed(starts)
        return tuple(reversed(found[:MAX_OTHER_STARTS]))
