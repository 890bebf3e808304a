"""Flags of the fake runner, and the runner they describe."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from pathlib import Path

from millpond_common.contract.engine_config import EngineConfig
from millpond_engine.commands.ranges import COUNT, MAX_TOKENS, SECONDS, number, whole
from millpond_engine.engine.runner import RunnerInfo
from millpond_engine.fake.cost import CostModel, make_faults
from millpond_engine.fake.runner import FakeOptions, FakeRunner
from millpond_engine.fake.script import DEFAULT_TEXT, FixedScript, Script, make_story
from millpond_engine.text.tokenizer import Tokenizer

_LOAD_STEP_SECONDS = 0.1


def add_fake_flags(parser: argparse.ArgumentParser) -> None:
    """Speeds, sizes and faults of `--runner fake`."""
    group = parser.add_argument_group("fake runner", "only with --runner fake: scripted text, modelled time")
    group.add_argument(
        "--fake-prefill-tokens-per-second", type=number(0, 1e12), default=0.0, help="0: prompts take no time"
    )
    group.add_argument("--fake-decode-step-seconds", type=SECONDS, default=0.0, help="time of a step")
    group.add_argument(
        "--fake-decode-row-seconds", type=SECONDS, default=0.0, help="added per decoding sequence"
    )
    group.add_argument("--fake-load-seconds", type=SECONDS, default=0.0, help="time until ready")
    group.add_argument(
        "--fake-blocks",
        type=whole(1, 100_000_000),
        default=4096,
        help="size of the block pool (default: 4096)",
    )
    group.add_argument("--fake-host-blocks", type=COUNT, default=0, help="blocks of host memory for swapping")
    group.add_argument(
        "--fake-output-tokens",
        type=whole(1, MAX_TOKENS),
        default=64,
        help="length of an answer (default: 64)",
    )
    group.add_argument(
        "--fake-text", metavar="FILE", type=Path, help="what every answer says, instead of the story"
    )
    group.add_argument(
        "--fake-check-kv", action="store_true", help="compare every block with its tokens (slow)"
    )
    group.add_argument(
        "--fake-fail-step", type=COUNT, action="append", default=[], help="this step fails; repeatable"
    )
    group.add_argument(
        "--fake-crash-step", type=COUNT, action="append", default=[], help="this step is a defect"
    )
    group.add_argument(
        "--fake-stall-step", type=COUNT, action="append", default=[], help="this step takes longer"
    )
    group.add_argument("--fake-stall-seconds", type=SECONDS, default=0.0, help="how much longer")
    group.add_argument(
        "--fake-fail-load", metavar="MESSAGE", default="", help="loading fails with this message"
    )


def list_preferred(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What a fake says where a grammar forbids its script: what closes JSON comes first."""
    spelled = [tokenizer.encode(text, add_special_tokens=False) for text in '"}]:,0']
    return tuple(tokens[0] for tokens in spelled if len(tokens) == 1)


def make_script(tokenizer: Tokenizer, *, output_tokens: int, fixed_text: str | None = None) -> Script:
    """The default story, or one text for everybody, in the tokenizer's tokens."""
    end_token = tokenizer.facts.eos_token_ids[0]
    if fixed_text is not None:
        return FixedScript(tuple(tokenizer.encode(fixed_text, add_special_tokens=False)), end_token)
    sentences = [f"{s} " for s in re.split(r"(?<=\.) ", DEFAULT_TEXT) if s]
    encoded = [tokenizer.encode(sentence, add_special_tokens=False) for sentence in sentences]
    return make_story(encoded, end_token=end_token, output_tokens=output_tokens)


def make_fake_info(
    config: EngineConfig, tokenizer: Tokenizer, *, num_blocks: int, num_host_blocks: int = 0
) -> RunnerInfo:
    """Facts of a fake replica."""
    return RunnerInfo(
        model="fake",
        vocabulary_size=tokenizer.facts.vocabulary_size,
        max_model_tokens=config.max_model_tokens,
        block_tokens=config.kv_cache.block_tokens,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        bytes_per_block=config.kv_cache.block_tokens * 4,
        dtype="none",
        device="fake",
        eos_token_ids=tokenizer.facts.eos_token_ids,
        limited_by=f"--fake-blocks {num_blocks}",
        copy_bytes_per_second=1e9,
    )


def make_fake_runner(
    arguments: argparse.Namespace,
    config: EngineConfig,
    tokenizer: Tokenizer,
    progress: Callable[[int, int], None],
) -> FakeRunner:
    """Wait as long as a load would take, then make the runner.

    Raises:
        RunnerError: when a failing load was asked for.
    """
    text = arguments.fake_text.read_text(encoding="utf-8") if arguments.fake_text else None
    script = make_script(tokenizer, output_tokens=arguments.fake_output_tokens, fixed_text=text)
    _wait(arguments.fake_load_seconds, progress)
    info = make_fake_info(
        config, tokenizer, num_blocks=arguments.fake_blocks, num_host_blocks=arguments.fake_host_blocks
    )
    options = FakeOptions(
        cost=CostModel(
            prefill_tokens_per_second=arguments.fake_prefill_tokens_per_second,
            decode_step_seconds=arguments.fake_decode_step_seconds,
            decode_row_seconds=arguments.fake_decode_row_seconds,
            load_seconds=arguments.fake_load_seconds,
        ),
        faults=make_faults(
            failing=arguments.fake_fail_step,
            crashing=arguments.fake_crash_step,
            stalling=arguments.fake_stall_step,
            stall_seconds=arguments.fake_stall_seconds,
            load_message=arguments.fake_fail_load,
        ),
        check_kv=arguments.fake_check_kv,
        preferred_tokens=list_preferred(tokenizer),
    )
    return FakeRunner(info, script, options)


def _wait(seconds: float, progress: Callable[[int, int], None]) -> None:
    started = time.monotonic()
    while (left := seconds - (time.monotonic() - started)) > 0:
        progress(round(1000 * (seconds - left)), round(1000 * seconds))
        time.sleep(min(left, _LOAD_STEP_SECONDS))
