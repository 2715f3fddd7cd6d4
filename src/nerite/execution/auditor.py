"""Audits the running model versions once a second.

Each request waits, runs or has ended, and each instance is idle, at work or down. What differs is restored, reported
as an internal error, and makes its model unready until the next audit. A finding is always a mistake in this program.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from nerite.core.internal_errors import report
from nerite.execution.running_version import RunningVersion

PERIOD: Final = 1.0
"""Seconds between two audits."""


class Discrepancy(Exception):
    """What was handed out is not what came back."""


class Auditor:
    """For the versions of a server. A version without requests costs it some microseconds."""

    def __init__(self, versions: Callable[[], Iterable[RunningVersion]]) -> None:
        """``versions`` returns those that run now."""
        self._versions = versions

    async def run(self) -> None:
        """Audit again and again, until cancelled."""
        while True:
            await asyncio.sleep(PERIOD)
            for version in [*self._versions()]:
                self.audit(version)

    def audit(self, version: RunningVersion) -> None:
        """Audit one version, and report each finding."""
        try:
            for finding in version.audit():
                report("audit", Discrepancy(finding))
        except Exception as error:
            report("audit", error, f"of model '{version.name}'")
