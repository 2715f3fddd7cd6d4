"""States of model versions, and their entries in the repository index. Routers read the index of other servers."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, TypeAlias

Entry: TypeAlias = dict[str, str]
"""Entry of the repository index: name, version, state, reason."""
IN_SEVERAL: Final = "model appears in two or more repositories"
"""Why no version of a model can be loaded."""


class ModelState(enum.Enum):
    """State of a model version in its lifecycle, as the repository index shows it."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


UNLOADED: Final = "unloaded"
"""Begins the reason of versions that are unavailable because they were unloaded, or not loaded yet."""
ON_DEMAND: Final = "unloaded: on demand"
"""The reason of versions that the next request loads."""
ASLEEP: Final = "unloaded: asleep"
"""The reason of versions that the next request wakes."""


@dataclass
class VersionState:
    """State of a model version, with the reason if there is one to report."""

    state: ModelState
    reason: str = ""

    def entry(self, name: str, version: int) -> Entry:
        """Return the entry of a model's version; of the model as a whole if ``version`` is negative."""
        entry = {"name": name} | ({"version": str(version)} if version >= 0 else {}) | {"state": self.state.value}
        return entry | ({"reason": self.reason} if self.reason else {})
