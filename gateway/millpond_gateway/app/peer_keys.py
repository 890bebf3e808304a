"""Keys of the gateways' peer port: from a file that may change while they serve, and of a gateway's own workers.

A key that was read once stays good for a while after it has left the file, since mounted Secrets change at other times in
other pods. A file that cannot be used changes nothing.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from pathlib import Path

import structlog

from millpond_common.contract.gateway_peers import DIRECTORY, ENTRY, MIN_KEY_BYTES
from millpond_gateway.app.channel import PeerKey, make_key
from millpond_gateway.app.options import Options
from millpond_gateway.app.plan import WorkerPlan

_log = structlog.get_logger("peers")
_LOOK_SECONDS = 5.0
KEEP_SECONDS = 600.0
"""A mounted Secret is renewed within two minutes."""
_MAX_FILE_BYTES = 64 * 1024


class PeerKeyError(ValueError):
    """The file of keys cannot be used."""


def read_keys(path: Path) -> tuple[PeerKey, ...]:
    """Keys of a file, one a line.

    Raises:
        PeerKeyError: there is no key in it, or one that can be guessed.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise PeerKeyError(f"{path}: {error.strerror or error}") from error
    lines = [line.strip() for line in data.splitlines() if line.strip()]
    if not lines:
        raise PeerKeyError(f"{path}: no key in it; write one of {MIN_KEY_BYTES} bytes or more, one a line")
    if any(len(line) < MIN_KEY_BYTES for line in lines):
        raise PeerKeyError(f"{path}: a key shorter than {MIN_KEY_BYTES} bytes")
    return tuple(make_key(line) for line in dict.fromkeys(lines))


def make_worker_key(secret: str) -> PeerKey:
    """The key of one gateway's workers, new at each start."""
    return make_key(hmac.digest(secret.encode(), b"millpond gateway workers", "sha256"))


def find_peer_keys(options: Options, plan: WorkerPlan | None, clock: Callable[[], float]) -> PeerKeys | None:
    """Keys of this process; None where peers are known by their address alone."""
    path = options.peer_key_file
    if path is None and not options.static and Path(DIRECTORY).is_dir():
        path = Path(DIRECTORY, ENTRY)
    if path is None and (options.peers or not options.static):
        _log.warning("peers are known by their address alone: there is no --peer-key-file")
        return None
    return PeerKeys(path, clock, own=(make_worker_key(plan.pin_secret),) if plan is not None else ())


class PeerKeys:
    """Keys that count now."""

    def __init__(
        self, path: Path | None, clock: Callable[[], float], *, own: tuple[PeerKey, ...] = ()
    ) -> None:
        self._path = path
        self._clock = clock
        self._own = own
        self._read: tuple[PeerKey, ...] = ()
        self._left: dict[PeerKey, float] = {}
        """Keys that have left the file, and until when they count."""
        self._looked_at = float("-inf")
        self._problem = ""
        self.current: tuple[PeerKey, ...] = own
        """The preferred first."""

    def look(self) -> bool:
        """Read the file again, now and then; True when other keys count than before."""
        now = self._clock()
        if now - self._looked_at < _LOOK_SECONDS:
            return False
        self._looked_at = now
        before = self.current
        if self._path is not None:
            self._renew(self._path, now)
        self._left = {key: until for key, until in self._left.items() if until > now}
        self.current = (*self._read, *self._left, *self._own)
        return self.current != before

    def _renew(self, path: Path, now: float) -> None:
        try:
            found = read_keys(path)
        except PeerKeyError as error:
            self._tell(str(error))
            return
        self._tell("")
        if found == self._read:
            return
        for key in self._read:
            self._left[key] = now + KEEP_SECONDS
        for key in found:
            self._left.pop(key, None)
        if self._read:
            _log.info("peer keys renewed", keys=len(found), former=len(self._left))
        self._read = found

    def _tell(self, problem: str) -> None:
        """Say once what is wrong, not at every look."""
        if problem and problem != self._problem:
            _log.warning(
                "key of the gateways not readable",
                error=problem,
                effect="keys read before stay good" if self._read else "no other gateway is heard",
            )
        self._problem = problem
