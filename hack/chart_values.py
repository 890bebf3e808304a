"""Read the documented values of the chart: each key that is no map of keys has a comment that starts with "# --"."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHART = Path(__file__).resolve().parent.parent / "charts" / "millpond"
KEY = re.compile(r"^( *)([A-Za-z]\w*):(?: (.*))?$")


@dataclass(frozen=True)
class Value:
    """One documented value."""

    path: str
    default: str
    text: str


def parse_values(text: str) -> Iterator[Value]:
    """Documented values in the order of the file.

    Raises:
        SystemExit: a value has no comment.
    """
    parents: list[str] = []
    comment = ""
    inside = -1
    for line in text.splitlines():
        if line.strip().startswith("# --"):
            comment = line.strip().removeprefix("# --").strip()
        found = KEY.match(line)
        if found is None or (0 <= inside < len(found[1])):
            continue
        inside = -1
        depth, key, default = len(found[1]) // 2, found[2], found[3]
        parents = [*parents[:depth], key]
        if comment:
            inside = len(found[1]) if default is None else -1
            yield Value(".".join(parents), default or "see values.yaml", comment)
        elif default is not None:
            raise SystemExit(f"values.yaml: {'.'.join(parents)} has no comment that starts with '# --'")
        comment = ""


def make_table(values: Iterator[Value]) -> str:
    """A Markdown table."""
    rows = [
        f"| `{value.path}` | `{value.default}` | {value.text.replace('|', chr(92) + '|')} |"
        for value in values
    ]
    return "\n".join(["| value | default | meaning |", "|---|---|---|", *rows]) + "\n"
