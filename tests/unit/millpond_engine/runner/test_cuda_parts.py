"""Parts of the GPU runner that need no GPU: edits on the device against those on the host, memory, graph sizes."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.gpu_runtimes import EagerRuntime

from millpond_engine.records.grammar import TokenMasks
from millpond_engine.records.request import SamplingParams
from millpond_engine.records.step import NewRow, RowStep, StepPlan
from millpond_engine.runner.cuda_device import DeviceUnavailableError, explain_missing_compiler, find_gpu
from millpond_engine.runner.cuda_edits import EditedRow, LogitEditor
from millpond_engine.runner.cuda_graphs import graph_sizes
from millpond_engine.runner.cuda_memory import compute_device_pool
from millpond_engine.runner.cuda_reports import report_tokens
from millpond_engine.runner.cuda_rows import DeviceRows
from millpond_engine.runner.edits import edit_logits
from millpond_engine.runner.logprobs import token_logprobs
from millpond_engine.runner.masks import RowMasks
from millpond_engine.runner.memory import PoolTooSmallError

EDITS = [
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(presence_penalty=0.7, frequency_penalty=-0.3),
    SamplingParams(allowed_token_ids=(3, 9, 11, 40), logit_bias=((9, -2.0), (9, 5.0), (50, 1.0))),
    SamplingParams(bad_words=((8,), (5, 6), (1, 2, 3), (4, 2, 3), (), (2, 3), tuple(range(60)))),
    SamplingParams(repetition_penalty=0.8, presence_penalty=1.0, frequency_penalty=0.2, bad_words=((2, 3),)),
    SamplingParams(),
]


def make_rows(infos: list[NewRow], max_tokens: int = 64) -> DeviceRows:
    rows = DeviceRows(EagerRuntime(), max_rows=len(infos), max_tokens=max_tokens, block_tokens=16)
    rows.apply(StepPlan(0, (), tuple(infos)))
    return rows


@pytest.mark.parametrize("masked", [(), (1, 4), tuple(range(6))], ids=["free", "some", "all"])
@pytest.mark.parametrize("seed", range(3))
def test_edits_on_the_device_equal_those_on_the_host(seed: int, masked: tuple[int, ...]) -> None:
    generator = random.Random(seed)
    infos = []
    for row, sampling in enumerate(EDITS):
        tokens = (*(generator.randrange(60) for _ in range(generator.randrange(2, 20))), 5, 1, 2)
        prompt = generator.randrange(1, len(tokens))
        infos.append(NewRow(row, sampling, 0, tokens, prompt, (), stop_token_ids=(3, 7), min_tokens=row))
    rows = make_rows(infos)
    logits = torch.randn(len(infos), 60)
    expected = logits.clone()
    masks = RowMasks(TokenMasks(masked, generator.randbytes(9 * len(masked)), 9))
    for row in masked:
        expected[row].masked_fill_(torch.from_numpy(masks.list_banned(np.array([row]), 60))[0], float("-inf"))
    for line, info in zip(expected, infos, strict=True):
        edit_logits(line, info, np.array(info.tokens, np.int32))
    edited = [EditedRow(i, info, len(info.tokens)) for i, info in enumerate(infos)]
    LogitEditor(rows, EagerRuntime()).edit(logits, edited, masks)
    torch.testing.assert_close(logits, expected)


def test_a_bad_word_sees_tokens_that_only_the_device_knows() -> None:
    info = NewRow(0, SamplingParams(bad_words=((1, 2, 3),)), 0, (9, 1), 2, (0,))
    rows = make_rows([info])
    rows.store_tokens(torch.tensor([0]), torch.tensor([2]), torch.tensor([2]))
    logits = torch.zeros(1, 10)
    LogitEditor(rows, EagerRuntime()).edit(logits, [EditedRow(0, info, 3)])
    assert logits[0].isinf().nonzero().tolist() == [[3]]


def test_the_state_table_follows_plans() -> None:
    infos = [NewRow(row, SamplingParams(), 0, tuple(range(row + 2)), 1, (row, 30 + row)) for row in range(3)]
    rows = make_rows(infos)
    rows.note_lengths([RowStep(1, 0, 3)])
    again = NewRow(2, SamplingParams(), 0, (7, 7), 2, (5,))
    plan = StepPlan(
        1,
        (RowStep(0, 2, 1, (40,)), RowStep(2, 0, 2, (6,))),
        (again,),
        replaced_tables=((1, (21, 22, 23)), (1, (24,))),
        appended_tokens=((1, 55),),
    )
    rows.apply(plan)
    assert rows.block_tables[0].tolist() == [0, 30, 40, 0]
    assert rows.block_tables[1, :1].tolist() == [24]
    assert rows.block_tables[2, :2].tolist() == [5, 6]
    assert rows.tokens[1, :5].tolist() == [0, 1, 2, 0, 55]  # position 3 is sampled by the step in flight
    assert rows.tokens[2, :2].tolist() == [7, 7]
    assert rows.info(2) is again


def test_reports_equal_those_of_the_cpu_runner() -> None:
    logits, tokens, counts = torch.randn(4, 50), torch.tensor([3, 9, 0, 49]), [2, 0, 5, 1]
    report = report_tokens(logits, tokens, counts)
    found = report.finish(iter([tensor.numpy() for tensor in report.tensors()]))
    for one, other in zip(found, token_logprobs(logits, tokens, counts), strict=True):
        assert (one.rank, [token for token, _ in one.top]) == (other.rank, [token for token, _ in other.top])
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_graphs_cover_every_batch_up_to_their_largest() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(256)[-3:] == [240, 248, 256]
    assert len(graph_sizes(256)) == 35
    assert graph_sizes(300)[-3:] == [272, 288, 300]
    assert graph_sizes(4000)[-1] == 512


def test_the_pool_is_what_weights_and_the_largest_step_leave() -> None:
    sizes = {"percent": 90, "bytes_per_block": 1 << 20, "block_tokens": 16, "device_bytes": None}
    free, step = 10 << 30, 1 << 30
    pool = compute_device_pool(free_bytes=free, activation_bytes=step, useful_blocks=1 << 20, **sizes)
    assert pool.num_blocks == 8 << 10
    assert pool.limited_by.startswith("90 % of the 10.0 GiB")
    few = compute_device_pool(free_bytes=free, activation_bytes=step, useful_blocks=7, **sizes)
    assert (few.num_blocks, few.limited_by[:12]) == (7, "maxSequences")
    named = sizes | {"device_bytes": 5 << 20}
    assert (
        compute_device_pool(free_bytes=free, activation_bytes=step, useful_blocks=2, **named).num_blocks == 5
    )
    with pytest.raises(PoolTooSmallError, match=r"lower scheduling\.maxBatchTokens"):
        compute_device_pool(free_bytes=1 << 30, activation_bytes=step, useful_blocks=7, **sizes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_missing_gpu_is_named() -> None:
    with pytest.raises(DeviceUnavailableError, match="torch finds no GPU"):
        find_gpu()


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    (tmp_path / "gcc").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert explain_missing_compiler() is None
    (tmp_path / "gcc").unlink()
    assert "no C compiler" in str(explain_missing_compiler())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "Triton is not installed" in str(explain_missing_compiler())


def test_the_cpu_path_imports_no_gpu_code() -> None:
    code = (
        "import sys; import millpond_engine.runner.load; "
        "bad = [m for m in sys.modules if m.split('.')[0] == 'triton' or 'kernels.gpu' in m or m.endswith('cuda_load')]; "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
