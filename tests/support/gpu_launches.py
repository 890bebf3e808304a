"""See every program the GPU's host code starts, on tensors without a device, and compile it for any architecture."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from millpond_engine.kernels.gpu import launch as launcher
from millpond_engine.kernels.gpu.launch import LaunchOptions

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMITS = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Bytes of shared memory that one program may ask for."""


@dataclass(frozen=True)
class Launch:
    """One compiled form: what the compiler sees of a start."""

    program: Any = field(compare=False)
    name: str
    types: tuple[str, ...]
    constants: tuple[tuple[str, int], ...]
    options: LaunchOptions

    def __str__(self) -> str:
        shown = {"BLOCK_M", "TILE", "HEAD_DIM", "GROUP", "WIDTH", "VOCABULARY", "RANDOM", "NORMS"}
        parts = [f"{key}={value}" for key, value in self.constants if key in shown]
        return f"{self.name}({', '.join(parts)})"


@contextmanager
def recorded_launches(device: str = "cuda") -> Iterator[list[Launch]]:
    """Collect instead of starting; each start is checked for device, layout and needless specialization."""
    found: list[Launch] = []
    plain = launcher.launch

    def record(
        program: Any, grid: tuple[int, ...], *arguments: Any, options: LaunchOptions, **constants: Any
    ) -> None:
        assert 1 <= len(grid) <= 3
        assert all(isinstance(size, int) and size > 0 for size in grid), grid
        assert all(size < 65536 for size in grid[1:]), (
            f"{program.__name__}: grid {grid} passes a limit of CUDA"
        )
        names = program.arg_names
        assert list(constants) == names[len(arguments) :], f"{program.__name__}: {names} against {constants}"
        types = [_type(program, index, value, device) for index, value in enumerate(arguments)]
        numbers = tuple((name, int(value)) for name, value in constants.items())
        found.append(Launch(program, program.__name__, tuple(types), numbers, options))

    launcher.launch = record
    try:
        yield found
    finally:
        launcher.launch = plain


def _type(program: Any, index: int, value: Any, device: str) -> str:
    where = f"{program.__name__}: {program.arg_names[index]}"
    if isinstance(value, torch.Tensor):
        assert value.device.type == device, f"{where} lies on {value.device}"
        assert value.stride(-1) == 1 or value.shape[-1] == 1, f"{where} has gaps between neighbours"
        offset = value.storage_offset() * value.element_size()
        assert offset % 16 == 0, f"{where} starts off a 16-byte boundary: it would compile a second form"
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert program.params[index].do_not_specialize, f"{where} would compile again for 1 and multiples of 16"
    return "i32"


@dataclass(frozen=True)
class Compiled:
    """What a form takes of its architecture."""

    shared_bytes: int
    registers: int
    spilled: int
    """Bytes on NVIDIA, registers on AMD."""
    threads: int


def compile_launch(launch: Launch, target: str) -> Compiled:
    """Compile one form ahead of time, pointers aligned as torch aligns them."""
    names = launch.program.arg_names
    signature = dict(zip(names, launch.types, strict=False)) | {
        name: "constexpr" for name, _ in launch.constants
    }
    aligned = {
        (index,): [["tt.divisibility", 16]] for index, kind in enumerate(launch.types) if kind.startswith("*")
    }
    source = triton.compiler.ASTSource(launch.program, signature, dict(launch.constants), aligned)
    options = {"num_warps": launch.options.num_warps, "num_stages": launch.options.num_stages}
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    threads = launch.options.num_warps * TARGETS[target].warp_size
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        registers, spilled = (
            _amd(text, "vgpr_count"),
            _amd(text, "vgpr_spill_count") + _amd(text, "sgpr_spill_count"),
        )
    else:
        registers, spilled = _nvidia(compiled.asm["ptx"], target)
    return Compiled(compiled.metadata.shared, registers, spilled, threads)


def _amd(text: str, field_name: str) -> int:
    found = re.search(rf"\.{field_name}:\s+(\d+)", text)
    assert found is not None, field_name
    return int(found[1])


def _nvidia(ptx: str, target: str) -> tuple[int, int]:
    """Registers of a thread and bytes of spill stores and loads, as ptxas tells them."""
    wanted = re.search(r"^\.target (\S+)", ptx, re.MULTILINE)
    assert wanted is not None
    tool = knobs.nvidia.ptxas_blackwell if target == "sm_100" else knobs.nvidia.ptxas
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "program.ptx")
        source.write_text(ptx)
        name = wanted[1].rstrip(",")
        command = [
            tool.path,
            "-v",
            f"--gpu-name={name}",
            str(source),
            "-o",
            str(Path(folder, "program.cubin")),
        ]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill", log)
    assert registers is not None, log
    assert len(spills) == 2, log
    return int(registers[1]), sum(int(count) for count in spills)
