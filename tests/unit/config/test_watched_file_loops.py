"""The watch of a file with an exception planted in each step: a change that could not be applied is applied later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from nerite.config import watched_file
from nerite.config.watched_file import WatchedFile, watched


class Fault(Exception):
    """What nothing foresaw."""


class Numbers(WatchedFile[int]):
    """A file that contains a number."""

    def __init__(self, path: str) -> None:
        super().__init__(path, 0)
        self.content = self.taken = 0
        self.broken = ""

    def fail(self, place: str) -> None:
        if self.broken == place:
            raise Fault

    def poll(self) -> int:
        self.fail("poll")
        return self.content

    def _take(self, found: int) -> None:
        self.fail("take")
        self.taken = found

    def news(self) -> str:
        return ""


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("place", ["poll", "take", "changed"])
def test_a_change_that_fails_is_listed_and_applied_later_and_other_files_are_followed(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_file, "POLL_SECONDS", 0.01)

    async def main() -> None:
        files = [Numbers("a"), Numbers("b")]
        told: list[tuple[str, int]] = []

        def tell(file: Numbers) -> None:
            file.fail("changed")
            told.append((file.path, file.taken))

        works = [watched(file, lambda file=file: tell(file)) for file in files]  # type: ignore[misc]
        running = [asyncio.create_task(work.run()) for work in works]
        files[0].broken = place
        for file in files:
            file.content = 1
        async with asyncio.timeout(30):
            await until(lambda: told == [("b", 1)] and bool(works[0].loop.failing))
            assert "incident" in works[0].loop.failing["a"]
            files[0].broken = ""
            await until(lambda: told == [("b", 1), ("a", 1)])
            await until(lambda: not works[0].loop.failing)
        for task in running:
            task.cancel()

    asyncio.run(main())
