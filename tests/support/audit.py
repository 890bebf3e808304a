"""What a user asked of the API server, from its audit log, and whether rules allow it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Rule = dict[str, Any]


@dataclass(frozen=True, order=True)
class Call:
    """One kind of call; `resource` has its subresource, as roles write it."""

    verb: str
    group: str
    resource: str
    namespace: str
    name: str
    code: int
    by_apply: bool = False
    """A create that an apply needs: the API server asks for it with the object's name, which a plain create has not."""


def read_events(log: Path, *, naming: str) -> Iterator[dict[str, Any]]:
    """Events whose lines hold a name and are written wholly; the server goes on writing while this reads."""
    whole, _, _ = log.read_text(encoding="utf-8").rpartition("\n")
    return (json.loads(line) for line in whole.splitlines() if naming in line)


def read_calls(log: Path, user: str) -> list[Call]:
    """Every call of a user on resources. An apply that created something needs the verb create too."""
    calls = []
    for event in read_events(log, naming=user):
        place = event.get("objectRef")
        if event["user"]["username"] != user or place is None or "resource" not in place:
            continue
        resource = place["resource"] + (f"/{place['subresource']}" if "subresource" in place else "")
        code = event["responseStatus"]["code"]
        made = (event["verb"], code) == ("patch", 201)
        rest = (place.get("apiGroup", ""), resource, place.get("namespace", ""), place.get("name", ""), code)
        calls += [Call(event["verb"], *rest), *([Call("create", *rest, by_apply=True)] if made else [])]
    return calls


def is_allowed(call: Call, rules: Iterable[Rule]) -> bool:
    """Whether any rule covers the call; a rule with names covers no list and no create but an apply's."""
    return any(_covers(rule, call) for rule in rules)


def _covers(rule: Rule, call: Call) -> bool:
    named = rule.get("resourceNames")
    return (
        call.verb in rule["verbs"]
        and call.group in rule["apiGroups"]
        and call.resource in rule["resources"]
        and (not named or (call.name in named and (call.verb != "create" or call.by_apply)))
    )


def list_rights(rules: Iterable[Rule]) -> set[tuple[str, str, str]]:
    """Every (group, resource, verb) the rules give."""
    return {
        (g, r, v)
        for rule in rules
        for g in rule["apiGroups"]
        for r in rule["resources"]
        for v in rule["verbs"]
    }
