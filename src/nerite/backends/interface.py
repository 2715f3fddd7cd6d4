"""What a framework has to offer to be served: complete a configuration, open a model, execute, close.

A backend knows nothing of sockets, queues or processes. Whether its instances run in a thread of the server, in a
worker process or on the loop is the business of ``execution``; the same objects work in all three places.

Our own backends and those that come in packages (``packages.py``) are written to this one interface. What the tests in
``nerite.testing.BackendContract`` ask belongs to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from nerite.core.engine_report import EngineReport
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse

INTERFACE: Final = 1
"""The version of this interface. A backend in a package says in ``interface`` which one it is written for. Only what
breaks such a backend makes a new version."""


@dataclass(frozen=True)
class ModelContext:
    """What a backend is told about the model version it opens."""

    name: str
    version: int
    directory: Path
    """The model's directory, the one with config.pbtxt in it."""
    config: Mapping[str, Any]
    """The complete configuration in Triton's JSON form, defaults printed (contract: ``GET /v2/models/M/config``)."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The ``--backend-config`` values that apply to this backend."""
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """The backend's own: what ``complete`` did and ``open`` need not do again. Kept by ``dataclasses.replace``."""

    @property
    def version_directory(self) -> Path:
        """Where this version's artifacts are."""
        return self.directory / str(self.version)

    @property
    def environment(self) -> str:
        """The Python environment that the model brings, as ``EXECUTION_ENV_PATH`` names it; empty without one."""
        return self.parameter("EXECUTION_ENV_PATH")

    def parameter(self, key: str, default: str = "") -> str:
        """Return ``parameters { key … value { string_value } }`` of the configuration."""
        value = self.config.get("parameters", {}).get(key)
        return str(value["string_value"]) if value else default


class Reporter(Protocol):
    """Where an instance that goes on by itself with its requests, as an engine does, says how it is."""

    def report(self, report: EngineReport) -> None:
        """Tell the server. To be called before the responses that it tells of; on any thread."""

    def together(self) -> AbstractContextManager[None]:
        """Have what this thread reports and responds in a ``with`` block leave in one go at its end."""

    def give_up(self, reason: str) -> None:
        """Say that the instance cannot go on: it is made anew, in a new process."""


class _Unheard:
    def report(self, report: EngineReport) -> None:
        """Say it to nobody."""

    def together(self) -> AbstractContextManager[None]:
        """Have everything leave as it comes."""
        return nullcontext()

    def give_up(self, reason: str) -> None:
        """Stay as it is."""


UNHEARD: Final[Reporter] = _Unheard()
"""That of an instance in the server's own process, where nobody listens."""


@dataclass(frozen=True)
class InstanceContext:
    """Which instance of a model is made: its name, the device it should use, and where it runs."""

    name: str
    kind: str = "CPU"
    """``CPU``, ``GPU`` or ``MODEL``."""
    device: int = 0
    cores: tuple[int, ...] = ()
    """The processor cores that it runs on; empty where it may run on any."""
    memory_node: int = -1
    """The NUMA node that its memory is from; below 0 where it may be from any."""
    sharing: int = field(default=1, compare=False)
    """How many instances of the model run on these cores, this one among them."""
    reporter: Reporter = field(default=UNHEARD, compare=False, repr=False)


class Instance(Protocol):
    """One copy of a model, used by one thread at a time; on a CPU not always by the same."""

    def execute(
        self, requests: Sequence[InferenceRequest], timings: ExecutionTimes
    ) -> Sequence[InferenceResponse | None]:
        """Answer each request of a batch, in order.

        The requests were checked against the model's signature. Raise to fail all of them with one error; return
        ``InferenceResponse.failed`` in a place to fail that one, and None for a request that was or will be answered
        through its ``respond``, from any thread, as many times as there is something to say.
        """

    def is_ready(self) -> bool:
        """Return False if this instance cannot serve just now. Not called while ``execute`` runs.

        An instance that has an attribute ``checks_readiness`` which is False is never asked: it is ready.
        """

    def close(self) -> None:
        """Give everything back. Called once, after the last ``execute``."""


class Model(Protocol):
    """A model version that is open: what its instances share."""

    def instance(self, context: InstanceContext) -> Instance:
        """Make one more instance. May be slow; called outside the loop's thread."""

    def close(self) -> None:
        """Give everything back. Called once, after the last instance was closed.

        The object may live on: the header of a request that is remembered knows where it went.
        """


class Backend(Protocol):
    """A framework. One object of it serves all models that name it, from any thread."""

    name: str
    isolated: bool
    """Whether each instance gets a worker process, where a crash, a leak and the interpreter's lock are its own; else
    instances run in threads of the server, which is right where the framework lets go of the lock while it computes.
    One in a package that does not say is isolated. See ``Discerning`` for one whose models differ in this."""

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration with what the artifact itself tells filled in.

        May only set max_batch_size, inputs, outputs, the scheduling choice where none is set, and decoupled. Raises
        ``NeriteError`` where configuration and artifact contradict each other.
        """

    def open(self, context: ModelContext) -> Model:
        """Load the artifact. Raises ``NeriteError`` with what is wrong with it and, where one exists, the remedy."""


@runtime_checkable
class Discerning(Protocol):
    """A backend some of whose models have to be isolated."""

    def isolates(self, context: ModelContext) -> bool:
        """Return ``isolated`` for one model. May look at its files, without the framework. Raises ``NeriteError``."""


@runtime_checkable
class Preparing(Protocol):
    """A backend that has something made for some of its models before their workers start."""

    def prepare(self, context: ModelContext) -> Path | None:
        """Make it, and return the Python that the model's workers run; None for the server's.

        Not called for a model that brings an environment. May take minutes. Raises ``NeriteError``.
        """


__all__ = [
    "INTERFACE",
    "Backend",
    "Discerning",
    "Instance",
    "InstanceContext",
    "ExecutionTimes",
    "Model",
    "ModelContext",
    "Preparing",
    "Reporter",
]
