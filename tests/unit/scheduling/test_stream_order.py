"""Answers of nested streams leave in order, each as early as it can."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from nerite.scheduling.stream_order import StreamOrder, StreamPlace


@dataclass
class Response:
    """A response of a stream: it has an answer in the end, a stream in its place, or neither."""

    place: StreamPlace[int]
    number: int | None = None
    streams: list[Stream] = field(default_factory=list)
    ended: bool = False


@dataclass
class Stream:
    """A stream, and its responses so far."""

    end: StreamPlace[int]
    responses: list[Response] = field(default_factory=list)
    over: bool = False


def leaving(response: Response) -> Iterator[int | None]:
    """Yield the numbers of the answers below a response in their order, and None where one is still to come."""
    if response.number is not None:
        yield response.number
    if not response.ended:
        yield None
    for stream in response.streams:
        for each in stream.responses:
            yield from leaving(each)
        if not stream.over:
            yield None


def test_a_response_waits_for_those_before_it() -> None:
    order: StreamOrder[str] = StreamOrder()
    stream = order.begin_stream(order.root)
    first, second, third = (order.add_response(stream) for _ in range(3))
    for place in (first, second, third):
        place.open = 1
    third.answer, third.open = "c", 0
    assert order.release() == []
    first.answer, first.open = "a", 0
    assert order.release() == ["a"]
    second.open = 0
    assert order.release() == ["c"]
    assert not order.complete
    stream.open = 0
    assert order.release() == []
    assert order.complete


@given(st.data())
def test_nested_streams_leave_in_order_and_as_early_as_they_can(data: st.DataObject) -> None:
    order: StreamOrder[int] = StreamOrder()
    root = Response(order.root)
    root.place.open = 1
    responses, streams, released, number = [root], list[Stream](), list[int](), 0
    for _ in range(data.draw(st.integers(0, 40))):
        running = [each for each in responses if not each.ended]
        flowing = [each for each in streams if not each.over]
        match data.draw(st.sampled_from(("stream", "response", "answer", "end", "over"))):
            case "stream" if running:
                within = data.draw(st.sampled_from(running))
                if not within.streams and within.number is None:
                    within.streams.append(Stream(order.begin_stream(within.place)))
                    streams += within.streams
            case "response" if flowing:
                stream = data.draw(st.sampled_from(flowing))
                made = Response(order.add_response(stream.end))
                made.place.open = 1
                stream.responses.append(made)
                responses.append(made)
            case "answer" if running:
                answered = data.draw(st.sampled_from(running))
                if answered.number is None and not answered.streams:
                    answered.number = answered.place.answer = number
                    number += 1
            case "end" if running:
                ended = data.draw(st.sampled_from(running))
                ended.ended, ended.place.open = True, 0
            case "over" if flowing:
                over = data.draw(st.sampled_from(flowing))
                over.over, over.end.open = True, 0
        released += order.release()
        wanted = list(leaving(root))
        first = wanted.index(None) if None in wanted else len(wanted)
        assert released == wanted[:first]
        assert order.complete == (None not in wanted)
