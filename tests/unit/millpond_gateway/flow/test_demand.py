from __future__ import annotations

import pytest

from millpond_gateway.flow.demand import DemandBook


def test_a_rate_is_absent_until_its_window_is_full() -> None:
    book = DemandBook(now=100.0)
    assert book.view(110.0).uncached_tokens_per_second_15 is None
    assert book.view(115.0).uncached_tokens_per_second_15 == 0.0
    assert book.view(115.0).uncached_tokens_per_second_60 is None
    assert book.view(160.0).uncached_tokens_per_second_60 == 0.0


def test_rates_are_means_over_whole_seconds() -> None:
    book = DemandBook(now=0.0)
    for second in range(60):
        book.arrive(100 if second < 45 else 400, second + 0.5)
        book.output(30, second + 0.5)
    view = book.view(60.2)
    assert view.uncached_tokens_per_second_15 == 400
    assert view.uncached_tokens_per_second_60 == (45 * 100 + 15 * 400) / 60
    assert view.output_tokens_per_second_60 == 30
    assert view.last_request_seconds_ago == pytest.approx(0.7)


def test_old_demand_leaves_the_window() -> None:
    book = DemandBook(now=0.0)
    book.arrive(6000, 10.5)
    assert book.view(65.0).uncached_tokens_per_second_60 == 100
    assert book.view(72.0).uncached_tokens_per_second_60 == 0
    assert book.view(5000.0).uncached_tokens_per_second_60 == 0


def test_the_percentile_is_close_per_class_and_absent_without_requests() -> None:
    book = DemandBook(now=0.0)
    for number in range(100):
        book.first_token("interactive", 0.01 * (number + 1), 5.0)
    view = book.view(6.0)
    assert view.ttft_p90_milliseconds["interactive"] == pytest.approx(900, rel=0.11)
    assert "batch" not in view.ttft_p90_milliseconds
    assert book.view(90.0).ttft_p90_milliseconds == {}


def test_a_pool_that_never_saw_a_request_says_so() -> None:
    assert DemandBook(now=0.0).view(100.0).last_request_seconds_ago is None


def test_classes_are_bounded() -> None:
    book = DemandBook(now=0.0)
    for number in range(1000):
        book.first_token(f"class{number}", 0.1, 1.0)
    assert len(book.view(1.0).ttft_p90_milliseconds) == 32
