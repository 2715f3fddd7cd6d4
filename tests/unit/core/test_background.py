"""Work beside the requests goes on after a failure, and ends when it returns."""

from __future__ import annotations

import asyncio

import pytest

from nerite.core.background import BackgroundWork, report_unhandled, start_background
from nerite.core.failures import internal_errors
from nerite.core.work_loop import WorkLoop, WorkLoops


def test_work_that_fails_is_reported_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        runs.append(seconds)
        await real_sleep(0)

    async def work() -> None:
        if loop.restarts < 5:
            raise ZeroDivisionError

    async def main() -> None:
        first, watch = start_background([BackgroundWork(loop, work)], loops)
        await first
        watch.cancel()

    loop, loops = WorkLoop("polling"), WorkLoops()
    before = internal_errors.counts["loop"]
    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(main())
    waits = [seconds for seconds in runs if seconds != 1.0]
    assert (loop.restarts, waits) == (5, [2.0, 4.0, 8.0, 16.0])  # and one second before the first
    assert internal_errors.counts["loop"] == before + 5
    assert [*loops] == [loop]
    assert "restarted 5 times without progress: ZeroDivisionError" in loop.problem


def test_an_exception_of_a_callback_is_reported() -> None:
    def callback() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(report_unhandled)
        loop.call_soon(callback)
        await asyncio.sleep(0)

    before = internal_errors.counts["loop"]
    asyncio.run(main())
    assert internal_errors.counts["loop"] == before + 1
