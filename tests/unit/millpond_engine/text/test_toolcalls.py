from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond_engine.text.toolcalls import CallFound, ToolCallParser

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


def parse(pieces: list[str], *, prefix: str = "") -> tuple[str, list[CallFound]]:
    parser = ToolCallParser(prefix=prefix)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.flush()
    text = "".join(event for event in events if isinstance(event, str))
    return text, [event for event in events if isinstance(event, CallFound)]


def test_calls_are_found_between_text() -> None:
    text, calls = parse([f"Let me see.\n{CALL}\n{CALL}\n"])
    assert text == "Let me see.\n"
    assert [(call.index, call.name) for call in calls] == [(0, "get_weather"), (1, "get_weather")]
    assert json.loads(calls[0].arguments) == {"city": "Zürich"}
    assert calls[0].id != calls[1].id


@given(st.lists(st.integers(1, 7), min_size=1, max_size=80))
def test_the_cut_of_the_pieces_does_not_matter(sizes: list[int]) -> None:
    whole, pieces = f"a < b {CALL} done \n{CALL}\n ", []
    for size in sizes:
        pieces.append(whole[:size])
        whole = whole[size:]
    text, calls = parse([*pieces, whole])
    assert text == "a < b  done"
    assert [call.name for call in calls] == ["get_weather"] * 2


def test_broken_json_stays_text() -> None:
    broken = '<tool_call>{"name": "f", "arguments": {</tool_call>'
    assert parse([broken]) == (broken, [])
    assert parse(["<tool_call>[1]</tool_call>"])[1] == []


def test_a_call_without_its_closing_tag_counts_when_complete() -> None:
    text, calls = parse(['<tool_call>{"name": "f", "arguments": {}}'])
    assert (text, len(calls)) == ("", 1)
    assert parse(['<tool_call>{"name": "f"'])[0] == '<tool_call>{"name": "f"'


def test_a_forced_call_goes_on_from_the_prompt() -> None:
    prefix = '<tool_call>\n{"name": "f", "arguments": '
    _, calls = parse(['{"x": 1}}\n', "</tool_call>"], prefix=prefix)
    assert (calls[0].name, calls[0].arguments) == ("f", '{"x": 1}')


@pytest.mark.parametrize("arguments", ['"Paris"', "[1]", "3", '"[1]"', '"{"', "null", '{"x": NaN}', "true"])
def test_what_could_not_be_sent_back_as_arguments_is_no_call(arguments: str) -> None:
    raw = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert parse([raw]) == (raw, [])


def test_arguments_may_be_the_text_of_an_object() -> None:
    _, [call] = parse(['<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>'])
    assert call.arguments == '{"x": 1}'


def test_half_characters_in_arguments_stay_escaped_so_that_the_answer_can_be_sent() -> None:
    _, [call] = parse(['<tool_call>{"name": "f", "arguments": {"x": "\\ud83d"}}</tool_call>'])
    assert call.arguments.encode() == b'{"x": "\\ud83d"}'
    raw = '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'
    assert parse([raw]) == (raw, [])


def test_calls_beyond_the_most_are_left_out() -> None:
    parser = ToolCallParser(max_calls=1)
    events = [*parser.push(f"a{CALL}\n{CALL}{CALL}"), *parser.flush()]
    assert [event if isinstance(event, str) else event.index for event in events] == ["a", 0]
