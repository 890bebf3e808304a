"""Teach the interpreter products of bfloat16: it keeps them as 16-bit integers and multiplies those."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


def _widen(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)


@pytest.fixture(autouse=True, scope="session")
def _bfloat16_products() -> Any:
    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, _widen(a), _widen(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot
    yield
    interpreter.InterpreterBuilder.create_dot = plain
