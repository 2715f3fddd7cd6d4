"""What the core tells its fronts: how to begin, and every change that concerns them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from nerite.admission.policy import AdmissionPolicy
from nerite.config.options import ServerOptions
from nerite.fronts.catalogue import Description
from nerite.regions import Registration
from nerite.scheduling.weighted_route import WeightedRoute

PROGRAM: Final = "nerite.fronts.process:main"
"""The program of a front, as the fork server names it."""


@dataclass
class SharedState:
    """What all fronts must know. A change has values for the fields that it replaces; None stands for no change."""

    models: list[Description] = field(default_factory=list)
    """Models that were added or have changed."""
    regions: list[Registration] | None = None
    """Shared memory regions of clients."""
    keys: dict[str, tuple[bytes, ...]] | None = None
    """Keys in the files of restrictions, by path."""
    policy: AdmissionPolicy | None = None
    log: Mapping[str, bool | int | str] | None = None
    """Settings of the log."""
    routes: Sequence[WeightedRoute] | None = None
    """All weighted routes."""


@dataclass
class FrontStart:
    """What a front needs to begin."""

    options: ServerOptions
    helpers: int
    """Maximum number of helper processes."""
    max_bytes: int
    """Limit of the bytes of requests in flight in all processes; 0 for none."""
    index: int
    """Number of the front."""
    fronts: int
    """Number of fronts."""
    ports: tuple[str, ...]
    """Names of the ports that are open."""
    number: int
    """Number of the last change in ``state``."""
    state: SharedState
