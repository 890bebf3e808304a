"""A tokenizer with more tokens than the model's matrices have rows, as after adding tokens without training them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.support.engine_server import Running, Setup, run_engine

from millpond_common.contract.engine_config import EngineConfig
from millpond_engine.commands.fake import make_fake_info, make_script
from millpond_engine.fake.runner import FakeOptions, FakeRunner
from millpond_engine.text.bytes_tokenizer import ByteTokenizer

OURS = 200


@pytest.fixture
async def small() -> AsyncIterator[Running]:
    """The tokenizer knows 259 tokens, the model 200."""

    def make_runner(config: EngineConfig, progress: Callable[[int, int], None]) -> FakeRunner:
        progress(1, 1)
        tokenizer = ByteTokenizer()
        info = replace(
            make_fake_info(config, tokenizer, num_blocks=64, num_host_blocks=0), vocabulary_size=OURS
        )
        return FakeRunner(info, make_script(tokenizer, output_tokens=64, fixed_text="done"), FakeOptions())

    async with run_engine(Setup(make_runner=make_runner)) as running:
        yield running
        await running.settle()


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": [OURS]},
        {"prompt": "a<|im_end|>"},
        {"prompt": "日"},
        {"logit_bias": {str(OURS): 1}},
        {"allowed_token_ids": [OURS]},
        {"stop_token_ids": [OURS]},
    ],
)
async def test_what_only_the_tokenizer_knows_is_the_callers_fault(small: Running, change: Any) -> None:
    status, answer = await small.post("/v1/completions", {"prompt": "hi", "max_tokens": 4, **change})
    assert (status, answer["error"]["code"]) == (400, "invalid_value")


async def test_what_the_model_cannot_say_need_not_be_forbidden(small: Running) -> None:
    answer = await small.complete(prompt="hi", max_tokens=4, bad_words=["<|im_end|>", "x"])
    assert answer["choices"][0]["text"] == "done"
