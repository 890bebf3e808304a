"""`millpond-engine advise`: measure the cost of a block address here, print the U-curve, plot it when asked."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

from millpond_engine.commands.advice import (
    CurvePoint,
    LengthsError,
    Workload,
    choose_block_tokens,
    compute_curve,
    format_curve,
    parse_distribution,
)
from millpond_engine.commands.ranges import MAX_TOKENS, number, whole

_READ_TOKENS = 16_384
_MAX_READ_BYTES = 256 * 1024 * 1024
_LENGTH_KEYS = ("input_length", "output_length")


def add_advise_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `advise`."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="tokens per sequence: one number per line, or JSON lines with input_length and output_length",
    )
    source.add_argument(
        "--distribution",
        default="lognormal:500,1.0",
        metavar="KIND:NUMBERS",
        help="fixed:N, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA (default: lognormal:500,1.0)",
    )
    parser.add_argument(
        "--shared-prefix-tokens",
        type=whole(0, MAX_TOKENS),
        default=0,
        metavar="N",
        help="system prompt all requests share",
    )
    parser.add_argument(
        "--kv-bytes-per-token",
        type=whole(1, 1 << 30),
        default=23_040,
        metavar="N",
        help="of all layers (default: SmolLM2-135M in bfloat16)",
    )
    parser.add_argument(
        "--layers",
        type=whole(1, 10_000),
        default=30,
        metavar="N",
        help="layers among which these bytes are split (default: 30)",
    )
    parser.add_argument(
        "--block-read-tokens",
        type=number(0, 1e6),
        metavar="X",
        help="cost of one block address in tokens read; default: measured here",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="write the curve as an image (needs matplotlib)"
    )


def run_advise(arguments: argparse.Namespace) -> int:
    """Print the curve and the advice; returns the exit code."""
    try:
        lengths = (
            read_lengths(arguments.lengths)
            if arguments.lengths
            else parse_distribution(arguments.distribution)
        )
    except (LengthsError, OSError) as error:
        print(f"millpond-engine advise: {error}", file=sys.stderr)
        return 2
    cost = arguments.block_read_tokens
    how = "given"
    if cost is None:
        cost, how = (
            measure_block_read_tokens(max(1, arguments.kv_bytes_per_token // arguments.layers)),
            "measured here",
        )
    curve = compute_curve(Workload(lengths, arguments.shared_prefix_tokens), block_read_tokens=cost)
    best = choose_block_tokens(curve)
    mean = sum(lengths) / len(lengths)
    print(
        f"{len(lengths)} lengths, mean {mean:.0f} tokens; one block address costs {cost:.3f} tokens of KV read ({how})"
    )
    print(format_curve(curve, best))
    print(f"advice: --kv-cache-block-tokens {best.block_tokens}")
    return _plot(arguments.plot, curve, best) if arguments.plot else 0


def read_lengths(path: Path) -> tuple[int, ...]:
    """Lengths of a file.

    Raises:
        LengthsError: no positive length, or a line that is none.
        OSError: it cannot be read.
    """
    lengths = []
    for at, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            length = sum(int(value[key]) for key in _LENGTH_KEYS) if isinstance(value, dict) else int(value)
        except (ValueError, KeyError, TypeError) as error:
            raise LengthsError(
                f"{path.name}:{at}: neither a number nor input_length and output_length"
            ) from error
        if length < 1:
            raise LengthsError(f"{path.name}:{at}: lengths must be positive")
        lengths.append(length)
    if not lengths:
        raise LengthsError(f"{path.name} holds no lengths")
    return tuple(lengths)


def measure_block_read_tokens(bytes_per_token: int) -> float:
    """Cost of one block address in tokens of one layer's KV, on this machine's memory.

    Gathers the same bytes through tables of small and of large blocks in random order and solves
    seconds = tokens · a + blocks · b for b / a.
    """
    tokens = min(_READ_TOKENS, max(1024, _MAX_READ_BYTES // bytes_per_token // 256 * 256))
    pool = np.zeros((tokens, bytes_per_token), dtype=np.uint8)
    small, large = _time_gather(pool, 1), _time_gather(pool, 256)
    per_block = (small - large) / (tokens - tokens / 256)
    per_token = (large - per_block * tokens / 256) / tokens
    return max(0.0, per_block / per_token) if per_token > 0 else 0.0


def _time_gather(pool: np.ndarray, block_tokens: int) -> float:
    """Fastest of several gathers through a shuffled block table, in seconds."""
    blocks = pool.reshape(len(pool) // block_tokens, -1)
    table = np.random.default_rng(0).permutation(len(blocks))
    target = np.empty_like(blocks)
    times = []
    for _ in range(7):
        started = time.perf_counter()
        np.take(blocks, table, axis=0, out=target)
        times.append(time.perf_counter() - started)
    return min(times)


def _plot(path: Path, curve: tuple[CurvePoint, ...], best: CurvePoint) -> int:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional
    except ImportError:
        print("millpond-engine advise: --plot needs matplotlib", file=sys.stderr)
        return 1
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    sizes = [point.block_tokens for point in curve]
    for name in ("fragmentation", "recompute", "indirection", "total"):
        axes.plot(sizes, [100 * getattr(point, name) for point in curve], label=name, marker="o")
    axes.axvline(best.block_tokens, linestyle=":", color="black")
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_xlabel("tokens per block")
    axes.set_ylabel("overhead, % of useful work")
    axes.legend()
    figure.savefig(path)
    return 0
