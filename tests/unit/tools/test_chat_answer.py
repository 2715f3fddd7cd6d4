"""An answer while it comes, and what a chat remembers."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from nerite.client import ClientError, CompletionPart
from nerite.tools.chat import ChatAnswer, ChatHistory, for_terminal


class Clock:
    """Stands still unless it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def coming(clock: Clock, *parts: tuple[float, CompletionPart | BaseException]) -> Generator[CompletionPart]:
    for when, part in parts:
        clock.now = 100.0 + when
        if isinstance(part, BaseException):
            raise part
        yield part


def listened(*parts: tuple[float, CompletionPart | BaseException]) -> ChatAnswer:
    clock = Clock()
    answer = ChatAnswer(clock)
    said: list[str] = []
    answer.listen(coming(clock, *parts), said.append)
    assert "".join(said) == answer.text
    return answer


def test_figures() -> None:
    tokens = CompletionPart(prompt_tokens=7, completion_tokens=3)
    answer = listened(
        (0.5, CompletionPart("a")), (1.0, CompletionPart("b")), (1.5, CompletionPart("c", "length")), (1.5, tokens)
    )
    assert answer.cut_off
    assert answer.figures() == "3 tokens in 1.50 s, the first after 0.50 s, then 2.0 per second, 7 prompt tokens"


def test_figures_of_a_model_that_does_not_count() -> None:
    assert (
        listened((0.25, CompletionPart("a")), (1.0, CompletionPart("", "stop"))).figures()
        == "1.00 s, the first after 0.25 s"
    )
    assert listened().figures() == "0.00 s"


def test_ctrl_c_ends_the_stream_and_keeps_what_came() -> None:
    answer = listened((0.5, CompletionPart("a")), (0.6, KeyboardInterrupt()))
    assert (answer.text, answer.interrupted) == ("a", True)


def test_ctrl_c_while_text_is_shown_closes_the_stream() -> None:
    closed = []

    def endless() -> Generator[CompletionPart]:
        try:
            while True:
                yield CompletionPart("a")
        finally:
            closed.append(True)

    def say(_text: str) -> None:
        raise KeyboardInterrupt

    answer = ChatAnswer(Clock())
    answer.listen(endless(), say)
    assert answer.interrupted
    assert closed == [True]


def test_errors_go_on() -> None:
    with pytest.raises(ClientError, match="gave up"):
        listened((0.5, CompletionPart("a")), (0.6, ClientError("gave up")))


def test_what_steers_a_terminal_is_shown_as_nothing_of_that_kind() -> None:
    assert for_terminal("a\x1b[2J\r\x07\x9b b\n\tçé👍") == "a�[2J��� b\n\tçé👍"


def test_a_conversation() -> None:
    conversation = ChatHistory("Be brief.")
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    assert conversation.with_question("one") == first
    assert conversation.with_question("one") == first
    conversation.remember("one", "1")
    then = [{"role": "assistant", "content": "1"}, {"role": "user", "content": "two"}]
    assert conversation.with_question("two") == [*first, *then]
    conversation.reset()
    conversation.system = ""
    assert conversation.with_question("two") == then[1:]
