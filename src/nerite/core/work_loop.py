"""Loops that serve many: each unit of work behind a barrier, dead letters, and a watch of the loop's progress.

A unit is what one client or one model owns of a loop's work: a batch, a row, a document, a member. An exception that
nothing foresaw costs its unit alone; a unit that raises twice is set aside as a dead letter until an operator has it
tried again, or discards it. A ``NeriteError`` says that the environment fails (a database, a disk, a peer): the unit
rests, and is tried again for as long as it takes.

Decides without I/O. Each object is used from one thread; what is read of it may be a moment old in others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal, NamedTuple, TypeAlias

from nerite.core.durations import duration_text
from nerite.core.errors import NeriteError, NotFound, RefusedData
from nerite.core.failures import report
from nerite.core.text import quoted_text

LoopName: TypeAlias = Literal[
    "audit", "autoscaling", "batches", "demand", "discovery", "files", "health", "ledger", "placement", "polling",
    "quotas", "responses", "rollouts", "sampling", "stalls", "webhooks",
]  # fmt: skip
"""Label of the metrics: what the loop serves."""
LoopState: TypeAlias = Literal["ok", "failing", "stalled"]
STALL_SECONDS: Final = 30.0
"""Time without progress, while work waits, after which a loop counts as stalled."""
_TRIES: Final = 2
"""Times that a unit may raise something unforeseen before it is set aside."""
_FIRST_REST: Final = 0.5
_LONGEST_REST: Final = 30.0
"""Seconds for which a unit that failed is not tried; they double with each failure."""
_RESTARTS: Final = 3
"""Restarts without progress after which a loop counts as stalled."""
_TELL_AGAIN: Final = 600.0
"""Seconds after which a stall that lasts is logged again."""
_log = logging.getLogger("nerite.background")


class DeadLetter(NamedTuple):
    """A unit that was set aside."""

    unit: str
    tenant: str
    """Whose it is; empty for nobody's."""
    text: str
    """The incident."""
    at: float
    """Unix time."""


class _Trouble:
    """What a unit has failed with, since it last succeeded."""

    __slots__ = ("failures", "letter", "poison", "text", "until")

    def __init__(self) -> None:
        self.failures = self.poison = 0
        """Failures in a row, and those of them that nothing foresaw."""
        self.until = 0.0
        self.text = ""
        self.letter: DeadLetter | None = None


