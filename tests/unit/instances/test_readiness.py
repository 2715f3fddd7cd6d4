"""A probe is answered in time, whatever the model does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from doubles import FakeLoop
from nerite.instances.instance import ReadinessCheck, all_ready

SECOND = 1_000_000_000


class Model:
    """A worker that answers when the test says so."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.asked: list[Callable[[bool], None]] = []
        loop: Any = self.loop
        self.check = ReadinessCheck(loop, self.asked.append)

    def probe(self, *, executing: bool = False, patience: float = 0.1) -> list[bool]:
        answers: list[bool] = []
        self.check.check(answers.append, patience, executing=executing)
        return answers


def test_the_model_is_asked_and_its_answer_passed_on() -> None:
    model = Model()
    probe = model.probe()
    assert probe == []
    model.asked.pop()(True)
    assert probe == [True]
    probe = model.probe()
    model.asked.pop()(False)
    assert probe == [False]
    model.loop.advance(SECOND)
    assert probe == [False]


def test_while_a_batch_runs_the_last_answer_counts() -> None:
    model = Model()
    model.check.refresh()
    model.asked.pop()(True)
    assert model.probe(executing=True) == [True]
    assert model.asked == []


def test_a_slow_check_is_waited_for_a_moment_only() -> None:
    model = Model()
    model.check.refresh()
    model.asked[0](True)
    first, second = model.probe(), model.probe()
    assert len(model.asked) == 2, "those that overlap are one"
    model.loop.advance(SECOND // 5)
    assert (first, second) == ([True], [True])
    late = model.probe()
    model.asked[1](False)
    assert (first, late) == ([True], [False])


def test_a_check_that_hangs_is_no_readiness() -> None:
    model = Model()
    model.check.refresh()
    model.asked[0](True)
    model.probe()
    model.loop.advance(6 * SECOND)
    assert model.probe() == [False]
    assert model.probe(executing=True) == [False]
    model.asked[1](True)
    assert model.probe(executing=True) == [False], "it came too late"
    probe = model.probe()
    model.asked[2](True)
    assert (probe, model.probe(executing=True)) == ([True], [True])


def test_a_check_that_always_takes_too_long_never_flips() -> None:
    model = Model()
    model.check.refresh()
    answers = []
    for second in range(40):
        answers.append(model.probe())
        model.loop.advance(SECOND)
        if second % 8 == 7:
            model.asked[-1](True)
    assert {ready for answer in answers for ready in answer} == {False}


def test_who_waits_when_the_worker_dies_hears_no() -> None:
    model = Model()
    probe = model.probe(patience=5)
    model.check.lost()
    assert probe == [False]


def test_all_have_to_be_ready() -> None:
    pending: list[Callable[[bool], None]] = []
    answers: list[bool] = []
    all_ready([pending.append, pending.append, lambda answered: answered(True)], answers.append)
    pending[0](True)
    assert answers == []
    pending[1](False)
    assert answers == [False]
    all_ready([], answers.append)
    assert answers == [False, True]
