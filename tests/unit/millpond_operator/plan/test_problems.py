"""Names of what is wrong with a replica."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.operator_builders import NOW, make_container, make_pod

from millpond_common.contract.reasons import ConditionReason
from millpond_operator.plan.problems import PATIENCE_SECONDS, find_problem, find_problems, find_useful_line
from millpond_operator.plan.snapshot import Capacity

FETCH = {"name": "fetch-model", "is_init": True, "running": False}
LOG = """INFO loading model
Traceback (most recent call last):
  File "x.py", line 1
ValueError: unknown architecture "mamba"
INFO bye"""


@pytest.mark.parametrize(
    ("container", "reason", "words"),
    [
        (
            {
                "running": False,
                "waiting_reason": "ImagePullBackOff",
                "waiting_message": 'Back-off pulling image "x:9"',
            },
            ConditionReason.IMAGE_PULL,
            'pulling image "x:9"',
        ),
        (
            {
                "running": False,
                "waiting_reason": "CreateContainerConfigError",
                "waiting_message": 'secret "hf-token" not found',
            },
            ConditionReason.SECRET_NOT_FOUND,
            "Secret hf-token does not exist",
        ),
        (
            {
                "running": False,
                "waiting_reason": "CreateContainerError",
                "waiting_message": "failed to mount",
            },
            ConditionReason.CONFIG_ERROR,
            "failed to mount",
        ),
        (
            {
                **FETCH,
                "exit_code": 1,
                "exit_message": '{"reason": "NotFound", "message": "hf://o/misspelt: 404"}',
            },
            ConditionReason.MODEL_FETCH_FAILED,
            "hf://o/misspelt: 404",
        ),
        (
            {"exit_code": 137, "exit_reason": "OOMKilled", "restarts": 3},
            ConditionReason.OOM_KILLED,
            "3 restarts",
        ),
        (
            {"exit_code": 1, "exit_message": '{"reason": "ModelLoad", "message": "tensor x has shape 3"}'},
            ConditionReason.MODEL_LOAD,
            "tensor x has shape 3",
        ),
        (
            {"exit_code": 1, "exit_message": LOG, "waiting_reason": "CrashLoopBackOff", "running": False},
            ConditionReason.CRASH_LOOP,
            'unknown architecture "mamba"',
        ),
    ],
    ids=["image", "secret", "config", "fetch", "oom", "load", "crash"],
)
def test_op_042_the_reason_comes_from_the_container(
    container: dict[str, Any], reason: ConditionReason, words: str
) -> None:
    pod = make_pod("pod-7", ready=False, containers=(make_container(**container),))
    problem = find_problem(pod, None, "cpu 1")
    assert problem is not None
    assert problem.reason == reason
    assert "pod-7" in problem.message
    assert words in problem.message


def test_a_container_that_starts_is_no_problem() -> None:
    assert find_problem(make_pod(ready=False, containers=(make_container(),)), None, "") is None
    ended_well = make_container(**FETCH, exit_code=0)
    assert find_problem(make_pod(ready=False, containers=(ended_well, make_container())), None, "") is None


def test_a_past_crash_of_a_ready_container_is_no_problem() -> None:
    pod = make_pod(containers=(make_container(ready=True, restarts=1, exit_code=1),))
    assert find_problems((pod,), None, "", now=NOW) == ()


def test_op_046_the_message_says_what_is_asked_and_what_is_free() -> None:
    pod = make_pod(
        "pod-1",
        ready=False,
        scheduled=False,
        unschedulable_message="0/3 nodes: 3 Insufficient nvidia.com/gpu.",
    )
    problem = find_problem(pod, Capacity({"both": 0}, {"nvidia.com/gpu": "1"}), "nvidia.com/gpu 4")
    assert problem is not None
    assert problem.reason == ConditionReason.UNSCHEDULABLE
    assert "asks for nvidia.com/gpu 4" in problem.message
    assert "largest free on one node: nvidia.com/gpu 1" in problem.message
    assert "Insufficient nvidia.com/gpu" in problem.message


def test_a_missing_claim_is_named_as_such() -> None:
    pod = make_pod(
        scheduled=False, ready=False, unschedulable_message='persistentvolumeclaim "models" not found'
    )
    problem = find_problem(pod, None, "cpu 1")
    assert problem is not None
    assert problem.reason == ConditionReason.CLAIM_NOT_FOUND


def test_what_a_user_can_mend_comes_before_what_waits() -> None:
    unschedulable = make_pod("a", ready=False, scheduled=False, unschedulable_message="no room")
    crashing = make_pod("b", ready=False, containers=(make_container(exit_code=1),))
    problems = find_problems((unschedulable, crashing), None, "", now=NOW)
    assert [problem.reason for problem in problems] == [
        ConditionReason.CRASH_LOOP,
        ConditionReason.UNSCHEDULABLE,
    ]


def test_leaving_pods_have_no_problems() -> None:
    pod = make_pod(ready=False, deleting=True, containers=(make_container(exit_code=1),))
    assert find_problems((pod,), None, "", now=NOW) == ()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("error early\nmillpond-engine: /models/x: no tokenizer found\n", "/models/x: no tokenizer found"),
        (
            '{"event": "step failed", "exception": "Traceback\\nRuntimeError: boom"}',
            "step failed: RuntimeError: boom",
        ),
        ('{"event": "started"}\n{"event": "listening"}', "listening"),
        ("{broken error", "{broken error"),
        ("", ""),
        ("\n \n", ""),
        ("a\nb\n", "b"),
        ("x error: 1\nbye", "x error: 1"),
        ("e" * 1000, "e" * 400),
    ],
)
def test_the_useful_line(text: str, line: str) -> None:
    assert find_useful_line(text) == line


def test_a_pod_that_was_just_made_may_still_find_its_node() -> None:
    """Its first try fails while another leaves, or while a node is on its way: no warning for every scale-up."""
    waiting = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    pod = make_pod(ready=False, scheduled=False, unschedulable_message=waiting, created_at=NOW)
    assert find_problems((pod,), None, "", now=NOW + PATIENCE_SECONDS - 0.1) == ()
    (problem,) = find_problems((pod,), None, "", now=NOW + PATIENCE_SECONDS)
    assert problem.reason == ConditionReason.UNSCHEDULABLE
