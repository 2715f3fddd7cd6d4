"""The server as those see it who run inside: steps of an ensemble, and models that call other models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from nerite.core.request import InferenceRequest, ServedVersion
from nerite.observability.statistics import VersionStatistics


class LoadedVersion(ServedVersion, Protocol):
    """A loaded version of a model, as those see it who run inside."""

    name: str
    version: int
    statistics: VersionStatistics
    traced: bool
    """Each of its requests is traced."""
    worker: str
    """The worker that it shares with other models; empty if it shares none."""

    @property
    def most_rows(self) -> int:
        """Rows that may run together; 0: each request runs alone."""

    def ask_ready(self, answered: Callable[[bool], None], patience: float) -> None:
        """Tell whether all its instances can serve."""

    @property
    def runners(self) -> Collection[object]:
        """Its instances."""


class Door(Protocol):
    """What may be asked of the server from within. For the loop's thread only."""

    def infer(self, request: InferenceRequest, decoupled: str) -> None:
        """Answer a request through ``request.respond``: always, and with ``final`` once.

        ``decoupled`` is the refusal of a model that may have several answers; empty if those are taken.
        """

    def find(self, model: str, version: str, decoupled: str, namespace: str = "") -> LoadedVersion:
        """Return where a request for a model goes; an empty version is the latest. Raises Triton's refusals.

        ``namespace`` is the repository that it is of; without one the name has to do.
        """

    def ask_model_ready(self, model: str, version: str, answered: Callable[[bool], None]) -> None:
        """Tell whether one model can be served: not if there is none. Raises Triton's refusals of the version."""

    async def load(self, model: str, parameters: Mapping[str, str | bytes]) -> None:
        """Load or reload a model by hand. Raises ``NeriteError``."""

    async def unload(self, model: str, parameters: Mapping[str, Any]) -> None:
        """Unload a model by hand. Raises ``NeriteError``."""