class WorkLoop:
    """Barrier, dead letters and progress of one loop."""

    def __init__(
        self,
        name: LoopName,
        about: str = "",
        *,
        waiting: Callable[[], int] = lambda: 1,
        essential: bool = False,
        stall_seconds: float = STALL_SECONDS,
        longest_rest: float = _LONGEST_REST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``about`` distinguishes loops of one name, such as "pool 'llm'".

        ``waiting`` returns how many units wait now. A loop that always has something to do keeps the default. The
        process is not ready while an ``essential`` loop is stalled. What fails is tried again after ``longest_rest``
        seconds at the latest.
        """
        self.name: Final = name
        self.about: Final = about
        self.essential: Final = essential
        self.stall_seconds: Final = stall_seconds
        self.on_discard: Callable[[str], object] | None = None
        """What gives a unit up for good when an operator discards it; None if its unit is only forgotten."""
        self.failures = 0
        """Units and steps that raised something unforeseen, each time."""
        self.restarts = 0
        """Times that the whole loop was started again."""
        self.woken: Callable[[], object] = lambda: None
        """Called when a unit is to be tried again."""
        self._waiting = waiting
        self._longest_rest = longest_rest
        self._clock = clock
        self._troubles: dict[str, _Trouble] = {}
        self._restarts_in_a_row = 0
        self._advanced_at = self._idle_at = clock()
        self._tell_again = 0.0
        """When a stall is logged again."""
        self._problem = ""
        self._last_error = ""

    def __str__(self) -> str:
        return f"{self.name} ({quoted_text(self.about)})" if self.about else self.name

    # The barrier

    def admits(self, unit: str) -> bool:
        """Return whether a unit may be tried now: it was not set aside, and does not rest after a failure."""
        trouble = self._troubles.get(unit)
        return trouble is None or (trouble.letter is None and self._clock() >= trouble.until)

    def is_set_aside(self, unit: str) -> bool:
        """Return whether a unit is a dead letter."""
        trouble = self._troubles.get(unit)
        return trouble is not None and trouble.letter is not None

    @contextmanager
    def unit(self, unit: str, tenant: str = "") -> Iterator[None]:
        """Handle one unit. What it raises is recorded, and does not leave the ``with`` statement.

        Callers ask ``admits`` before.
        """
        try:
            yield
        except Exception as error:
            self.failed(unit, error, tenant)
        else:
            self.succeeded(unit)

    @contextmanager
    def step(self, name: str, *, routine: bool = False) -> Iterator[None]:
        """Do one step of the loop that is no client's: it is never set aside, and tried again after a rest.

        A ``routine`` is done whether or not anything waits, so it is no progress.
        """
        try:
            yield
        except Exception as error:
            self.failed(name, error, tries=0)
        else:
            self.succeeded(name, progress=not routine)

    def succeeded(self, unit: str, *, progress: bool = True) -> None:
        """Note that a unit was handled."""
        if progress:
            self.advanced()
        if (trouble := self._troubles.pop(unit, None)) is not None and trouble.failures > trouble.poison:
            _log.info("%s goes on with %s", self, _shown(unit))

    def failed(self, unit: str, error: Exception, tenant: str = "", *, tries: int = _TRIES) -> None:
        """Note that a unit raised ``error``, and set it aside if that was the last of ``tries``; 0: never."""
        trouble = self._troubles.setdefault(unit, _Trouble())
        trouble.failures += 1
        trouble.until = self._clock() + min(_FIRST_REST * 2 ** min(trouble.failures - 1, 10), self._longest_rest)
        if isinstance(error, NeriteError) and not isinstance(error, RefusedData):
            if trouble.text != error.message:
                trouble.text = error.message
                _log.error("%s: %s waits: %s", self, _shown(unit), error.message)
            return
        self.failures += 1
        trouble.poison += 1
        trouble.text = report("loop", error, f"of {self}, with {_shown(unit)}").message
        if tries and trouble.poison >= tries:
            trouble.letter = DeadLetter(unit, tenant, trouble.text, time.time())
            self.advanced()
            text = "%s: %s was set aside: it failed %d times. Retry or discard it with nerite background"
            _log.error(text, self, _shown(unit), trouble.poison)

    def forget(self, unit: str) -> None:
        """Forget a unit that is over."""
        self._troubles.pop(unit, None)

    # Dead letters

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """The units that were set aside, the oldest first."""
        return [it.letter for it in list(self._troubles.values()) if it.letter is not None]

    @property
    def failing(self) -> dict[str, str]:
        """Units and steps that fail and are tried again, with the last error."""
        return {unit: it.text for unit, it in list(self._troubles.items()) if it.letter is None}

    def retry(self, unit: str) -> None:
        """Have a dead letter tried again. Raises ``NotFound``."""
        self._dead(unit)
        self.forget(unit)
        self.woken()

    def discard(self, unit: str) -> None:
        """Give a dead letter up. Raises ``NotFound``."""
        self._dead(unit)
        if self.on_discard is not None:
            self.on_discard(unit)
        self.forget(unit)
        self.woken()

    def _dead(self, unit: str) -> DeadLetter:
        trouble = self._troubles.get(unit)
        if trouble is None or trouble.letter is None:
            raise NotFound(f"no unit '{quoted_text(unit)}' of {self} was set aside")
        return trouble.letter

    # Progress

    @property
    def waiting(self) -> int:
        """Number of units that wait, without those that were set aside."""
        return self._waiting()

    def advanced(self) -> None:
        """Note progress. ``unit`` and ``step`` do so themselves."""
        self._advanced_at = self._clock()
        self._restarts_in_a_row = 0

    def restarted(self, error: BaseException) -> float:
        """Note that the whole loop failed and is started again; return after how many seconds."""
        self.restarts += 1
        self._restarts_in_a_row += 1
        self._last_error = quoted_text(f"{type(error).__name__}: {error}")
        return float(min(2 ** (self._restarts_in_a_row - 1), _LONGEST_REST))

    @property
    def state(self) -> LoopState:
        """Whether the loop makes progress, and with all units."""
        if self._problem:
            return "stalled"
        return "failing" if self.failing else "ok"

    @property
    def problem(self) -> str:
        """What stands, since the last call of ``watch``; empty while the loop makes progress or has nothing to do."""
        return self._problem

    def watch(self) -> None:
        """Find out whether the loop makes progress, and log when that changes. To be called every second or so."""
        before, self._problem = self._problem, self._find_problem()
        if self._problem and (not before or self._clock() >= self._tell_again):
            self._tell_again = self._clock() + _TELL_AGAIN
            _log.error("%s is stalled: %s", self, self._problem)
        elif before and not self._problem:
            _log.info("%s makes progress again", self)

    def _find_problem(self) -> str:
        now, waiting = self._clock(), self._waiting()
        if not waiting:
            self._idle_at = now
        if self._restarts_in_a_row >= _RESTARTS:
            return f"it was restarted {self._restarts_in_a_row} times without progress: {self._last_error}"
        stands = now - max(self._advanced_at, self._idle_at)
        if stands < self.stall_seconds:
            return ""
        reason = next((f": {quoted_text(unit)}: {text}" for unit, text in self.failing.items()), "")
        return f"nothing has advanced for {duration_text(float(int(stands)))} while {waiting} wait{reason}"


class WorkLoops:
    """All loops of one process."""

    def __init__(self) -> None:
        self._loops: list[WorkLoop] = []

    def __iter__(self) -> Iterator[WorkLoop]:
        return iter(self._loops)

    def add(self, loop: WorkLoop) -> None:
        """Add a loop; once is enough."""
        if loop not in self._loops:
            self._loops.append(loop)

    def watch(self) -> None:
        """Find out which loops make progress."""
        for loop in self._loops:
            loop.watch()

    @property
    def obstacle(self) -> str:
        """Why the process is not ready: the first essential loop that is stalled; empty if there is none.

        Names no unit, because anybody may ask whether the process is ready.
        """
        return next((f"{loop} is stalled" for loop in self._loops if loop.essential and loop.problem), "")

    def of_unit(self, name: str, unit: str) -> WorkLoop:
        """Return the loop ``name`` that has set ``unit`` aside. Raises ``NotFound``."""
        found = [loop for loop in self._loops if loop.name == name and loop.is_set_aside(unit)]
        if not found:
            raise NotFound(f"no unit '{quoted_text(unit)}' of '{quoted_text(name)}' was set aside")
        return found[0]


def _shown(unit: str) -> str:
    return f"'{quoted_text(unit)}'"
