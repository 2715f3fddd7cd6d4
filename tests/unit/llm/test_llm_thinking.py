"""A thought that is too long is ended, and the answer follows; nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest

from nerite.core.errors import InvalidArgument, NeriteError, Unavailable
from nerite.llm.engine import FinishReason, GenerationRequest, TokenDelta
from nerite.llm.sampling_parameters import SamplingParameters, ThinkingBudget, from_mapping
from nerite.llm.thinking import BudgetedListener, ThoughtCounter

BUDGET = ThinkingBudget(4, "<think>", "</think>")


@pytest.mark.parametrize(
    ("begun", "pieces", "exceeded"),
    [
        (True, ["a", "b", "c"], False),
        (True, ["a", "b", "c", "d"], True),
        (True, ["a", "b", "</think>", "d", "e"], False),
        (True, ["a", "b", "</thi", "nk>", "e"], False),
        (False, ["<think>", "b", "c", "d"], True),
        (False, ["\n<th", "ink>", "c", "d", "e"], True),
        (False, ["No", "<think>", "c", "d", "e", "f"], False),
        (False, [" " * 70, "<think>", "c", "d", "e", "f"], False),
    ],
)
def test_thoughts_are_counted(begun: bool, pieces: list[str], exceeded: bool) -> None:
    counter = ThoughtCounter(BUDGET._replace(begun=begun))
    found = [counter.exceeds(piece, 1) for piece in pieces]
    assert (True in found) is exceeded


class Engine:
    """Remembers what it is asked."""

    def __init__(self) -> None:
        self.added: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.error: NeriteError | None = None

    def add(self, request: GenerationRequest, listener: Any) -> None:
        if self.error is not None:
            raise self.error
        self.added.append(request)

    def abort(self, id: str) -> None:
        self.aborted.append(id)

    def tokenize(self, request: GenerationRequest) -> list[int]:
        return [len(request.prompt)]


class Listener:
    """Remembers what it hears."""

    def __init__(self) -> None:
        self.admissions: list[int] = []
        self.deltas: list[TokenDelta] = []
        self.errors: list[NeriteError] = []

    def admitted(self, prompt_tokens: int, cached_tokens: int = 0, image_tokens: int = 0) -> None:
        self.admissions.append(prompt_tokens)

    def advanced(self, deltas: Any) -> None:
        self.deltas += deltas

    def failed(self, error: NeriteError) -> None:
        self.errors.append(error)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


class Bench:
    def __init__(self, prompt: Any = "p<think>", max_tokens: int | None = 10) -> None:
        self.engine: Any = Engine()
        self.heard = Listener()
        request = GenerationRequest("1", prompt, SamplingParameters(max_tokens=max_tokens, min_tokens=2))
        self.listener = BudgetedListener(self.engine, request, self.heard, BUDGET._replace(begun=True))
        self.listener.admitted(7)

    def says(self, *texts: str, reason: FinishReason | None = None) -> None:
        for number, text in enumerate(texts, 1):
            last = reason if number == len(texts) else None
            self.listener.advanced([TokenDelta(0, [5], text, finish_reason=last)])

    def is_aborted(self) -> None:
        self.listener.advanced([TokenDelta(0, (), "", (), FinishReason.ABORT)])


def test_a_thought_within_its_budget() -> None:
    bench = Bench()
    bench.says("a", "</think>", *"answer", reason=FinishReason.STOP)
    assert (bench.heard.text, bench.engine.aborted) == ("a</think>answer", [])


@pytest.mark.parametrize(
    ("prompt", "continued"), [("p<think>", "p<think>abcd\n</think>\n\n"), ([1], [1, 5, 5, 5, 5, 11])]
)
def test_a_thought_that_is_too_long(prompt: Any, continued: Any) -> None:
    bench = Bench(prompt)
    bench.says(*"abcde")
    assert (bench.engine.aborted, bench.heard.text) == (["1"], "abcd"), "what comes behind the budget is dropped"
    bench.is_aborted()
    (again,) = bench.engine.added
    assert (again.prompt, again.sampling.max_tokens, again.sampling.min_tokens, again.id) == (continued, 6, 0, "1+")
    bench.listener.admitted(9)
    bench.says(*"so", reason=FinishReason.STOP)
    assert bench.heard.text == "abcd\n</think>\n\nso"
    assert bench.heard.admissions == [7], "it is one request"
    assert [delta.finish_reason for delta in bench.heard.deltas if delta.finish_reason] == [FinishReason.STOP]


def test_one_that_ends_as_it_is_ended() -> None:
    bench = Bench()
    bench.says(*"abcd")
    bench.says("e", reason=FinishReason.STOP)
    assert len(bench.engine.added) == 1


@pytest.mark.parametrize(("max_tokens", "reason"), [(4, FinishReason.LENGTH), (None, None)])
def test_no_token_is_left(max_tokens: int | None, reason: FinishReason | None) -> None:
    bench = Bench(max_tokens=max_tokens)
    bench.says(*"abcd")
    bench.is_aborted()
    assert bench.heard.deltas[-1].finish_reason is reason


def test_a_caller_that_goes() -> None:
    bench = Bench()
    bench.says("a")
    bench.listener.abort()
    bench.is_aborted()
    assert bench.heard.deltas[-1].finish_reason is FinishReason.ABORT
    bench = Bench()
    bench.says(*"abcd")
    bench.listener.abort()
    bench.is_aborted()
    assert (bench.engine.added, bench.heard.deltas[-1].finish_reason) == ([], FinishReason.ABORT)
    bench = Bench()
    bench.says(*"abcd")
    bench.is_aborted()
    bench.listener.abort()
    assert bench.engine.aborted == ["1", "1+"]


def test_an_engine_that_takes_no_more() -> None:
    bench = Bench()
    bench.says(*"abcd")
    bench.engine.error = Unavailable("full")
    bench.is_aborted()
    assert [error.message for error in bench.heard.errors] == ["full"]


def test_the_parameter() -> None:
    said = {"tokens": 4, "begin": "<think>", "end": "</think>"}
    assert from_mapping({"thinking_budget": said}).thinking_budget == BUDGET
    for wrong in ({}, {**said, "tokens": 0}, {**said, "end": ""}, {**said, "more": 1}, 5, {**said, "begun": 1}):
        with pytest.raises(InvalidArgument, match="'thinking_budget' must be an object such as"):
            from_mapping({"thinking_budget": wrong})
    with pytest.raises(InvalidArgument, match="'n' must be 1"):
        from_mapping({"thinking_budget": said, "n": 2})
