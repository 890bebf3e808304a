"""What is wrong with a replica, named from what its pod reports."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from millpond_common.contract import labels
from millpond_common.contract.reasons import ConditionReason
from millpond_operator.plan.snapshot import Capacity, ContainerState, Pod

IMAGE_REASONS = {
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
}
CONFIG_REASONS = {
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "PreStartHookError",
}
SEVERITY = (
    ConditionReason.SECRET_NOT_FOUND,
    ConditionReason.CLAIM_NOT_FOUND,
    ConditionReason.CONFIG_ERROR,
    ConditionReason.IMAGE_PULL,
    ConditionReason.MODEL_FETCH_FAILED,
    ConditionReason.OOM_KILLED,
    ConditionReason.MODEL_TOO_LARGE,
    ConditionReason.MODEL_LOAD,
    ConditionReason.CRASH_LOOP,
    ConditionReason.UNSCHEDULABLE,
)
"""Which of several problems is reported: what a user can mend first comes first."""
MAX_LINE = 400
PATIENCE_SECONDS = 5.0
"""For which a pod may find no node before that is a problem; most find one within a second of the first try."""
PROGRAM = "millpond-engine:"
_MISSING = re.compile(r'(secret|configmap|persistentvolumeclaim) "([^"]+)" not found', re.IGNORECASE)
_USEFUL = re.compile(r"error|exception|fatal|failed|cannot|not found|denied|out of memory", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken replica."""

    reason: ConditionReason
    pod: str
    message: str


def find_problems(
    pods: tuple[Pod, ...], capacity: Capacity | None, asked: str, *, now: float
) -> tuple[Problem, ...]:
    """Problems of the pods that should live, the most telling first.

    Args:
        pods: pods of the current revision.
        capacity: free room, where the operator may see nodes.
        asked: what one replica asks for, as text.
        now: a pod that has just been made may wait for a node that is about to be free, or that somebody adds.
    """
    due = (pod for pod in pods if not pod.unschedulable_message or now - pod.created_at >= PATIENCE_SECONDS)
    found = (find_problem(pod, capacity, asked) for pod in due if not pod.deleting and not pod.ready)
    problems = [problem for problem in found if problem is not None]
    return tuple(sorted(problems, key=lambda problem: (SEVERITY.index(problem.reason), problem.pod)))


def find_problem(pod: Pod, capacity: Capacity | None, asked: str) -> Problem | None:
    """The problem of one pod; None when it is just not there yet."""
    if pod.unschedulable_message:
        return _find_unschedulable(pod, capacity, asked)
    for container in pod.containers:
        problem = _find_waiting(pod, container) or _find_ended(pod, container)
        if problem is not None:
            return problem
    return None


def _find_unschedulable(pod: Pod, capacity: Capacity | None, asked: str) -> Problem:
    missing = _MISSING.search(pod.unschedulable_message)
    if missing is not None:
        return Problem(
            ConditionReason.CLAIM_NOT_FOUND, pod.name, f"pod {pod.name}: {pod.unschedulable_message}"
        )
    free = ""
    if capacity is not None:
        free = "; largest free on one node: " + (
            ", ".join(f"{k} {v}" for k, v in capacity.free.items()) or "nothing"
        )
        for resource, most in capacity.beyond.items():
            free += f"; no node has that much {resource} at all (the most is {most}), and a replica cannot span nodes in this release"
    text = f"pod {pod.name} asks for {asked}{free}; the scheduler says: {pod.unschedulable_message}"
    return Problem(ConditionReason.UNSCHEDULABLE, pod.name, text)


def _find_waiting(pod: Pod, container: ContainerState) -> Problem | None:
    where = f"pod {pod.name}, container {container.name}"
    text = f"{where}: {container.waiting_reason}: {find_useful_line(container.waiting_message)}"
    if container.waiting_reason in IMAGE_REASONS:
        return Problem(ConditionReason.IMAGE_PULL, pod.name, text)
    if container.waiting_reason not in CONFIG_REASONS:
        return None
    missing = _MISSING.search(container.waiting_message)
    if missing is not None and missing.group(1).lower() == "secret":
        text = f"{where}: Secret {missing.group(2)} does not exist; create it, the replica goes on by itself"
        return Problem(ConditionReason.SECRET_NOT_FOUND, pod.name, text)
    return Problem(ConditionReason.CONFIG_ERROR, pod.name, text)


def _find_ended(pod: Pod, container: ContainerState) -> Problem | None:
    """A container that ended badly and is not up again for good."""
    if container.exit_code in (None, 0) or container.ready:
        return None
    where = f"pod {pod.name}, container {container.name}"
    told, line = parse_termination(container.exit_message)
    count = f" after {container.restarts} restarts" if container.restarts else ""
    text = f"{where} ended with code {container.exit_code}{count}: {line or container.exit_reason or 'no message'}"
    if container.exit_reason == "OOMKilled":
        text = (
            f"{where} was killed for using more memory than its limit{count}; raise resources.limits.memory"
        )
        return Problem(ConditionReason.OOM_KILLED, pod.name, text)
    if container.is_init and container.name.startswith(("fetch-", labels.INSPECT_CONTAINER)):
        return Problem(ConditionReason.MODEL_FETCH_FAILED, pod.name, text)
    if told in (ConditionReason.MODEL_LOAD, ConditionReason.MODEL_TOO_LARGE, ConditionReason.CONFIG_ERROR):
        return Problem(told, pod.name, text)
    return Problem(ConditionReason.CRASH_LOOP, pod.name, text)


def parse_termination(message: str) -> tuple[ConditionReason | None, str]:
    """Reason and text of a termination message: our programs leave one JSON line, others the end of their log."""
    for line in message.splitlines():
        found = _parse_json(line)
        if found is not None:
            return found
    return None, find_useful_line(message)


def _parse_json(line: str) -> tuple[ConditionReason | None, str] | None:
    if not line.lstrip().startswith("{"):
        return None
    try:
        told = json.loads(line)
    except ValueError:
        return None
    if not isinstance(told, dict) or "message" not in told:
        return None
    known = {reason.value: reason for reason in ConditionReason}
    return known.get(str(told.get("reason"))), str(told["message"])[:MAX_LINE]


def find_useful_line(text: str) -> str:
    """The line of a log's end that tells most; empty for an empty text.

    First what our programs say to a user before they end ("millpond-engine: …"), then the last line that speaks of an
    error, then the last line at all. A JSON log line counts as its event, with the last line of its exception.
    """
    lines = [_read_log_line(line.strip()) for line in text.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(PROGRAM)]
    useful = [line for line in lines if _USEFUL.search(line)]
    chosen = (told or useful or lines or [""])[-1]
    return chosen.removeprefix(PROGRAM).strip()[:MAX_LINE]


def _read_log_line(line: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    if not isinstance(entry, dict) or "event" not in entry:
        return line
    detail = str(entry.get("exception") or entry.get("error") or "").strip().splitlines()
    return f"{entry['event']}: {detail[-1]}" if detail else str(entry["event"])
