"""What the check of a rollout reports: one difference between baseline and candidate, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, Final, NamedTuple

LONGEST: Final = 400
"""Characters of a value in a report."""


class Severity(Enum):
    """What a difference means for the rollout."""

    BLOCKS = "blocks"
    """Requests that the baseline answers would fail: the rollout must not start."""
    WARNS = "warns"
    """Answers, load or the comparison of both may change: decide whether that is intended."""
    NOTES = "notes"
    """Good to know."""


_ORDER: Final = tuple(Severity)


class Difference(NamedTuple):
    """One difference between the baseline and the candidate of a rollout."""

    severity: Severity
    subject: str
    """The thing that differs, such as ``output 'scores'``."""
    baseline: str
    candidate: str
    consequence: str
    """What follows from the difference, in one sentence."""

    def as_json(self) -> dict[str, str]:
        """Return the JSON form."""
        return {**self._asdict(), "severity": self.severity.value}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Difference:
        """Return the difference that ``as_json`` was called on."""
        severity, *texts = (str(value[name]) for name in cls._fields)
        return cls(Severity(severity), *texts)


def blocks(subject: str, baseline: object, candidate: object, consequence: str) -> Difference:
    """Return a difference that blocks the rollout."""
    return _difference(Severity.BLOCKS, subject, baseline, candidate, consequence)


def warns(subject: str, baseline: object, candidate: object, consequence: str) -> Difference:
    """Return a difference that may be intended."""
    return _difference(Severity.WARNS, subject, baseline, candidate, consequence)


def notes(subject: str, baseline: object, candidate: object, consequence: str) -> Difference:
    """Return a difference that is good to know."""
    return _difference(Severity.NOTES, subject, baseline, candidate, consequence)


def ordered(found: Iterable[Difference]) -> list[Difference]:
    """Return differences with those that block first."""
    return sorted(found, key=lambda each: _ORDER.index(each.severity))


def _difference(severity: Severity, subject: str, baseline: object, candidate: object, consequence: str) -> Difference:
    return Difference(severity, subject, _text(baseline), _text(candidate), consequence)


def _text(value: object) -> str:
    text = "none" if value is None or value == "" else str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
