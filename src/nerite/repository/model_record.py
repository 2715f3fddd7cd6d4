"""What the server knows of one model: each version's state, and the ones that run."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nerite.config.loading import PolledModel
from nerite.config.model_config import ModelConfig
from nerite.core.errors import InvalidArgument, NotFound, Unavailable
from nerite.execution.running_version import RunningVersion
from nerite.repository.fingerprint import ModelFingerprint

if TYPE_CHECKING:
    from nerite.repository.assembly import Assembly


class State(enum.Enum):
    """Where a version is in its life."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass
class VersionState:
    """State, and what led to it where that needs saying."""

    state: State
    reason: str = ""


@dataclass(frozen=True)
class Loaded:
    """What running versions were made from."""

    polled: PolledModel
    """What the files said."""
    seen: ModelFingerprint
    """How they looked."""
    brought: bool = False
    """A load request brought the files: they are the repository's no more than those of another one."""


@dataclass(eq=False)
class ModelRecord:
    """One model. Changed by the ``ModelManager`` only."""

    name: str
    namespace: str = ""
    """The repository, where models of one name are told apart by it; else empty."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    """Held by whoever loads or unloads."""
    states: dict[int, VersionState] = field(default_factory=dict)
    running: dict[int, RunningVersion] = field(default_factory=dict)
    """The versions that take requests."""
    latest: int = -1
    """The version a request without one goes to."""
    loaded: Loaded | None = None
    """What ``running`` was made from."""
    seen: ModelFingerprint | None = None
    """How the files looked when they were last loaded, or failed to load."""
    going: bool = False
    """It is to be unloaded once the ensembles that need it have answered what they hold."""
    asked: bool = False
    """It was loaded for its own sake, not because an ensemble needs it."""
    assembly: Assembly | None = None
    """What there is to an ensemble, whether it runs or waits for its models; None for any other model."""
    parts: tuple[object, ...] = ()
    """What the models of an ensemble were like when it was put together."""
    unreadable: str = ""
    """What is wrong with the files, where it is so wrong that no load was tried."""

    def find(self, version: str) -> RunningVersion:
        """Return the running version that ``version`` means; empty means the latest. Raises Triton's refusals."""
        if not version:
            if self.latest < 0:
                raise NotFound(f"Request for unknown model: '{self.name}' has no available versions")
            return self.running[self.latest]
        number = version_number(version)
        running = self.running.get(number)
        if running is not None:
            return running
        if number in self.states:
            raise Unavailable(f"Request for unknown model: '{self.name}' version {number} is not at ready state")
        ready = ", ".join(map(str, sorted(self.running))) or "none"
        raise NotFound(
            f"Request for unknown model: '{self.name}' version {number} is not found (versions that are ready: {ready})"
        )

    def unchanged(self, loading: Loaded) -> dict[int, RunningVersion]:
        """Return the running versions that need no reload: same files, and the same configuration.

        Which versions there are, and how many instances, may be otherwise.
        """
        loaded = self.loaded
        if loaded is None or loaded.brought or loading.brought or loaded.seen.shared != loading.seen.shared:
            return {}
        if _essence(loaded.polled.config) != _essence(loading.polled.config):
            return {}
        return {
            version: running
            for version in loading.polled.versions
            if (running := self.running.get(version)) is not None
            and loaded.seen.versions.get(version) == loading.seen.versions.get(version)
        }

    @property
    def gone(self) -> bool:
        """The model was unloaded, or is about to be."""
        leaves = [each.state is State.UNLOADING or each.reason == "unloaded" for each in self.states.values()]
        return self.going or (bool(leaves) and all(leaves))

    @property
    def known(self) -> bool:
        """The model was loaded, or tried, at some time."""
        return bool(self.states)


def _essence(config: ModelConfig) -> ModelConfig:
    return replace(config, version_policy=None, instance_group=())


def version_number(text: str) -> int:
    """Return the number that a version in a request is. Raises ``InvalidArgument``."""
    try:
        number = int(text)
        if number >= 1 << 63:
            raise ValueError
    except ValueError:
        raise InvalidArgument(
            f"failed to get model version from specified version string '{text}' (details: stol), "
            "version should be an integral value > 0"
        ) from None
    if number < 0:
        raise InvalidArgument(f"invalid model version specified '{text}' , version should be an integral value > 0")
    return number
