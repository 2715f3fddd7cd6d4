"""The server as those see it who run inside: steps of an ensemble, and models that call other models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from nerite.core.request import InferenceRequest

if TYPE_CHECKING:
    from nerite.execution.running_version import RunningVersion


class Door(Protocol):
    """What may be asked of the server from within. For the loop's thread only."""

    def infer(self, request: InferenceRequest, decoupled: str) -> None:
        """Answer a request through ``request.respond``: always, and with ``final`` once.

        ``decoupled`` is the refusal of a model that may have several answers; empty if those are taken.
        """

    def find(self, model: str, version: str, decoupled: str, namespace: str = "") -> RunningVersion:
        """Return where a request for a model goes; an empty version is the latest. Raises Triton's refusals.

        ``namespace`` is the repository that it is of; without one the name has to do.
        """

    def ask_model_ready(self, model: str, version: str, answered: Callable[[bool], None]) -> None:
        """Tell whether one model can be served: not if there is none. Raises Triton's refusals of the version."""

    async def load(self, model: str, parameters: Mapping[str, str | bytes]) -> None:
        """Load or reload a model by hand. Raises ``NeriteError``."""

    async def unload(self, model: str, parameters: Mapping[str, Any]) -> None:
        """Unload a model by hand. Raises ``NeriteError``."""
