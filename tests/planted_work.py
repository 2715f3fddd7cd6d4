"""A real server, router or picker with one more loop beside the requests, whose faults a test plants by files.

``python planted_work.py FOLDER nerite serve ...``: the loop "webhooks (planted)" handles the units that are listed in
``FOLDER/units``, one a line, again and again. Each whose name begins with "poison" raises. While ``FOLDER/stuck`` is
there, it fails before the first unit, as if a disk were full.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nerite.cli.main import main
from nerite.core.background import BackgroundWork
from nerite.core.errors import Unavailable
from nerite.core.work_loop import WorkLoop
from nerite.router.pool_process import PoolProcess
from nerite.server_components import ServerComponents
from serving import NERITE

LOOP = "webhooks"
PLANTED = "planted"
"""What the loop is about."""


class PlantedWork:
    """The loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.loop = WorkLoop(LOOP, PLANTED, waiting=self._waiting, essential=True, stall_seconds=1.0)
        self.loop.on_discard = self._discard

    async def run(self) -> None:
        """Handle the units until cancelled."""
        while True:
            await asyncio.sleep(0.02)
            with self.loop.step("disk"):
                if (self._folder / "stuck").exists():
                    raise Unavailable("the disk is full")
                for unit in filter(self.loop.admits, self._units()):
                    with self.loop.unit(unit, "alice"):
                        _handle(unit)

    def _units(self) -> list[str]:
        file = self._folder / "units"
        return file.read_text().split() if file.exists() else []

    def _waiting(self) -> int:
        return sum(not self.loop.is_set_aside(unit) for unit in self._units())

    def _discard(self, unit: str) -> None:
        with (self._folder / "discarded").open("a") as file:
            file.write(f"{unit}\n")
        (self._folder / "units").write_text("\n".join(each for each in self._units() if each != unit))


def _handle(unit: str) -> None:
    if unit.startswith("poison"):
        raise TypeError("Recursion limit reached")


def within(folder: Path) -> tuple[str, ...]:
    """Return what stands before a command that is to have the loop."""
    return sys.executable, __file__, str(folder)


def set_units(folder: Path, *units: str) -> None:
    """Have the loop handle these units, without a moment in which it sees others."""
    new = folder / "units.new"
    new.write_text("\n".join(units))
    new.rename(folder / "units")


def _plant(component: type[Any], work: PlantedWork) -> None:
    before = component.background_work

    def background_work(self: object, *arguments: object) -> Iterator[BackgroundWork]:
        yield from before(self, *arguments)
        yield BackgroundWork(work.loop, work.run)

    component.background_work = background_work


if __name__ == "__main__":
    planted = PlantedWork(Path(sys.argv[1]))
    for each in (ServerComponents, PoolProcess):
        _plant(each, planted)
    sys.exit(main([word for word in sys.argv[2:] if word != str(NERITE)]))
