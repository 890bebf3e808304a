"""What the supervising process tells each of its workers, through the environment."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import msgspec

_VARIABLE = "MILLPOND_GATEWAY_WORKER"


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part of a gateway."""

    number: int
    port: int
    """Shared by all workers; the kernel spreads connections over them."""
    host: str
    """Where the workers of this gateway reach one another."""
    peer_ports: tuple[int, ...]
    """Of all workers, by number."""
    admin_path: str
    """Unix socket on which the supervisor asks this worker."""
    pin_secret: str
    """Of readiness probes: any worker may get one."""

    @property
    def peer_port(self) -> int:
        """This worker's own."""
        return self.peer_ports[self.number]

    @property
    def siblings(self) -> frozenset[str]:
        """Peer addresses of the other workers."""
        others = self.peer_ports[: self.number] + self.peer_ports[self.number + 1 :]
        return frozenset(f"{self.host}:{port}" for port in others)


def write_plan(plan: WorkerPlan, environment: MutableMapping[str, str]) -> None:
    """Put the plan into a worker's environment."""
    environment[_VARIABLE] = msgspec.json.encode(plan).decode()


def take_plan(environment: MutableMapping[str, str] = os.environ) -> WorkerPlan | None:
    """The plan of this process, taken out of the environment; None for a gateway that is no worker."""
    text = environment.pop(_VARIABLE, None)
    return msgspec.json.decode(text, type=WorkerPlan) if text is not None else None
