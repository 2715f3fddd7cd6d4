"""When an engine counts as hanging: it has requests, and says nothing for too long."""

from __future__ import annotations

from doubles import request
from nerite.core.engine_report import EngineReport, RequestEnded, RequestProgress
from nerite.core.request import InferenceRequest
from nerite.scheduling.stall_detectors import EngineStallDetector


def said(*progress: RequestProgress, patience: int = 10) -> EngineReport:
    return EngineReport(patience=patience, progress=progress)


def watch() -> EngineStallDetector:
    made = EngineStallDetector()
    made.reported(said(), 0.0)
    return made


def over(asked: InferenceRequest) -> RequestProgress:
    return RequestProgress(asked, 1, None, RequestEnded.STOP)


def test_one_with_nothing_to_do_may_rest() -> None:
    watched = watch()
    assert watched.hangs_at is None
    asked = request()
    watched.handed([asked], 100.0)
    assert watched.hangs_at == 110.0
    assert not watched.hangs(109.9)
    assert watched.hangs(110.1)
    watched.reported(said(over(asked)), 101.0)
    assert not watched.hangs(110.1)
    assert watched.hangs_at is None


def test_each_step_gives_it_time() -> None:
    watched = watch()
    first, second = request(), request()
    watched.handed([first], 100.0)
    watched.reported(said(RequestProgress(first, 1)), 105.0)
    assert watched.hangs_at == 115.0
    # One that comes is no step.
    watched.handed([second], 114.0)
    assert watched.hangs_at == 115.0
    watched.reported(said(over(first)), 114.5)
    assert watched.hangs_at == 124.5


def test_whoever_looks_much_too_late_cannot_tell() -> None:
    watched = watch()
    watched.handed([request()], 100.0)
    assert not watched.hangs(150.0)
    assert watched.hangs_at == 160.0
    assert watched.hangs(160.5)


def test_what_was_answered_is_not_waited_for() -> None:
    watched = watch()
    asked, refused = request(), request()
    watched.handed([asked, refused], 100.0)
    watched.answered([refused])
    assert watched.hangs_at == 110.0
    watched.answered([asked])
    assert watched.hangs_at is None


def test_one_without_limit_may_take_its_time() -> None:
    watched = watch()
    watched.reported(said(patience=0), 50.0)
    watched.handed([request()], 100.0)
    assert watched.hangs_at is None


def test_one_that_is_gone_owes_nothing() -> None:
    watched = watch()
    watched.handed([request()], 100.0)
    watched.gone()
    assert watched.hangs_at is None
    watched.reported(said(), 200.0)
    assert watched.hangs_at is None
