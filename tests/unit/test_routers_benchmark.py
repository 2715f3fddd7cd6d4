"""The parts of the comparison of routers that decide what its figures say."""

from __future__ import annotations

import json
import math
import random
import sys
from itertools import islice
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from balancing_members import SimulatedMember, SimulatedRequest  # noqa: E402
from paced_engine import event, prompt_of, usage  # noqa: E402
from routed_cases import CASES, quantiles, result  # noqa: E402
from routed_client import AnswerReader, RoutedAnswer  # noqa: E402

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def stream(*, done: bool = True) -> bytes:
    request = SimulatedRequest(b"x" * 400, 2, 0.0)
    request.cached = 64
    parts = [chunk(event(True, " a")), chunk(event(True, " b")), chunk(event(True, "", request))]
    parts += [chunk(b"data: [DONE]\n\n")] if done else []
    return HEAD + b"".join(parts) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_a_stream_is_read_however_it_is_cut(size: int) -> None:
    answer = RoutedAnswer(1.0)
    reader, data = AnswerReader(answer), stream()
    ends = [reader.feed(data[at : at + size], 2.0 + at) for at in range(0, len(data), size)]
    assert ends == [*[False] * (len(ends) - 1), True]
    assert (answer.prompt, answer.cached, answer.problem) == (100, 64, "")
    assert 2.0 <= answer.first <= answer.ended


def test_a_comment_is_no_first_token() -> None:
    answer = RoutedAnswer(1.0)
    reader = AnswerReader(answer)
    reader.feed(HEAD + chunk(b": keep-alive\n\n"), 2.0)
    assert not answer.first
    reader.feed(chunk(event(True, " a")), 3.0)
    assert answer.first == 3.0


@pytest.mark.parametrize(
    "data",
    [stream(done=False), HEAD + chunk(event(True, " a")) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"],
    ids=["without its end", "ended by a router"],
)
def test_a_stream_that_is_not_complete_was_cut(data: bytes) -> None:
    answer = RoutedAnswer(1.0)
    assert AnswerReader(answer).feed(data, 2.0)
    assert answer.problem == "its stream was cut"
    assert answer.first and not answer.ended


def test_an_error_has_no_first_token() -> None:
    answer = RoutedAnswer(1.0)
    assert AnswerReader(answer).feed(b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy", 2.0)
    assert answer.problem == "status 503: busy"
    assert not answer.first


def test_failures_are_told_apart() -> None:
    good = RoutedAnswer(0.0, first=0.5, ended=1.0, prompt=100, cached=50)
    cut = RoutedAnswer(0.0, first=1.5, problem="its stream was cut")
    refused = RoutedAnswer(0.0, problem="status 503: ")
    found = result([good, cut, refused], 0.3)
    assert (found.asked, found.refused, found.cut, found.cached) == (3, 1, 1, 0.5)
    assert found.first == (1.5, 1.5, 1.5)
    assert found.processor == pytest.approx(0.1)


def test_quantiles_of_nothing_are_beyond_all() -> None:
    assert quantiles([], (0.5, 0.9, 0.99)) == (math.inf,) * 3
    assert quantiles([float(each) for each in range(100)], (0.5, 0.95, 0.99)) == (50.0, 95.0, 99.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.name))
def test_requests_of_a_case_are_the_same_for_all_routers(case: object) -> None:
    first, second = ([*islice(case.messages(random.Random(3)), 5)] for _ in range(2))  # type: ignore[attr-defined]
    assert first == second
    head, _, body = first[0].partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert json.loads(body)["stream"] is True


def test_the_cache_sees_what_prompts_have_in_common() -> None:
    member = SimulatedMember("m", 10_000)
    cached = []
    for text in ("one", "two"):
        fields = {"messages": [{"role": "user", "content": "common " * 200 + text}]}
        request = SimulatedRequest(prompt_of(fields), 2, 0.0)
        member.waiting.append(request)
        member.plan_step()
        member.end_step(1.0, lambda _request, _tokens: None)
        cached.append(usage(request)["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0
    assert cached[1] > 300
