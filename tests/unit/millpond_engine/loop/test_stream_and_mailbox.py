from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future

import pytest

from millpond_common.contract.metrics import make_engine_families, make_token_buckets
from millpond_engine.loop.mailbox import Call, Close, Mailbox, MailboxClosedError, MailboxFullError, Submit
from millpond_engine.loop.stats import StatCells
from millpond_engine.loop.stream import Delivery, RequestStream, wake_streams
from millpond_engine.records.outputs import SequenceOutput
from millpond_engine.records.request import Request, SamplingParams, StopParams


def make_delivery(num_tokens: int) -> Delivery:
    output = SequenceOutput(request_id="r", index=0, tokens=tuple(range(num_tokens)))
    return Delivery("r", 0.0, sequences=(output,))


async def test_news_from_a_thread_arrive_in_order() -> None:
    stream = RequestStream(asyncio.get_running_loop(), max_unread_tokens=10_000)

    def produce() -> None:
        for number in range(1, 200):
            stream.put(make_delivery(number))
            if number % 3 == 0:
                wake_streams([stream])
        wake_streams([stream])

    thread = threading.Thread(target=produce)
    thread.start()
    got = [(await asyncio.wait_for(stream.get(), 5)).num_tokens for _ in range(199)]
    thread.join()
    assert got == list(range(1, 200))


async def test_a_stream_says_when_its_reader_is_too_far_behind() -> None:
    stream = RequestStream(asyncio.get_running_loop(), max_unread_tokens=10)
    assert stream.put(make_delivery(6))
    assert not stream.put(make_delivery(6))
    await stream.get()
    assert stream.put(make_delivery(4))


def test_waking_a_closed_loop_does_no_harm() -> None:
    loop = asyncio.new_event_loop()
    stream = RequestStream(loop, max_unread_tokens=1)
    loop.close()
    wake_streams([stream])


async def make_submit() -> Submit:
    request = Request("r", (1,), SamplingParams(), StopParams(1), 0.0)
    return Submit(request, RequestStream(asyncio.get_running_loop(), max_unread_tokens=1), 0.0)


async def test_submissions_are_bounded_and_closes_are_not() -> None:
    mailbox = Mailbox(max_submissions=2)
    submit = await make_submit()
    mailbox.put(submit)
    mailbox.put(submit)
    with pytest.raises(MailboxFullError):
        mailbox.put(submit)
    for _ in range(10):
        mailbox.put(Close("r", "cancelled"))
    assert len(mailbox.take(wait_seconds=0)) == 12
    mailbox.put(submit)
    assert mailbox.take(wait_seconds=0) == [submit]
    assert mailbox.take(wait_seconds=0) == []


async def test_a_closed_mailbox_gives_back_what_it_holds_and_takes_nothing() -> None:
    mailbox = Mailbox(max_submissions=1)
    submit = await make_submit()
    mailbox.put(submit)
    assert mailbox.close() == [submit]
    with pytest.raises(MailboxClosedError):
        mailbox.put(Close("r", "cancelled"))


def test_a_message_ends_the_wait() -> None:
    mailbox = Mailbox(max_submissions=1)
    call = Call(lambda _: None, Future())
    threading.Timer(0.05, mailbox.put, [call]).start()
    started = time.monotonic()
    assert mailbox.take(wait_seconds=10) == [call]
    assert time.monotonic() - started < 5


def test_histograms_count_at_and_above_their_bounds() -> None:
    cells = StatCells(make_engine_families())
    bounds = cells.histograms["step_seconds"].family.buckets
    cells.observe("step_seconds", bounds[0], "plan")
    cells.observe("step_seconds", bounds[0] * 1.01, "plan")
    cells.observe("step_seconds", 1e9, "plan", times=2)
    counts = cells.histograms["step_seconds"].values["plan",]
    assert (counts[0], counts[1], counts[-2]) == (1, 1, 2)
    assert counts[-1] == pytest.approx(2e9, rel=1e-6)


def test_token_buckets_end_at_the_context() -> None:
    assert make_token_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert make_token_buckets(1) == (1,)
    assert make_token_buckets(99)[-1] == 50
