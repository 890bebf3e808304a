"""The library behind its seam, over a vocabulary of bytes: what compiles, what is allowed, what is said of the rest."""

from __future__ import annotations

import contextlib
import json
import random
import time
from typing import Any

import numpy as np
import pytest

from millpond_engine.grammar.guide import LibraryGuide
from millpond_engine.grammar.library import Library, count_threads
from millpond_engine.grammar.spec import GrammarError, GrammarKind, GrammarSpec, clean_message
from millpond_engine.records.step import RowFailure
from millpond_engine.text.bytes_tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
VOCABULARY, ENDS = TOKENIZER.facts.vocabulary_size, TOKENIZER.facts.eos_token_ids
LIBRARY = Library(TOKENIZER)
BLANK = tuple(b" \n\r\t")


def compile_spec(kind: str, text: str, **options: Any) -> Any:
    return LIBRARY.compile(GrammarSpec(GrammarKind(kind), text, **options), vocabulary=VOCABULARY, ends=ENDS)


def compile_schema(schema: dict[str, Any], **options: Any) -> Any:
    return compile_spec("json_schema", json.dumps(schema), **options)


def list_allowed(guide: LibraryGuide) -> set[int]:
    masks = LIBRARY.make_masks([(3, guide)])
    assert masks.rows == (3,)
    bits = np.unpackbits(np.frombuffer(masks.bits, np.uint8), bitorder="little")
    return set(np.nonzero(bits)[0].tolist())


def say(guide: LibraryGuide, text: bytes) -> bool:
    """Let the guide take a text, every byte of which its masks allow; whether it was over at the end."""
    over = False
    for byte in text:
        assert not over, "over before the text was"
        assert byte in list_allowed(guide)
        over = guide.advance(byte)
        assert not guide.failure
    return over


def test_a_schema_allows_its_texts_and_ends_by_itself() -> None:
    grammar = compile_schema(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        }
    )
    guide = grammar.start()
    assert list_allowed(guide) == {ord("{")}
    assert say(guide, b'{ "a": 12}')


def test_an_end_token_is_allowed_where_the_text_may_end_and_there_alone() -> None:
    guide = compile_schema({"type": "integer"}).start()
    assert not list_allowed(guide) & set(ENDS)
    assert not say(guide, b"12")
    assert set(ENDS) <= list_allowed(guide)
    assert guide.advance(ENDS[-1])


def test_ignoring_ends_leaves_the_grammars_own_end() -> None:
    guide = compile_spec("regex", "a{2,3}", keep_ends=False).start()
    assert not say(guide, b"aa")
    assert list_allowed(guide) == {ord("a")}
    assert say(guide, b"a")


def test_where_only_an_end_is_left_the_text_is_over() -> None:
    assert say(compile_spec("regex", "a{1,2}").start(), b"aa")
    assert say(compile_schema({"const": 12}).start(), b"12")
    assert say(compile_spec("lark", 'start: "yes" | "no"').start(), b"no")


def test_sequences_of_one_grammar_do_not_know_each_other() -> None:
    grammar = compile_spec("regex", "a+b|c+d")
    first, second = grammar.start(), grammar.start()
    say(first, b"aaa")
    assert list_allowed(second) == {ord("a"), ord("c")}
    say(second, b"c")
    assert list_allowed(first) == {ord("a"), ord("b")}


@pytest.mark.parametrize("number", [9, 40])  # one after the other, and side by side
def test_masks_of_many_guides_are_those_of_each(number: int) -> None:
    grammar = compile_schema({"type": "array", "items": {"type": "string"}})
    guides = [grammar.start() for _ in range(number)]
    for place, guide in enumerate(guides):
        say(guide, b'["abc", "d"]'[: place % 11])
    masks = LIBRARY.make_masks([(row + 5, guide) for row, guide in enumerate(guides)])
    assert masks.rows == tuple(range(5, 5 + number))
    for place, guide in enumerate(guides):
        line = masks.bits[place * masks.row_bytes : (place + 1) * masks.row_bytes]
        assert line == LIBRARY.make_masks([(0, guide)]).bits
    assert LIBRARY.make_masks([]).rows == ()


def test_a_vocabulary_without_an_end_has_texts_that_end() -> None:
    spec = GrammarSpec(GrammarKind.REGEX, "a{1,2}")
    guide = Library(TOKENIZER).compile(spec, vocabulary=256, ends=()).start()
    assert list_allowed(guide) == {ord("a")}
    assert not guide.advance(ord("a"))
    assert list_allowed(guide) & set(range(256)) == {ord("a")}
    assert guide.advance(ord("a"))


