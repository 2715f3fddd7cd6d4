"""Interfaces of request dispatch: version schedulers, instance pickers, and the server as models inside it see it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from nerite.core.errors import NeriteError
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.queue_stage import QueueStage
from nerite.core.request import InferenceRequest, ServedVersion
from nerite.core.response import InferenceResponse
from nerite.instances.instance import Batch, ModelInstance
from nerite.observability.statistics import VersionStatistics
from nerite.scheduling.decider import BatchReason


class VersionScheduler(QueueStage, Protocol):
    """Last stage: executes the requests to a model version. A dispatcher or an ensemble."""

    sound: bool
    """The last audit found nothing to restore."""

    def audit(self) -> list[str]:
        """Compare what was handed out with what came back, restore what differs, and return descriptions of it."""

    @property
    def waiting(self) -> Mapping[int, int]:
        """Number of requests that wait for an instance, by priority."""

    @property
    def releases(self) -> Mapping[BatchReason, int]:
        """Number of batches by the reason for their release; empty if the model does not gather requests."""

    def notify_observers(self) -> None:
        """Report executions to sinks that are an ``ExecutionObserver`` from now on; until then none is looked for."""

    def server_stops(self) -> None:
        """Prepare for shutdown: finish the requests that can be finished, and refuse the others."""

    def waits_for(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Return calls to other models; ``request``, which is in this version, stays blocked until one is answered."""

    def begun(self, request: InferenceRequest) -> bool:
        """Return whether an instance has ``request``, which is in this version: it can no longer be refused."""


# Instance pickers: each decides for one model which instance runs which batch next.

Responses: TypeAlias = Sequence[InferenceResponse | None]
"""The response to each request of a batch; None for one that gets its responses otherwise."""
Refusal: TypeAlias = tuple[InferenceRequest, NeriteError]
"""A waiting request that is refused, and the error to answer with."""
May: TypeAlias = Callable[[ModelInstance], bool]
"""Returns whether an instance may start a batch now."""
Ended: TypeAlias = tuple[Batch, Sequence[InferenceResponse | None], Batch]
"""Finished requests, the response to each, and the requests of the batch that this execution does not answer: those
that run again, and those that only filled a slot."""


