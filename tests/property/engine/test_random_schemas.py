"""Random schemas, random walks through their masks: whatever the masks allow validates, and it always ends."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from millpond_engine.grammar.library import Library
from millpond_engine.grammar.spec import GrammarError, GrammarKind, GrammarSpec
from millpond_engine.server.structured import spell_literal
from millpond_engine.text.bytes_tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
VOCABULARY, ENDS = TOKENIZER.facts.vocabulary_size, TOKENIZER.facts.eos_token_ids
LIBRARY = Library(TOKENIZER)
CLOSERS = [ord(char) for char in '"}],:0']
MAX_TOKENS = 1500

SCALARS = st.one_of(
    st.booleans(), st.none(), st.integers(-99, 99), st.text(max_size=6, alphabet=st.characters(codec="utf-8"))
)


@st.composite
def leaves(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(
        st.sampled_from(["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"])
    )
    if kind == "string":
        low = draw(st.integers(0, 4))
        return {"type": "string", "minLength": low, "maxLength": low + draw(st.integers(0, 5))}
    if kind in ("integer", "number"):
        low = draw(st.integers(-50, 50))
        return {"type": kind, "minimum": low, "maximum": low + draw(st.integers(0, 60))}
    if kind == "enum":
        return {"enum": draw(st.lists(SCALARS, min_size=1, max_size=4))}
    if kind == "const":
        return {"const": draw(SCALARS)}
    if kind == "pattern":
        return {
            "type": "string",
            "pattern": draw(st.sampled_from(["^[a-c]{1,3}$", "^x(yz?)?$", "^[0-9]+-[0-9]$"])),
        }
    return {"type": kind}


def _grow(children: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    @st.composite
    def objects(draw: st.DrawFn) -> dict[str, Any]:
        names = draw(st.lists(st.text(min_size=1, max_size=5), max_size=4, unique=True))
        schema: dict[str, Any] = {"type": "object", "properties": {name: draw(children) for name in names}}
        schema["required"] = [name for name in names if draw(st.booleans())]
        schema["additionalProperties"] = False
        return schema

    arrays = st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        children, st.integers(0, 2), st.integers(0, 2),
    )  # fmt: skip
    either = st.lists(children, min_size=1, max_size=3).map(lambda options: {"anyOf": options})
    return st.one_of(objects(), arrays, either)


SCHEMAS = st.recursive(leaves(), _grow, max_leaves=6)


def list_allowed(guide: Any) -> list[int]:
    masks = LIBRARY.make_masks([(0, guide)])
    bits = np.unpackbits(np.frombuffer(masks.bits, np.uint8), bitorder="little")
    return [int(token) for token in np.nonzero(bits)[0]]


def walk(guide: Any, rng: random.Random) -> bytes:
    """A text drawn from the masks, with a liking for what closes."""
    said = bytearray()
    for _ in range(MAX_TOKENS):
        allowed = list_allowed(guide)
        assert allowed
        closing = [token for token in CLOSERS if token in allowed]
        token = closing[0] if closing and rng.random() < 0.4 else rng.choice(allowed)
        if token in ENDS:
            return bytes(said)
        said.append(token)
        if guide.advance(token):
            assert not guide.failure
            return bytes(said)
    raise AssertionError("it does not end")


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 30), compact=st.booleans())
def test_what_the_masks_allow_validates(schema: dict[str, Any], seed: int, compact: bool) -> None:
    kind = GrammarKind.COMPACT_JSON_SCHEMA if compact else GrammarKind.JSON_SCHEMA
    grammar = LIBRARY.compile(GrammarSpec(kind, json.dumps(schema)), vocabulary=VOCABULARY, ends=ENDS)
    rng = random.Random(seed)
    for _ in range(3):
        value = json.loads(walk(grammar.start(), rng).decode())
        jsonschema.validate(value, schema)


@settings(max_examples=100, derandomize=True, deadline=None)
@example(choices=["\x7f", "\x80\u2028\x00", "\\u007f"], seed=0)
@given(
    choices=st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=5), seed=st.integers(0, 1 << 30)
)
def test_what_is_said_of_choices_is_one_of_them(choices: list[str], seed: int) -> None:
    text = "start: " + " | ".join(spell_literal(choice) for choice in choices)
    grammar = LIBRARY.compile(GrammarSpec(GrammarKind.LARK, text), vocabulary=VOCABULARY, ends=ENDS)
    assert walk(grammar.start(), random.Random(seed)).decode() in choices


@settings(max_examples=150, derandomize=True, deadline=None)
@given(kind=st.sampled_from(GrammarKind), text=st.one_of(st.text(max_size=60), st.text(alphabet='startroo: |"()[]{}*+?/\\.,-=%\n', max_size=60)))  # fmt: skip
def test_any_text_compiles_or_is_refused(kind: GrammarKind, text: str) -> None:
    try:
        grammar = LIBRARY.compile(GrammarSpec(kind, text), vocabulary=VOCABULARY, ends=ENDS)
    except (GrammarError, ValueError) as error:
        assert str(error)  # noqa: PT017 - any of the two is right
        return
    assert list_allowed(grammar.start())
