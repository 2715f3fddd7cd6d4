"""Measures configurations, or remembers what they showed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from nerite.analyze.checkpoint import Checkpoint
from nerite.analyze.finding import Finding, named
from nerite.analyze.load import Load
from nerite.analyze.settings import Value
from nerite.analyze.subject import Subjects
from nerite.analyze.trial import measured
from nerite.bench.session import Look
from nerite.cli.progress import Progress


class Bench:
    """Tells how far it has come: ``done`` configurations of ``most``."""

    def __init__(
        self, repository: Path, subjects: Subjects, load: Load, checkpoint: Checkpoint, progress: Progress
    ) -> None:
        self.done = 0
        self.most = 0
        self.measurements = 0
        """Levels of load that were measured, now or in an earlier run."""
        self.progress = progress
        self._repository = repository
        self._subjects = subjects
        self._load = load
        self._checkpoint = checkpoint

    def __call__(self, changes: Mapping[str, Value], turn: int = 0, levels: Sequence[int] = ()) -> Finding:
        """Return what a configuration shows, which is in the checkpoint then."""
        levels = levels or self._load.concurrencies
        identity = self._subjects.identity(changes)
        finding = self._checkpoint.get(identity, turn, levels)
        if finding is None:
            place = "again, in turns" if turn else f"{self.done + 1} of {self.most} at most"
            tell = partial(self._tell, f"{place}: {named(changes)}")
            finding = measured(self._repository, self._subjects.texts(changes), changes, self._load, levels, tell)
            if not finding.refused:  # another time it may be none
                self._checkpoint.add(identity, turn, finding)
        self.measurements += len(levels)
        # Another run may have had another present configuration.
        return dataclasses.replace(finding, changes=changes)

    def _tell(self, what: str, look: Look) -> None:
        self.progress.part(what, look.part, f"concurrency {look.level}{', warming up' if look.warming_up else ''}")
