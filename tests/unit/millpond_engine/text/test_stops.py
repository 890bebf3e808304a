from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millpond_engine.text.stops import StopMatcher


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None]:
    """Released text and the stop that ended it."""
    matcher = StopMatcher(stops)
    released = ""
    for piece in pieces:
        text, hit = matcher.push(piece)
        released += text
        if hit is not None:
            return released, hit.stop
    return released + matcher.flush(), None


def find_first(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """The naive twin: the stop that is completed first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_eng_045_a_stop_across_tokens_never_shows_a_piece_of_itself() -> None:
    text = "The quick brown fox"
    assert run(("own fox",), list(text)) == ("The quick br", "own fox")


def test_eng_046_text_is_released_at_once_unless_it_may_become_a_stop() -> None:
    matcher = StopMatcher(("<|end|>",))
    released = [matcher.push(piece)[0] for piece in ["Hel", "lo ", "a<b", " <|e", "nd of"]]
    assert released == ["Hel", "lo ", "a<b", " ", "<|end of"]
    assert matcher.push("!<|")[0] == "!"
    assert matcher.flush() == "<|"


def test_eng_049_the_earliest_completed_stop_wins_inside_a_burst() -> None:
    assert run(("abc", "bcd"), ["abcd"]) == ("", "abc")
    assert run(("bcd", "abcde"), ["abcde"]) == ("a", "bcd")


def test_eng_048_a_stop_completed_too_early_does_not_count() -> None:
    matcher = StopMatcher(("ab",))
    assert matcher.push("xab", counts=False) == ("xab", None)
    assert matcher.push("c") == ("c", None)
    text, hit = matcher.push("ab")
    assert (text, hit is not None) == ("", True)


def test_eng_048_a_stop_only_begun_too_early_counts() -> None:
    matcher = StopMatcher(("abc",))
    assert matcher.push("ab", counts=False) == ("", None)
    assert matcher.push("c")[1] is not None


@given(
    st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("ab<", max_size=5), max_size=12),
)
def test_pieces_end_where_the_whole_text_ends(stops: list[str], pieces: list[str]) -> None:
    assert run(tuple(stops), pieces) == find_first(tuple(stops), "".join(pieces))
