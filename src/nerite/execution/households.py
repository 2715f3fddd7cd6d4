"""Which worker process an instance lives in: one of its own, or that of the worker which its model names.

Models with the same ``WORKER`` parameter share a process: the first instance of each is in the first one, the second
in the second. So what goes from one of them to the next can stay where it is. They also share their fate: one that
crashes takes the others along, and all wait while one of them computes.
"""

from __future__ import annotations

import logging
from typing import Final

from nerite.backends.interface import ModelContext
from nerite.execution.arena import Arena
from nerite.execution.household import Household
from nerite.execution.worker_plan import WorkerPlan

_PARAMETER: Final = "WORKER"
_log = logging.getLogger("nerite.execution")


def shared_by(context: ModelContext) -> str:
    """Return the name of the worker that a model shares with others; nothing for one that does not."""
    return context.parameter(_PARAMETER)


class Households:
    """Those of the server. For the loop's thread only."""

    def __init__(self) -> None:
        self._shared: dict[tuple[object, ...], list[Household]] = {}

    def home(self, plan: WorkerPlan, family: object) -> Household:
        """Return where an instance is to live. No two of one ``family`` live together."""
        if not plan.shared:
            return Household(plan, plan.instance.name, plan.arena)
        homes = self._shared.setdefault(plan.process, [])
        for home in homes:
            if not home.over and all(member.family is not family for member in home.members):
                _log.info(
                    "'%s' lives in the worker '%s', with %s",
                    plan.instance.name,
                    home.name,
                    ", ".join(f"'{member.plan.instance.name}'" for member in home.members),
                )
                return home
        return self._new(plan, homes)

    def _new(self, plan: WorkerPlan, homes: list[Household]) -> Household:
        taken = {home.name for home in homes}
        name = next(name for number in range(len(taken) + 1) if (name := f"{plan.shared}_{number}") not in taken)
        arena = Arena()
        plan.around.guests.host(arena)
        home = Household(plan, name, arena)

        def ended() -> None:
            arena.close()
            homes.remove(home)

        home.on_end = ended
        homes.append(home)
        return home
