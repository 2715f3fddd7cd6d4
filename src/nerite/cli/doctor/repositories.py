"""The model repositories, as ``nerite check`` sees them, in a few lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from nerite.cli import check
from nerite.cli.doctor.finding import Finding, Level

_MOST: Final = 5
"""Mistakes that are told."""


def findings(repositories: Sequence[str]) -> Iterator[Finding]:
    """Yield what is wrong with them."""
    found = check.examine(repositories)
    mistakes = [mistake for each in found for mistake in each.mistakes]
    for mistake in mistakes[:_MOST]:
        where = ":".join(map(str, filter(None, (mistake.file, mistake.line, mistake.column))))
        yield Finding(Level.PROBLEM, f"{where}: {mistake.message}".partition("\n")[0], mistake.remedy)
    if len(mistakes) > _MOST:
        remedy = f"nerite check {' '.join(repositories)}"
        yield Finding(Level.PROBLEM, f"and {len(mistakes) - _MOST} mistakes more", remedy)
    for each in found:
        for remark in each.remarks:
            if remark.level != "note":
                yield Finding(Level.WARNING, f"{each.directory}: {remark.text}")
    models = len({each.directory for each in found if each.model})
    if models and not mistakes:
        yield Finding(Level.OK, f"{models} model{'' if models == 1 else 's'} without a mistake")
