"""Due times, and the start times of other pools."""

from __future__ import annotations

from millpond_operator.loop.due import DueTimes
from millpond_operator.loop.start_index import MAX_OTHER_STARTS, StartIndex
from millpond_operator.scaling.starts import Start

MODEL = ("hf://a/b", "main", 1)


def test_the_latest_time_counts_and_each_name_is_due_once() -> None:
    due = DueTimes()
    for name, at in (("a", 5.0), ("b", 3.0), ("c", 1.0), ("a", 2.0), ("b", 9.0), ("a", 2.0)):
        due.set(name, at)
    due.forget("c")
    assert due.pop(1.9) == []
    assert due.pop(6.0) == ["a"]
    assert due.pop(8.0) == []
    assert due.pop(9.0) == ["b"]
    due.set("a", 9.5)
    assert due.pop(10.0) == ["a"]


def test_starts_are_shared_by_model_and_never_with_oneself() -> None:
    index = StartIndex()
    index.put("a", MODEL, (Start("x", 1.0), Start("x", 2.0)))
    index.put("b", MODEL, (Start("x", 3.0),))
    index.put("c", ("hf://other", "main", 1), (Start("x", 4.0),))
    index.put("d", MODEL, ())
    assert index.list_others("d", MODEL) == (Start("x", 1.0), Start("x", 2.0), Start("x", 3.0))
    assert index.list_others("a", MODEL) == (Start("x", 3.0),)
    index.put("b", ("hf://other", "main", 1), (Start("x", 3.0),))
    assert index.list_others("a", MODEL) == ()
    index.forget("a")
    index.forget("nobody")
    assert index.list_others("d", MODEL) == ()


def test_many_pools_of_one_model_do_not_make_the_list_long() -> None:
    index = StartIndex()
    for number in range(1000):
        index.put(f"pool-{number}", MODEL, (Start("x", float(number)),) * 3)
    found = index.list_others("pool-999", MODEL)
    assert len(found) == MAX_OTHER_STARTS
    assert found[-1].seconds == 998.0, "what was learned last is kept"
