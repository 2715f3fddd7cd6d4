"""Which answers are kept for who comes again, at a time that the tests say."""

from __future__ import annotations

from weakref import WeakSet

import pytest

from nerite.admission.idempotency import KeyedResponse, KeyedResponses
from nerite.admission.policy import RetentionLimits


class Key(str):
    """A key to which there can be weak references."""


GRACE = 30
LIMITS = RetentionLimits(GRACE, max_answers=2, max_bytes=100)


@pytest.fixture
def answers() -> KeyedResponses[KeyedResponse]:
    return KeyedResponses(LIMITS)


def begun(answers: KeyedResponses[KeyedResponse], key: str = "k", question: str = "q") -> KeyedResponse:
    answer = KeyedResponse(key, question)
    assert answers.ask(answer) is answer
    return answer


def complete(answers: KeyedResponses[KeyedResponse], key: str, size: int = 10, at: int = 0) -> KeyedResponse:
    answer = begun(answers, key)
    answers.grew(answer, size)
    answers.ended(answer, at, failed=False)
    answers.left(answer, at)
    return answer


def test_who_asks_the_same_joins(answers: KeyedResponses[KeyedResponse]) -> None:
    first = begun(answers)
    assert answers.ask(KeyedResponse("k", "q")) is first
    assert first.following == 2
    assert answers.ask(KeyedResponse("k", "other")) is None
    assert first.following == 2
    assert begun(answers, "other") is not first


def test_grace_for_who_comes_again(answers: KeyedResponses[KeyedResponse]) -> None:
    first = begun(answers)
    assert not answers.left(first, 100)
    assert answers.next_time() == 100 + GRACE
    assert answers.due(129) == []
    assert answers.ask(KeyedResponse("k", "q")) is first
    assert answers.due(130) == [], "somebody is there"
    assert not answers.left(first, 200)
    assert answers.due(229) == []
    assert answers.due(230) == [first], "it is to be stopped"
    assert answers.next_time() is None
    begun(answers)


def test_it_goes_on_while_one_of_two_follows(answers: KeyedResponses[KeyedResponse]) -> None:
    first = begun(answers)
    answers.ask(KeyedResponse("k", "q"))
    assert not answers.left(first, 100)
    assert answers.next_time() is None


def test_a_complete_answer_is_kept_for_the_grace(answers: KeyedResponses[KeyedResponse]) -> None:
    first = complete(answers, "k", at=50)
    assert answers.ask(KeyedResponse("k", "q")) is first
    assert not answers.left(first, 79), "who had it again does not keep it longer"
    assert answers.due(80) == []
    assert begun(answers) is not first
    assert answers.size == 0


def test_one_that_becomes_complete_in_its_grace_has_another(answers: KeyedResponses[KeyedResponse]) -> None:
    first = begun(answers)
    answers.left(first, 0)
    answers.ended(first, 20, failed=False)
    assert answers.due(30) == []
    assert answers.ask(KeyedResponse("k", "other")) is None
    answers.due(50)
    begun(answers, question="other")


def test_a_failure_is_no_answer(answers: KeyedResponses[KeyedResponse]) -> None:
    first = begun(answers)
    answers.grew(first, 10)
    answers.ended(first, 0, failed=True)
    assert not answers.left(first, 0)
    assert answers.size == 0
    assert begun(answers) is not first


def test_without_grace_it_ends_with_the_last_who_follows() -> None:
    answers: KeyedResponses[KeyedResponse] = KeyedResponses(RetentionLimits(0))
    first = begun(answers)
    assert answers.ask(KeyedResponse("k", "q")) is first
    assert not answers.left(first, 0)
    assert answers.left(first, 0)
    complete(answers, "k")
    begun(answers)


def test_the_oldest_complete_ones_make_room(answers: KeyedResponses[KeyedResponse]) -> None:
    runs = begun(answers, "runs")
    answers.grew(runs, 10)
    first, second = complete(answers, "1"), complete(answers, "2")
    complete(answers, "3")
    assert answers.size == 30
    assert begun(answers, "1") is not first, "two are kept"
    assert answers.ask(KeyedResponse("2", "q")) is second
    answers.grew(runs, 75)
    assert (answers.size, runs.kept, second.kept) == (95, True, False), "95 of 100 bytes: one had to go"
    answers.grew(runs, 5)
    assert (answers.size, runs.kept) == (100, True)


def test_one_that_is_too_long_is_given_up(answers: KeyedResponses[KeyedResponse]) -> None:
    first = begun(answers)
    answers.grew(first, 101)
    assert (first.kept, answers.size) == (False, 0)
    second = begun(answers)
    answers.grew(first, 50)
    assert answers.size == 0
    assert answers.left(first, 0), "nobody can join it, so that it is of no use"
    answers.ended(first, 0, failed=False)
    assert answers.ask(KeyedResponse("k", "q")) is second


def test_given_up(answers: KeyedResponses[KeyedResponse]) -> None:
    first = begun(answers)
    answers.left(first, 0)
    assert list(answers) == [first]
    answers.give_up(first)
    answers.give_up(first)
    assert (list(answers), answers.due(GRACE)) == ([], [])


def test_ever_new_keys_leave_nothing_behind(answers: KeyedResponses[KeyedResponse]) -> None:
    coming, keys, most = begun(answers, "comes and goes"), WeakSet[Key](), 0
    for number in range(1000):
        key = Key(number)
        keys.add(key)
        complete(answers, key, at=number % 7)
        most = max(most, len(keys))
        answers.left(coming, number)
        answers.ask(KeyedResponse("comes and goes", "q"))
    assert most < 100
    answers.left(coming, 1000)
    assert answers.due(6 + GRACE) == []
    assert [each.key for each in answers] == ["comes and goes"]
    assert answers.due(1000 + GRACE) == [coming]
    assert answers.next_time() is None


def test_other_limits(answers: KeyedResponses[KeyedResponse]) -> None:
    complete(answers, "1")
    complete(answers, "2")
    answers.follow(RetentionLimits(5, max_answers=1, max_bytes=100))
    assert [each.key for each in answers] == ["2"]
    answers.left(begun(answers, "3"), 0)
    assert answers.next_time() == 5
