"""The main job on a real cluster with the real model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from openai import OpenAI
from tests.e2e.conftest import Fleet

from demo.install import make_pool

pytestmark = [pytest.mark.node, pytest.mark.model, pytest.mark.timeout(900)]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_apply_makes_a_fleet_that_answers_paris(fleet: Fleet, gateway_url: Callable[[], str]) -> None:
    site = fleet.site
    site.apply(make_pool(fleet.model, namespace=site.namespace, replicas=1))
    pool = site.wait_ready("smollm2", seconds=600)
    assert pool["status"]["readyReplicas"] == pool["status"]["desiredReplicas"] == 1
    assert all(
        c["observedGeneration"] == pool["metadata"]["generation"] for c in pool["status"]["conditions"]
    )

    version = site.run_kubectl(
        "exec",
        "deploy/millpond-gateway",
        "--",
        "python",
        "-m",
        "millpond_gateway",
        "--version",
        what="asking for the form",
    )
    assert version.strip().endswith("(compiled, jemalloc)")

    client = OpenAI(base_url=gateway_url() + "/v1", api_key="none", timeout=120)
    assert [model.id for model in client.models.list()] == ["smollm2"]
    chunks = list(
        client.chat.completions.create(
            model="smollm2",
            messages=QUESTION,  # type: ignore[arg-type]
            stream=True,
            temperature=0,
            max_tokens=32,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "The capital of France is Paris."
    assert len([c for c in chunks if c.choices and c.choices[0].delta.content]) > 3, (
        "the answer came in one piece"
    )

    again = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=32)  # type: ignore[arg-type]
    assert again.choices[0].message.content == text
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 0
