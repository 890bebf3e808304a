from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond_engine.cli import main
from millpond_engine.commands.advice import (
    CANDIDATES,
    LengthsError,
    Workload,
    choose_block_tokens,
    compute_curve,
    parse_distribution,
)
from millpond_engine.commands.advise import measure_block_read_tokens, read_lengths


def test_the_curve_counts_slots_and_addresses() -> None:
    curve = compute_curve(
        Workload((10, 17), shared_prefix_tokens=20), block_read_tokens=0.5, candidates=(1, 8, 16)
    )
    assert [point.fragmentation for point in curve] == [0, (2 * 8 + 3 * 8 - 27) / 27, (16 + 32 - 27) / 27]
    assert [point.recompute for point in curve] == [0, 8 / 27, 8 / 27]
    assert [point.indirection for point in curve] == [27 * 0.5 / 27, 5 * 0.5 / 27, 3 * 0.5 / 27]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=50), st.floats(0.001, 10))
def test_costs_of_addresses_fall_and_the_advice_is_the_floor(lengths: list[int], cost: float) -> None:
    curve = compute_curve(Workload(tuple(lengths)), block_read_tokens=cost)
    addresses = [point.indirection for point in curve]
    assert addresses == sorted(addresses, reverse=True)
    assert all(point.total >= choose_block_tokens(curve).total for point in curve)


def test_long_sequences_and_dear_addresses_want_larger_blocks() -> None:
    def advise(text: str, cost: float) -> int:
        return choose_block_tokens(
            compute_curve(Workload(parse_distribution(text)), block_read_tokens=cost)
        ).block_tokens

    assert advise("lognormal:100,1", 0.5) < advise("lognormal:8000,1", 0.5)
    assert advise("lognormal:500,1", 0.1) < advise("lognormal:500,1", 4)


def test_distributions() -> None:
    assert parse_distribution("fixed:7") == (7,)
    uniform = parse_distribution("uniform:100,200")
    assert abs(sum(uniform) / len(uniform) - 150) < 1
    assert abs(sorted(parse_distribution("lognormal:500,1"))[500] - 500) < 5
    for text in ("fixed", "uniform:1", "normal:1,2", "lognormal:0,1", "fixed:x"):
        with pytest.raises(LengthsError):
            parse_distribution(text)


def test_files_of_lengths(tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text('12\n\n{"input_length": 30, "output_length": 5}\n', encoding="utf-8")
    assert read_lengths(file) == (12, 35)
    for text in ("", "abc", "0", '{"input_length": 1}'):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(LengthsError):
            read_lengths(file)


def test_an_address_costs_something_on_this_machine() -> None:
    assert 0 <= measure_block_read_tokens(768) < 100


def test_the_command_prints_the_curve_and_plots_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "curve.png"
    assert (
        main(["advise", "--distribution", "fixed:1000", "--block-read-tokens", "0.3", "--plot", str(plot)])
        == 0
    )
    out = capsys.readouterr().out
    assert "<- advice" in out
    assert "advice: --kv-cache-block-tokens" in out
    assert len([line for line in out.splitlines() if line.strip().split(" ")[0].isdigit()]) >= len(CANDIDATES)
    assert plot.stat().st_size > 1000
    assert main(["advise", "--distribution", "nothing"]) == 2
