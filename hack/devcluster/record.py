"""What runs, written down: one small file, replaced as a whole."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from devcluster.network import Network, Ports
from devcluster.process import Process

FORMAT = 1


@dataclass(frozen=True)
class Record:
    """A started cluster. `started` turns true once it was ready; until then it is half a cluster."""

    version: str
    boot_id: str
    programs: str
    network: Network
    ports: Ports
    node_name: str
    processes: tuple[Process, ...]
    started: bool = False
    node_started: bool = False

    def with_process(self, process: Process) -> "Record":
        """The record with one more program."""
        return replace(self, processes=(*self.processes, process))

    def find(self, role: str) -> Process | None:
        """The program in a role."""
        return next((process for process in self.processes if process.role == role), None)


def render_record(record: Record) -> str:
    """Render a record as JSON."""
    return json.dumps({"format": FORMAT, **asdict(record)}, indent=1) + "\n"


def parse_record(text: str) -> Record | None:
    """Parse a record; None for anything another version or a torn write left, which then counts as stale."""
    try:
        data = json.loads(text)
        if data.pop("format") != FORMAT:
            return None
        data["network"] = Network(**data["network"])
        data["ports"] = Ports(**data["ports"])
        data["processes"] = tuple(Process(**process) for process in data["processes"])
        return Record(**data)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def load_record(path: Path) -> Record | None:
    """Read the record; None when there is none to use."""
    try:
        return parse_record(path.read_text())
    except FileNotFoundError:
        return None


def save_record(path: Path, record: Record) -> None:
    """Replace the record."""
    scratch = path.with_suffix(".new")
    scratch.write_text(render_record(record))
    scratch.replace(path)


def read_boot_id() -> str:
    """This boot of this machine; process numbers of another mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
