import pytest

from nerite.core import execution_observer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time, in a list of one."""
    now = [100]
    monkeypatch.setattr(execution_observer.time, "monotonic_ns", lambda: now[0])
    return now


def times(of: execution_observer.ExecutionTimes) -> tuple[int, int, int, int]:
    return of.started_ns, of.inputs_ready_ns, of.computed_ns, of.ended_ns


def test_each_phase_is_noted(clock: list[int]) -> None:
    of = execution_observer.ExecutionTimes()
    clock[0] = 120
    of.inputs_ready()
    clock[0] = 150
    of.computed()
    clock[0] = 155
    of.end()
    assert times(of) == (100, 120, 150, 155)


def test_phases_that_nobody_noted_take_no_time(clock: list[int]) -> None:
    of = execution_observer.ExecutionTimes()
    clock[0] = 150
    of.end()
    assert times(of) == (100, 100, 150, 150)
