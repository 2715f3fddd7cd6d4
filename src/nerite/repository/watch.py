"""What changed in the repositories from one look to the next, once it has come to rest. Pure.

Files are copied into a repository while the server looks: a change counts when every look has seen the same for
``SETTLE_NS``, whatever the times of the files and of the day. A model that vanishes, which some ways to replace one do
for a moment, is gone when two looks have missed it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple, TypeAlias

from nerite.repository.fingerprint import ModelFingerprint

SETTLE_NS: Final = 1_000_000_000

Model: TypeAlias = tuple[str, str]
"""Namespace and name."""


class Findings(NamedTuple):
    """What is to be done after a look."""

    changed: list[Model]
    """To be loaded."""
    gone: list[Model]
    """To be unloaded."""


class Watch:
    """Remembers what was seen and has not come to rest."""

    def __init__(self) -> None:
        self._restless: dict[Model, tuple[ModelFingerprint, int]] = {}
        """How they look, and since when."""
        self._missing: set[Model] = set()

    @property
    def restless(self) -> bool:
        """Whether to look again soon."""
        return bool(self._restless or self._missing)

    def look(
        self,
        found: Mapping[Model, ModelFingerprint],
        known: Mapping[Model, ModelFingerprint | None],
        running: Collection[Model],
        now_ns: int,
    ) -> Findings:
        """Compare what was ``found`` with what is ``known``: how the files of a model looked when it was last loaded.

        ``now_ns`` is of a clock that does not jump.
        """
        changed = []
        restless: dict[Model, tuple[ModelFingerprint, int]] = {}
        for model, seen in found.items():
            if known.get(model) == seen:
                continue
            before, since_ns = self._restless.get(model, (None, now_ns))
            if before != seen:
                since_ns = now_ns
            if now_ns - since_ns < SETTLE_NS:
                restless[model] = seen, since_ns
            else:
                changed.append(model)
        missing = {model for model in running if model not in found}
        gone = sorted(missing & self._missing)
        self._restless, self._missing = restless, missing.difference(gone)
        return Findings(changed, gone)
