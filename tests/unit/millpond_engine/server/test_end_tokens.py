"""What ends a text: the end tokens of the model's configuration and those of its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.support.engine_server import Setup, run_engine

from millpond_common.contract.engine_config import EngineConfig
from millpond_engine.commands.fake import make_fake_info, make_script
from millpond_engine.fake.runner import FakeOptions, FakeRunner
from millpond_engine.text.bytes_tokenizer import ByteTokenizer


@pytest.mark.parametrize("own", [(), (258,), (256,), (999,)])
async def test_a_turn_ends_where_the_tokenizer_says_although_the_model_names_another_end(
    own: tuple[int, ...],
) -> None:
    def make_runner(config: EngineConfig, progress: Callable[[int, int], None]) -> FakeRunner:
        progress(1, 1)
        tokenizer = ByteTokenizer()
        info = make_fake_info(config, tokenizer, num_blocks=64, num_host_blocks=0)
        script = make_script(tokenizer, output_tokens=64, fixed_text="done")  # then id 256
        return FakeRunner(replace(info, eos_token_ids=own), script, FakeOptions())

    async with run_engine(Setup(make_runner=make_runner)) as engine:
        answer = await engine.chat("hi", max_tokens=20)
        assert answer["choices"][0]["message"]["content"] == "done"
        assert answer["choices"][0]["finish_reason"] == "stop"
        going_on = await engine.chat("hi", max_tokens=20, ignore_eos=True)
        assert going_on["choices"][0]["finish_reason"] == "length"
