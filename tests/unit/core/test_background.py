"""Work beside the requests goes on after a failure, and ends when it returns."""

from __future__ import annotations

import asyncio

import pytest

from nerite.core.background import report_unhandled, start_background
from nerite.core.failures import internal_errors


def test_work_that_fails_is_reported_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[float] = []

    async def sleep(seconds: float) -> None:
        runs.append(seconds)

    async def work() -> None:
        if len(runs) < 3:
            raise ZeroDivisionError

    async def main() -> None:
        await asyncio.gather(*start_background([work]))

    before = internal_errors.counts["loop"]
    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(main())
    assert len(runs) == 3 and min(runs) > 0
    assert internal_errors.counts["loop"] == before + 3


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