def test_a_token_against_the_grammar_fails_the_guide() -> None:
    guide = compile_spec("regex", "ab").start()
    assert guide.advance(ord("x"))
    assert guide.failure == RowFailure.GRAMMAR
    assert list_allowed(guide) == set()


def test_ebnf_of_other_engines_is_read() -> None:
    text = 'root ::= "SELECT " column " FROM t"\ncolumn ::= "a" | "b"'
    assert say(compile_spec("ebnf", text).start(), b"SELECT b FROM t")
    assert say(compile_spec("ebnf", 'start: "x" "y"').start(), b"xy")


def test_white_space_is_free_but_bounded() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}
    text = json.dumps({"a": [1, {"b": [2]}]}, indent=8).encode()
    assert say(compile_schema(schema).start(), text)
    guide = compile_schema(schema).start()
    say(guide, b"{" + b" " * 40)
    assert not list_allowed(guide) & set(BLANK)
    compact = compile_spec("compact_json_schema", json.dumps(schema)).start()
    say(compact, b"{")
    assert not list_allowed(compact) & set(BLANK)


REFUSED = [
    ("json_schema", '{"not": {}}', "not"),
    ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    ("json_schema", '{"type": "string", "format": "shoe-size"}', "shoe-size"),
    ("json_schema", '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
    ("json_schema", '{"type": "strin"}', "strin"),
    ("json_schema", '{"$ref": "https://example.com/x"}', "example.com"),
    ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum"),
    ("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf"),
    ("regex", "[", "unclosed"),
    ("regex", "(a)\\1", "backreferences"),
    ("regex", "", "empty"),
    ("lark", "start: missing", "missing"),
    ("lark", "start: a\na: b\nb: a", ""),
    ("ebnf", "root ::= (((", ""),
    ("ebnf", "nonsense", ""),
]


@pytest.mark.parametrize(("kind", "text", "word"), REFUSED)
def test_what_cannot_be_followed_is_refused_with_a_word(kind: str, text: str, word: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compile_spec(kind, text)
    message = str(caught.value)
    assert word in message
    assert message.isascii()
    assert "\n" not in message
    assert 0 < len(message) <= 300


HEAVY = [
    ("regex", "(a{1,1000}){1,1000}"),
    ("regex", "(.*a){60}.*"),
    ("regex", "(?:(?:(?:a{0,99}){0,99}){0,99}){0,99}"),
    ("regex", "(a|b|ab|ba)*" * 200),
    ("regex", "\\p{L}{1,5000}"),
    ("regex", "(" * 3000 + ")" * 3000),
    ("lark", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    ("lark", "start: " + " ".join('("a" | "b")?' for _ in range(4000))),
    (
        "lark",
        "start: a\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(2000)) + '\na2000: "x"\na: a0',
    ),
    ("ebnf", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    ("json_schema", '{"properties": {"a": ' * 60 + "true" + "}}" * 60),
    ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(6000)]})),
    ("json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(1000)}})),
    ("json_schema", json.dumps({"anyOf": [{"properties": {f"p{i}": {"const": i}}} for i in range(800)]})),
    ("json_schema", json.dumps({"allOf": [{"properties": {f"p{i}": {"minLength": i}}} for i in range(200)]})),
]


@pytest.mark.parametrize(("kind", "text"), HEAVY, ids=range(len(HEAVY)))
def test_a_heavy_grammar_ends_in_bounded_time_one_way_or_the_other(kind: str, text: str) -> None:
    rng, started = random.Random(1), time.thread_time()
    with contextlib.suppress(GrammarError):
        guide = compile_spec(kind, text).start()
        for _ in range(40):
            allowed = sorted(list_allowed(guide))
            if guide.failure or guide.advance(rng.choice(allowed)):
                break
        assert guide.failure in ("", RowFailure.GRAMMAR)
    assert time.thread_time() - started < 60  # of this thread's own work, wherever others compute


def test_threads_follow_the_runners() -> None:
    assert [count_threads({"OMP_NUM_THREADS": text}) for text in ("3", "64", "0")] == [3, 8, 1]
    assert 1 <= count_threads({}) <= 8
    assert 1 <= count_threads({"OMP_NUM_THREADS": "4,2"}) <= 8


def test_a_message_is_one_printable_line() -> None:
    assert clean_message("regex parse error:\n  [\n  ^\nerror: unclosed\n") == "regex parse error: unclosed"
    assert clean_message("caf\u00e9\n") == "caf\\xe9"
    assert clean_message(" \n ") == "unknown error"
