from __future__ import annotations

from typing import Any

from tests.support.routing import BLOCK, make_tokens, pack_event_batch, token_keys

from millpond_gateway.routing.held import ReplicaBlocks
from millpond_gateway.routing.kvevents import decode_batch

TOKENS = make_tokens(1, 6 * BLOCK)
KEYS = token_keys(TOKENS)


def store(first: int, count: int, **fields: Any) -> dict[str, Any]:
    """Blocks `first` to `first + count` of TOKENS; block n has engine hash 100 + n."""
    return {
        "type": "BlockStored",
        "block_hashes": [100 + first + n for n in range(count)],
        "parent_block_hash": 99 + first if first else None,
        "token_ids": TOKENS[first * BLOCK : (first + count) * BLOCK],
        "block_size": BLOCK,
        "medium": "GPU",
        **fields,
    }


def remove(*numbers: int, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [100 + n for n in numbers], "medium": "GPU", **fields}


def make_blocks(*events: dict[str, Any], **settings: Any) -> ReplicaBlocks:
    blocks = ReplicaBlocks(**{"model": "m", "seed": 0, **settings})
    apply(blocks, *events)
    return blocks


def apply(blocks: ReplicaBlocks, *events: dict[str, Any]) -> tuple[int, int, int]:
    return blocks.apply(decode_batch(pack_event_batch(list(events))).events)


def held(blocks: ReplicaBlocks) -> int:
    return blocks.match(KEYS).num_blocks


def test_stores_extend_and_removals_shorten_the_prefix() -> None:
    blocks = make_blocks(store(0, 2), store(2, 3))
    assert held(blocks) == 5
    apply(blocks, remove(4), remove(3))
    assert held(blocks) == 3
    apply(blocks, store(3, 3))
    assert held(blocks) == 6


def test_gw_071_a_cleared_replica_is_empty() -> None:
    blocks = make_blocks(store(0, 6), {"type": "AllBlocksCleared"})
    assert (held(blocks), blocks.num_blocks) == (0, 0)


def test_gw_075_a_block_stored_three_times_counts_once() -> None:
    blocks = make_blocks(store(0, 2), store(0, 2), store(0, 2))
    assert blocks.num_blocks == 2
    apply(blocks, remove(1), remove(0))
    assert (held(blocks), blocks.num_blocks) == (0, 0)


def test_a_reannounced_block_is_not_immortal() -> None:
    blocks = make_blocks(store(0, 2), store(0, 2, reuse=True))
    apply(blocks, remove(1))
    assert held(blocks) == 1


def test_offload_chunks_that_share_a_block_are_counted() -> None:
    blocks = make_blocks(store(0, 2, medium="CPU"), store(0, 2, medium="CPU"))
    apply(blocks, remove(0, 1, medium="CPU"))
    assert blocks.match(KEYS).credit_blocks > 0
    apply(blocks, remove(0, 1, medium="CPU"))
    assert blocks.match(KEYS).credit_blocks == 0


def test_tiers_continue_one_another_at_their_worth() -> None:
    blocks = make_blocks(store(0, 2), store(0, 4, medium="CPU"), store(0, 6, medium="DISK"))
    match = blocks.match(KEYS)
    assert match.num_blocks == 2
    assert match.credit_blocks == 2 + 2 * 0.75 + 2 * 0.25


def test_a_child_of_an_unknown_parent_is_not_guessed() -> None:
    blocks = make_blocks()
    assert apply(blocks, store(2, 2)) == (0, 0, 2)


def test_another_block_size_has_keys_of_its_own() -> None:
    event = store(0, 1, block_size=2 * BLOCK, token_ids=TOKENS[: 2 * BLOCK])
    blocks = make_blocks(event)
    assert held(blocks) == 0
    assert blocks.match(token_keys(TOKENS, block_tokens=2 * BLOCK)).num_blocks == 1


def test_every_cache_group_must_hold_the_prefix() -> None:
    blocks = make_blocks(store(0, 6), store(0, 4, group_idx=1))
    assert held(blocks) == 4


def test_a_window_group_needs_only_its_window() -> None:
    window = {
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 2 * BLOCK,
    }
    blocks = make_blocks(store(0, 6), store(0, 6, **window))
    apply(blocks, remove(0, 1, 2, group_idx=1))
    assert held(blocks) == 6
    apply(blocks, remove(5, group_idx=1))
    assert held(blocks) == 5
    apply(blocks, remove(4, group_idx=1))
    assert held(blocks) == 0  # one block of a window of two


def test_gw_097_blocks_of_one_adapter_are_none_of_another() -> None:
    blocks = make_blocks(store(0, 3, lora_name="a"))
    assert blocks.match(token_keys(TOKENS, adapter="a")).num_blocks == 3
    assert blocks.match(token_keys(TOKENS, adapter="b")).num_blocks == 0
    assert held(blocks) == 0


def test_more_blocks_than_the_engine_has_show_missed_removals() -> None:
    blocks = make_blocks(num_blocks=4)
    for number in range(40):
        tokens = make_tokens(50 + number, 2 * BLOCK)
        hashes = [1000 + 2 * number, 1001 + 2 * number]
        apply(blocks, store(0, 2, token_ids=tokens, block_hashes=hashes))
    assert blocks.overflowed


def test_memory_per_block_is_bounded() -> None:
    blocks = make_blocks()
    for number in range(2000):
        tokens = make_tokens(number + 10, 8 * BLOCK)
        apply(blocks, store(0, 8, token_ids=tokens, block_hashes=[number * 8 + n + 5 for n in range(8)]))
    assert blocks.num_blocks == 16_000
    assert blocks.num_bytes / blocks.num_blocks <= 64  # foreign hashes need a map beside the set
