"""Bounds on what one gateway process has open, checked before a body is read."""

from __future__ import annotations

from millpond_gateway.flow.records import Action, FlowReason, FlowSettings, Verdict

_ADMIT = Verdict(Action.ADMIT, FlowReason.CAPACITY)
_RETRY_SECONDS = 1


class Gate:
    """Counts of open requests and body bytes. `enter`, `grow` while the body comes, `leave` once."""

    def __init__(self, settings: FlowSettings, *, max_descriptors: int | None = None) -> None:
        self._settings = settings
        self._max_descriptors = max_descriptors
        self.num_open = 0
        self.num_bytes = 0

    def enter(self, *, content_length: int | None, open_descriptors: int = 0) -> Verdict:
        """Admit a request by its head; a verdict that sheds has counted nothing.

        `content_length` None means a chunked body whose bytes come by `grow`.
        """
        size = content_length or 0
        reason = self._refuse(size, open_descriptors)
        if reason is not None:
            hint = None if reason is FlowReason.BODY_TOO_LARGE else _RETRY_SECONDS
            return Verdict(Action.SHED, reason, hint)
        self.num_open += 1
        self.num_bytes += size
        return _ADMIT

    def grow(self, *, more_bytes: int, total_bytes: int) -> Verdict:
        """Account for bytes of a chunked body; `total_bytes` is the body so far, `more_bytes` included."""
        if total_bytes > self._settings.max_body_bytes:
            return Verdict(Action.SHED, FlowReason.BODY_TOO_LARGE)
        if self.num_bytes + more_bytes > self._settings.max_in_flight_bytes:
            return Verdict(Action.SHED, FlowReason.TOO_MANY_BYTES, _RETRY_SECONDS)
        self.num_bytes += more_bytes
        return _ADMIT

    def leave(self, *, body_bytes: int) -> None:
        """Forget a request that `enter` admitted, with all bytes counted for it."""
        assert self.num_open > 0
        assert self.num_bytes >= body_bytes
        self.num_open -= 1
        self.num_bytes -= body_bytes

    def _refuse(self, size: int, open_descriptors: int) -> FlowReason | None:
        if size > self._settings.max_body_bytes:
            return FlowReason.BODY_TOO_LARGE
        if self._max_descriptors is not None and open_descriptors + 2 > self._max_descriptors:
            return FlowReason.TOO_MANY_DESCRIPTORS  # one for the client is open; one more goes to the engine
        if self.num_open >= self._settings.max_in_flight:
            return FlowReason.TOO_MANY_REQUESTS
        if self.num_bytes + size > self._settings.max_in_flight_bytes:
            return FlowReason.TOO_MANY_BYTES
        return None
