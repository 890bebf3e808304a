"""What a loaded model and its memory allow: the numbers that bound the scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the loaded model and its memory allow."""

    num_blocks: int
    block_tokens: int
    max_model_tokens: int
    num_host_blocks: int = 0
    bytes_per_block: int = 0
    copy_bytes_per_second: float = 0.0
    """Measured device to host bandwidth; 0: swapping is never chosen by cost."""
    eos_token_ids: tuple[int, ...] = ()
    vocabulary_size: int = 1 << 32
