"""Where the cases run: under Triton's interpreter on the CPU, or without it on a GPU (`tests/gpu`).

The interpreter keeps bfloat16 as 16-bit integers and multiplies those; here it learns better.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _widen(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)


@pytest.fixture(autouse=True, scope="session")
def _bfloat16_products() -> Iterator[None]:
    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, _widen(a), _widen(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot
    yield
    interpreter.InterpreterBuilder.create_dot = plain


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tensors of kernel cases lie where the kernels run; a runner places its own."""
    if INTERPRETED or request.module.__name__.endswith("runner_cases"):
        yield
    else:
        with torch.device("cuda"):
            yield
