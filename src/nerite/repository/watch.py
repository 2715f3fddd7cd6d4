"""What changed in the repositories from one look to the next, once it has come to rest. Pure.

Files are copied into a repository while the server looks: a change counts when two looks saw the same, and the
youngest file is older than ``SETTLE_NS``. The same holds for models that vanish, which some ways to replace one do for
a moment.
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
        self._restless: dict[Model, ModelFingerprint] = {}
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

        ``now_ns`` is the time of day, as files have it.
        """
        changed = []
        restless: dict[Model, ModelFingerprint] = {}
        for model, seen in found.items():
            if known.get(model) == seen:
                continue
            if self._restless.get(model) != seen or seen.newest_ns > now_ns - SETTLE_NS:
                restless[model] = seen
            else:
                changed.append(model)
        missing = {model for model in running if model not in found}
        gone = sorted(missing & self._missing)
        self._restless, self._missing = restless, missing.difference(gone)
        return Findings(changed, gone)
