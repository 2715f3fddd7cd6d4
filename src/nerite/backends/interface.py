"""Interface that a backend implements: complete a configuration, open a model, create instances, execute, close.

A backend knows nothing of sockets, queues or processes. The server decides whether its instances run in a thread, in a
worker process or on the event loop; the same objects work in all three places.

Built-in backends and those from packages (``registry.py``) use this interface. The tests in
``nerite.testing.BackendContract`` are part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from nerite.core.engine_report import EngineReport
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.devices.pools import PinnedPool

INTERFACE: Final = 1
"""Version of this interface. A backend from a package declares in ``interface`` the version it is written for. The
version changes only with changes that break such backends."""


def _ignore_progress(text: str) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class ModelContext:
    """Model version that a backend opens."""

    name: str
    version: int
    directory: Path
    """The model's directory, which contains config.pbtxt."""
    config: Mapping[str, Any]
    """The complete configuration in Triton's JSON form, with defaults (contract: ``GET /v2/models/M/config``)."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The ``--backend-config`` values that apply to this backend."""
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """For the backend: results of ``complete`` that ``open`` can reuse. Kept by ``dataclasses.replace``."""
    progress: Callable[[str], None] = field(default=_ignore_progress, compare=False, repr=False)
    """Told what is being made for the model, such as an environment, and how far it is. Thread-safe."""

    @property
    def version_directory(self) -> Path:
        """The directory with this version's artifacts."""
        return self.directory / str(self.version)

    @property
    def environment(self) -> str:
        """The model's own Python environment as ``EXECUTION_ENV_PATH`` names it; empty without one."""
        return self.parameter("EXECUTION_ENV_PATH")

    def parameter(self, key: str, default: str = "") -> str:
        """Return the string value of an entry of ``parameters`` in the configuration."""
        value = self.config.get("parameters", {}).get(key)
        return str(value["string_value"]) if value else default


class Reporter(Protocol):
    """Receives the status of an instance that processes requests on its own, such as an engine. Thread-safe."""

    def report(self, report: EngineReport) -> None:
        """Send a report to the server. Call it before sending the responses that the report covers."""

    def together(self) -> AbstractContextManager[None]:
        """Batch the reports and responses of this thread in a ``with`` block into one message at its end."""

    def give_up(self, reason: str) -> None:
        """Report that the instance cannot continue; the server replaces it in a new process."""


class _NullReporter:
    def report(self, report: EngineReport) -> None:
        """Do nothing."""

    def together(self) -> AbstractContextManager[None]:
        """Return a context that batches nothing."""
        return nullcontext()

    def give_up(self, reason: str) -> None:
        """Do nothing."""


UNHEARD: Final[Reporter] = _NullReporter()
"""Discards everything: the reporter of instances in the server's own process."""


@dataclass(frozen=True)
class InstanceContext:
    """Instance of a model to create: its name, its device, and the cores and memory it uses."""

    name: str
    kind: str = "CPU"
    """``CPU``, ``GPU`` or ``MODEL``."""
    device: int = 0
    cores: tuple[int, ...] = ()
    """The processor cores that it runs on; empty for any."""
    memory_node: int = -1
    """The NUMA node of its memory; negative for any."""
    sharing: int = field(default=1, compare=False)
    """The number of instances of the model on these cores, including this one."""
    reporter: Reporter = field(default=UNHEARD, compare=False, repr=False)
    pinned: PinnedPool | None = field(default=None, compare=False, repr=False)
    """Pinned memory of the process, if it has any."""


class Instance(Protocol):
    """One copy of a model, used by one thread at a time, though on a CPU not always by the same thread."""

    def execute(
        self, requests: Sequence[InferenceRequest], timings: ExecutionTimes
    ) -> Sequence[InferenceResponse | None]:
        """Execute a batch; return one response per request, in order.

        The requests have been validated against the model's signature. Raise to fail all of them with one error.
        Return ``InferenceResponse.failed`` to fail a single request, and None for a request that is answered through
        its ``respond``, which may be called any number of times from any thread.
        """

    def is_ready(self) -> bool:
        """Return False if this instance cannot serve at present. Not called while ``execute`` runs.

        Never called if the instance has an attribute ``checks_readiness`` that is False; it then counts as ready.
        """

    def close(self) -> None:
        """Release all resources. Called once, after the last ``execute``."""


@runtime_checkable
class TakesAdapters(Protocol):
    """An instance that takes further LoRA adapters while it runs."""

    def load_adapter(self, name: str, path: str) -> None:
        """Load the adapter in the directory ``path``, which requests may choose then. Raises ``NeriteError``."""

    def unload_adapter(self, name: str) -> None:
        """Refuse requests for an adapter from now on. Raises ``NeriteError``."""


@runtime_checkable
class Sleeper(Protocol):
    """An instance that may be able to give the memory of its GPUs back while it has no requests."""

    @property
    def can_sleep(self) -> bool:
        """Whether this one can."""

    def sleep(self) -> None:
        """Give the memory back; nothing is executed until ``wake``. Raises ``NeriteError``."""

    def wake(self) -> None:
        """Become as before ``sleep``. Raises ``NeriteError``."""


class Model(Protocol):
    """Open model version: the resources that its instances share."""

    def instance(self, context: InstanceContext) -> Instance:
        """Create an instance. May be slow; not called on the event loop's thread."""

    def close(self) -> None:
        """Release all resources. Called once, after the last instance was closed.

        The object itself may live longer, because memoized request headers refer to it.
        """


class Backend(Protocol):
    """Adapter for a framework. One thread-safe object serves all models that name it."""

    name: str
    isolated: bool
    """True if each instance runs in a worker process, which isolates crashes, memory leaks and the GIL. If False,
    instances run in threads of the server, which suits frameworks that release the GIL while they compute. The default
    for a backend from a package is True. See ``SelectivelyIsolated`` for backends whose models differ in this."""

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration, completed from the artifact.

        May only set max_batch_size, inputs, outputs, the scheduler if none is set, and decoupled. Raises
        ``NeriteError`` if configuration and artifact contradict each other.
        """

    def open(self, context: ModelContext) -> Model:
        """Load the artifact. Raises ``NeriteError`` with what is wrong with it and, if there is one, the remedy."""


@runtime_checkable
class SelectivelyIsolated(Protocol):
    """A backend only some of whose models must be isolated."""

    def isolates(self, context: ModelContext) -> bool:
        """Return ``isolated`` for one model. May read its files, without the framework. Raises ``NeriteError``."""


@runtime_checkable
class PreparesModels(Protocol):
    """A backend that prepares resources for some of its models before their workers start."""

    def prepare(self, context: ModelContext) -> Path | None:
        """Prepare a model, and return the Python interpreter for its workers; None for the server's.

        Not called for a model with its own environment. May take minutes. Raises ``NeriteError``.
        """


__all__ = [
    "INTERFACE",
    "TakesAdapters",
    "Backend",
    "SelectivelyIsolated",
    "Instance",
    "InstanceContext",
    "ExecutionTimes",
    "Model",
    "ModelContext",
    "PreparesModels",
    "Reporter",
]
