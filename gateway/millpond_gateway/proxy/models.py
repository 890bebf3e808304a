"""Answers of `/v1/models`."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

import msgspec

from millpond_common.contract.openai import ApiError, ErrorCode
from millpond_gateway.proxy.dispatch import ModelCard


def make_model_answer(path: bytes, cards: Sequence[ModelCard]) -> bytes | ApiError:
    """The list, or one card for `/v1/models/{id}`."""
    name = path.removeprefix(b"/v1/models").removeprefix(b"/")
    if not name:
        return msgspec.json.encode({"object": "list", "data": [_describe(card) for card in cards]})
    wanted = unquote_to_bytes(name).decode("utf-8", "replace")
    for card in cards:
        if card.id == wanted:
            return msgspec.json.encode(_describe(card))
    return refuse_model(wanted, [card.id for card in cards])


def refuse_model(wanted: str, names: Sequence[str]) -> ApiError:
    """404 that says which models there are."""
    known = ", ".join(sorted(names)[:20]) or "none yet"
    message = f"the model {wanted[:100]!r} does not exist; models here: {known}"
    return ApiError(ErrorCode.MODEL_NOT_FOUND, message, "model")


def _describe(card: ModelCard) -> dict[str, object]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "millpond",
        "root": card.root,
        "parent": card.parent,
        "max_model_len": card.max_model_tokens,
    }
