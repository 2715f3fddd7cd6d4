"""Records what a judge is given in a file, so that other gates can be tried on it: ``nerite rollout replay``."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path
from threading import Lock
from typing import Any, Final

import orjson

from nerite.core.failures import system_error
from nerite.judge.outcome import Outcome
from nerite.judge.replay import outcome_to_json
from nerite.observability.log import log

MAX_BYTES: Final = 256 << 20
"""Size of a recording; what comes after it is not recorded."""


class RolloutRecording:
    """A file of JSON lines in the form that ``nerite.judge.replay`` describes. For the loop's thread."""

    def __init__(self, path: Path, executor: Executor, max_bytes: int = MAX_BYTES) -> None:
        """Append to ``path``, on threads of ``executor``."""
        self.path = path
        self._executor = executor
        self._left = max_bytes
        self._waiting: list[bytes] = []
        self._unwritten: list[bytes] = []
        self._writing = Lock()

    def outcome(self, outcome: Outcome) -> None:
        """Record the end of a request."""
        self._add(outcome_to_json(outcome))

    def gauge(self, name: str, candidate: float, baseline: float, now_ns: int) -> None:
        """Record a reading of a gauge."""
        values = {"candidate": _plain(candidate), "baseline": _plain(baseline)}
        self._add({"gauge": name, **values, "at_ns": now_ns})

    def step(self, number: int, now_ns: int) -> None:
        """Record that the weights change."""
        self._add({"step": number, "at_ns": now_ns})

    def flush(self) -> None:
        """Write what was recorded, in the background."""
        if self._waiting:
            self._unwritten.append(b"".join(self._waiting))
            self._waiting.clear()
            with contextlib.suppress(RuntimeError):  # the executor is shut down: ``close`` writes
                self._executor.submit(self._write)

    def close(self) -> None:
        """Write what was recorded. Blocks."""
        self._unwritten.append(b"".join(self._waiting))
        self._waiting.clear()
        self._write()

    def _add(self, event: Mapping[str, Any]) -> None:
        if self._left <= 0:
            return
        line = orjson.dumps(event) + b"\n"
        self._left -= len(line)
        if self._left <= 0:
            log.warning(f"the recording {self.path} is full: the rest of the rollout is not recorded")
            return
        self._waiting.append(line)

    def _write(self) -> None:
        with self._writing:
            while self._unwritten:
                data = self._unwritten.pop(0)
                try:
                    with self.path.open("ab") as file:
                        file.write(data)
                except OSError as error:
                    log.warning(f"a part of a recording is lost: {system_error(error, self.path)}")


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else value