class InstancePicker(Protocol):
    """Holds the waiting requests of one model, tracks its instances, and assigns batches to instances.

    The owner offers requests and reports changes of instances. It calls ``choose`` whenever the result may have
    changed, and ``expire`` and ``choose`` again at ``wake_at``.
    """

    timed: bool
    """Requests may expire while no instance is free."""
    settles: bool
    """Responses that come one by one have to pass through ``settle``."""

    @property
    def idle(self) -> Collection[ModelInstance]:
        """Instances that are up and execute nothing."""

    @property
    def ahead(self) -> bool:
        """Whether a batch may go to an instance that is not idle."""

    @property
    def size(self) -> int:
        """Number of requests that wait."""

    @property
    def waiting(self) -> Mapping[int, int]:
        """Number of requests that wait, by priority."""

    @property
    def releases(self) -> Mapping[BatchReason, int]:
        """Number of batches by the reason for their release; empty if the model does not gather requests."""

    def renewed(self) -> InstancePicker:
        """Return an empty picker with the same rules and no instances."""

    def alone(self, batch: Batch, index: int) -> Batch:
        """Return a batch that runs one request of ``batch``, which ``choose`` returned, without the others."""

    def offer(self, request: InferenceRequest, now: int) -> NeriteError | None:
        """Queue ``request``, or return why it is refused."""

    def displace(self, request: InferenceRequest) -> InferenceRequest | None:
        """Return the request to reject when too many wait: ``request``, or a less important one, which is dropped here.

        None if ``request`` has to be admitted all the same, because it continues a sequence.
        """

    def choose(self, now: int) -> tuple[ModelInstance, Batch] | None:
        """Return an instance and the batch to start on it now; None if nothing should start."""

    def ended(
        self, instance: ModelInstance, batch: Batch, responses: Sequence[InferenceResponse | None], took_ns: int
    ) -> Ended:
        """Record that ``instance`` has finished a batch."""

    def settle(self, request: InferenceRequest, response: InferenceResponse) -> InferenceResponse | None:
        """Record one of several responses to a request; return the response for its caller, None if it has no caller.

        The caller does not get a response that is ``empty`` and not the last.
        """

    def add_instance(self, instance: ModelInstance) -> None:
        """Add ``instance``, which is up and idle."""

    def remove_instance(self, instance: ModelInstance) -> Sequence[Refusal]:
        """Remove ``instance``, which went down or was removed; return the requests that only it could have run."""

    def retire(self, instance: ModelInstance) -> None:
        """Start nothing new on ``instance``, which is to be removed."""

    def holds(self, instance: ModelInstance) -> bool:
        """Return whether an instance that is to be removed is still needed for something that it has begun."""

    def resume(self, request: InferenceRequest) -> None:
        """Resume ``request``, whose caller had paused its responses."""

    def server_stops(self) -> None:
        """Prepare for shutdown: few more requests come, and ``expire`` returns those that wait for more of them."""

    def finish(self) -> None:
        """Prepare for the end: no more requests come, and nothing need be kept for any."""

    def wake_at(self) -> int | None:
        """Return when to call ``expire`` and ``choose`` again if nothing happens before; None for never.

        Called after ``choose``.
        """

    def expire(self, now: int) -> Sequence[Refusal]:
        """Drop and return the requests that have waited too long."""

    def withdraw(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Drop ``request``, whose caller has given up; return all requests that no longer wait for that reason.

        ``request`` is not among them if it runs.
        """

    def drain(self) -> list[InferenceRequest]:
        """Drop and return all waiting requests."""


class SelectivePicker(InstancePicker, Protocol):
    """An instance picker whose caller can restrict which instances may start."""

    def renewed(self) -> SelectivePicker:
        """Return an empty picker with the same rules and no instances."""

    def choose(self, now: int, may: May | None = None) -> tuple[ModelInstance, Batch] | None:
        """Return an instance and the batch to start on it now; None if nothing should start.

        ``may`` is called for each idle instance that could start a batch, until it returns True for one.
        """


# The server as code inside it sees it: steps of ensembles, and models that call other models.


class VersionHandle(ServedVersion, Protocol):
    """A loaded version of a model, as ensembles and calling models see it."""

    name: str
    version: int
    statistics: VersionStatistics
    traced: bool
    """Every request to it is traced."""
    routed: bool
    """A route decides which version answers requests that name none."""
    fusible: bool
    """Steps of ensembles that run it may be fused: nothing but its queue is between a request and an instance."""

    @property
    def max_rows(self) -> int:
        """Maximum number of rows in a batch; 0: each request runs alone."""

    def ask_ready(self, answered: Callable[[bool], None], patience: float) -> None:
        """Report to ``answered`` whether all its instances can serve, after ``patience`` seconds at the latest."""

    @property
    def instances(self) -> Collection[object]:
        """Its instances."""

    def followed(self, requests: Sequence[InferenceRequest], rows: int, timings: ExecutionTimes) -> None:
        """Count a batch that followed another model in the same worker, without queueing."""


class ServerEntry(Protocol):
    """Operations of the server that are available from within. For the loop's thread only."""

    def infer(self, request: InferenceRequest, decoupled: str) -> None:
        """Answer a request through ``request.respond``: always, and exactly once with ``final``.

        ``decoupled`` is the text with which a decoupled model is refused; empty if several responses are accepted.
        """

    def find(self, model: str, version: str, decoupled: str, namespace: str = "") -> VersionHandle:
        """Return the version that serves a model; an empty ``version`` is the latest. Raises Triton's refusals.

        ``namespace`` is the repository of the model; if empty, the model is found by its name alone.
        """

    def ask_model_ready(self, model: str, version: str, answered: Callable[[bool], None]) -> None:
        """Report whether a model can serve: False if it does not exist. Raises Triton's refusals of the version."""

    async def load(self, model: str, parameters: Mapping[str, str | bytes]) -> None:
        """Load or reload a model on request. Raises ``NeriteError``."""

    async def unload(self, model: str, parameters: Mapping[str, Any]) -> None:
        """Unload a model on request. Raises ``NeriteError``."""
