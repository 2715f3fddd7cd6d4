"""Where the requests to a version go: to its instances, or to the models that it is put together from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from nerite.cache.frontend import RequestQueueInterface
from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest, ServedVersion
from nerite.core.response import InferenceResponse
from nerite.instances.instance import Batch, ModelInstance
from nerite.observability.statistics import VersionStatistics
from nerite.scheduling.decider import BatchReason


class VersionScheduler(RequestQueueInterface, Protocol):
    """One for a model version. For the loop's thread only."""

    sound: bool
    """The last audit found nothing to restore."""

    def audit(self) -> list[str]:
        """Compare what was handed out with what came back, restore what differs, and return what that was."""

    @property
    def waiting(self) -> Mapping[int, int]:
        """How many requests wait for an instance, by priority."""

    @property
    def releases(self) -> Mapping[BatchReason, int]:
        """How many batches began for which reason; empty where no request waits for others."""

    def tell_witnesses(self) -> None:
        """Tell sinks that are a ``Witness`` how their requests ran, from now on. Until then nobody looks for any."""

    def server_stops(self) -> None:
        """Take note that the server stops: finish what is there, and refuse what cannot be."""

    def waits_for(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Return the requests to other models that have to be answered before ``request``, which is here, can be."""

    def begun(self, request: InferenceRequest) -> bool:
        """Return whether an instance has ``request``, which is here: it cannot be answered without that any more."""


# Which instance runs which batch now: one decision, and who makes it for a model.

Refusal: TypeAlias = tuple[InferenceRequest, NeriteError]
"""A request that waited, and why it waits no more."""
May: TypeAlias = Callable[[ModelInstance], bool]
"""Says whether an instance may begin a batch now."""
Ended: TypeAlias = tuple[Batch, Sequence[InferenceResponse | None], Batch]
"""Requests that have come to their end, the answer to each, and those that ran with them and get none from this run:
because they run once more, or because they stood in the batch for nobody."""


class InstancePicker(Protocol):
    """Holds the requests that wait for one model, knows its instances, and brings both together.

    Whoever owns it offers requests and reports what happens to instances; it asks ``choose`` whenever that may have
    changed the answer, and calls ``expire`` and ``choose`` again at ``wake_at``.
    """

    timed: bool
    """Something may expire while no instance is free."""
    settles: bool
    """Callers get what ``settle`` makes of responses that come one by one."""

    @property
    def idle(self) -> Collection[ModelInstance]:
        """The instances that are up and run nothing."""

    @property
    def ahead(self) -> bool:
        """Whether a batch may go to an instance that is not idle."""

    @property
    def size(self) -> int:
        """Requests that wait."""

    @property
    def waiting(self) -> Mapping[int, int]:
        """How many requests wait, by priority."""

    @property
    def releases(self) -> Mapping[BatchReason, int]:
        """How many batches began for which reason; empty where no request waits for others."""

    def renewed(self) -> InstancePicker:
        """Return an empty one with the same rules, which knows no instances."""

    def alone(self, batch: Batch, index: int) -> Batch:
        """Return a batch in which one request of ``batch``, which ``choose`` returned, runs without the others."""

    def offer(self, request: InferenceRequest, now: int) -> NeriteError | None:
        """Let ``request`` wait, or return why it is refused."""

    def give_way(self, request: InferenceRequest) -> InferenceRequest | None:
        """Return who is refused because too many wait: ``request``, or another that matters less and is dropped here.

        None if ``request`` has to be let in all the same, because it goes on with something.
        """

    def choose(self, now: int) -> tuple[ModelInstance, Batch] | None:
        """Return an instance and the batch that it is given now; None if nothing should start."""

    def ended(
        self, instance: ModelInstance, batch: Batch, responses: Sequence[InferenceResponse | None], took_ns: int
    ) -> Ended:
        """Note that ``instance`` has finished a batch."""

    def settle(self, request: InferenceRequest, response: InferenceResponse) -> InferenceResponse | None:
        """Take note of one of several responses to a request; return what its caller gets of it, None if it has none.

        What is ``empty`` and not the last, the caller does not get.
        """

    def came(self, instance: ModelInstance) -> None:
        """Note that ``instance`` is there, up and idle."""

    def gone(self, instance: ModelInstance) -> Sequence[Refusal]:
        """Note that ``instance`` went down or left, and return the requests that only it could have run."""

    def retire(self, instance: ModelInstance) -> None:
        """Begin nothing new with ``instance``, which is to leave."""

    def holds(self, instance: ModelInstance) -> bool:
        """Return whether an instance that is to leave is needed still, for something that it has begun."""

    def resume(self, request: InferenceRequest) -> None:
        """Take note that the caller of ``request``, of which responses have left, wants more again."""

    def server_stops(self) -> None:
        """Take note that few requests come yet: what waits for others in vain is for ``expire``."""

    def finish(self) -> None:
        """Take note that no more requests come: nothing need be kept for any."""

    def wake_at(self) -> int | None:
        """Return when to call ``expire`` and ``choose`` again if nothing else happens before; None for never.

        ``choose`` was asked last.
        """

    def expire(self, now: int) -> Sequence[Refusal]:
        """Drop and return the requests that waited too long."""

    def withdraw(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Take note that the caller of ``request`` gave up; return all that waits no more for that reason.

        ``request`` is not among it if it runs.
        """

    def drain(self) -> list[InferenceRequest]:
        """Drop and return everything that waits, because nobody will ever take it."""


class SelectivePicker(InstancePicker, Protocol):
    """A roster that lets somebody else say which instances may begin."""

    def renewed(self) -> SelectivePicker:
        """Return an empty one with the same rules, which knows no instances."""

    def choose(self, now: int, may: May | None = None) -> tuple[ModelInstance, Batch] | None:
        """Return an instance and the batch that it is given now; None if nothing should start.

        ``may`` is asked of idle instances that there is a batch for, one after the other, until one may begin.
        """


# The server as those see it who run inside: steps of an ensemble, and models that call other models.


class VersionHandle(ServedVersion, Protocol):
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
    def instances(self) -> Collection[object]:
        """Its instances."""


class ServerEntry(Protocol):
    """What may be asked of the server from within. For the loop's thread only."""

    def infer(self, request: InferenceRequest, decoupled: str) -> None:
        """Answer a request through ``request.respond``: always, and with ``final`` once.

        ``decoupled`` is the refusal of a model that may have several answers; empty if those are taken.
        """

    def find(self, model: str, version: str, decoupled: str, namespace: str = "") -> VersionHandle:
        """Return where a request for a model goes; an empty version is the latest. Raises Triton's refusals.

        ``namespace`` is the repository that it is of; without one the name has to do.
        """

    def ask_model_ready(self, model: str, version: str, answered: Callable[[bool], None]) -> None:
        """Tell whether one model can be served: not if there is none. Raises Triton's refusals of the version."""

    async def load(self, model: str, parameters: Mapping[str, str | bytes]) -> None:
        """Load or reload a model by hand. Raises ``NeriteError``."""

    async def unload(self, model: str, parameters: Mapping[str, Any]) -> None:
        """Unload a model by hand. Raises ``NeriteError``."""
