"""Entry of inference requests: resolves the version that a request goes to, validates its header, and submits it.

Shared by the server and by front processes, which hand requests on to it. Routes and the outcome of validation are
memoized on the header, so a header that repeats costs a comparison. Not thread-safe: for the loop's thread only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Final, Generic, TypeAlias, TypeVar, cast

from nerite.core.errors import NeriteError, NotFound, NotLoaded, Unsupported
from nerite.core.failures import report
from nerite.core.model_calls import ChildRequest
from nerite.core.request import (
    WRITTEN,
    Assignment,
    CancelReason,
    InferenceRequest,
    ReplySink,
    RequestHeader,
    RequestRoute,
    SharedMemoryInput,
    SharedMemoryRequest,
    owner_of,
)
from nerite.core.response import InferenceResponse
from nerite.core.servable_version import ServableVersion
from nerite.core.signature import Signature, shape_text
from nerite.core.tensor import ALIGNMENT, Buffer, DeviceBuffer
from nerite.observability.log import log, log_fields
from nerite.regions import SharedMemoryRegions
from nerite.repository import refusals
from nerite.repository.load_waits import LoadWaits
from nerite.routes.split import RouteSplit
from nerite.routes.table import RouteState, RouteTable
from nerite.scheduling.weighted_route import RouteArm, WeightedRoute
from nerite.workers.helper_pool import HelperPool
from nerite.workers.ipc.shared_memory import MIN_SIZE

_NOT_OVER_HTTP = "HTTP end point doesn't support models with decoupled transaction policy"


Version = TypeVar("Version", bound=ServableVersion, covariant=True)


def _log_request(request: InferenceRequest, version: str) -> None:
    """Log a request in Triton's words, without addresses of memory."""
    header = request.header
    flags = int(header.sequence_start) | int(header.sequence_end) << 1
    inputs = [
        f"input: {each.name}, type: {each.datatype.name}, shape: {shape_text(each.shape)}" for each in header.inputs
    ]
    log.verbose(
        1,
        f"{request.label}prepared: request id: {request.id}, model: {header.model_name}, requested version: "
        f"{header.model_version or -1}, actual version: {version}, flags: {flags:#x}, correlation id: "
        f"{header.sequence_id}, priority: {header.priority}, timeout (us): {header.timeout_us}\n" + "\n".join(inputs),
        **log_fields(request.id),
    )


def _check_responses(version: ServableVersion | RouteSplit, decoupled: str) -> None:
    """Raise ``Unsupported`` with this text if any request may get several responses; accept them if it is empty."""
    if decoupled and version.decoupled and not version.stream_input:
        raise Unsupported(decoupled)


def _stream_at(version: ServableVersion | RouteSplit, header: RequestHeader) -> int | None:
    """Return the place of the input with which a request asks for several responses."""
    if not version.decoupled or not (name := version.stream_input):
        return None
    return next((at for at, spec in enumerate(header.inputs) if spec.name == name), None)


def _is_set(flag: Buffer | DeviceBuffer) -> bool:
    """Return whether a tensor of one BOOL is true. On a GPU none is: no model that is asked takes it there."""
    return not isinstance(flag, DeviceBuffer) and bytes(flag[:1]) not in (b"", b"\0")


def _nothing(*_: object) -> None:
    """Do nothing: no request waits."""


def refusal_of(error: Exception, request: InferenceRequest) -> NeriteError:
    """Return the error that answers a request that could not be submitted; report an unexpected exception."""
    if isinstance(error, NeriteError):
        return error.without_frames()
    return report("admission", error, f"of a request to model '{request.header.model_name}'", request.id)


class _AwaitedVersion:
    """Stands for a version while a request waits for its load, which ends by itself."""

    label = ""

    def submit(self, request: InferenceRequest) -> None:
        raise AssertionError("its epoch is never the current one")

    def given_up(self, why: CancelReason) -> None:
        """Count nothing: no version had the request."""

    def traced_one(self, whole_ns: int, trace_id: int, at: int) -> None:
        """Record nothing."""

    def waits_for(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Return nothing: no other request has to be answered first."""
        return ()

    def begun(self, request: InferenceRequest) -> bool:
        """Return False: the request can still be refused."""
        return False


_AWAITED: Final = _AwaitedVersion()


class InferenceEntry(ABC, Generic[Version]):
    """Accepts requests for the models that ``_running`` finds."""

    def __init__(
        self,
        regions: SharedMemoryRegions,
        helpers: HelperPool | None,
        routes: RouteTable,
        waits: LoadWaits,
        *,
        owns_routes: bool,
    ) -> None:
        """Without ``helpers`` large JSON cannot be read. ``owns_routes``: the table is not a replica."""
        self._owns_routes = owns_routes
        self.waits = waits
        """Requests that wait until their model is loaded."""
        self.regions = regions
        """Shared memory regions of clients."""
        self.routes = routes
        """Weighted routes."""
        self._epoch = object()
        self._splits: dict[tuple[str, str], RouteSplit] = {}
        """Routes that were used in this epoch, by name and namespace."""
        self._coin = Random()
        self._stopping = False
        """New requests are rejected."""
        self._helpers = helpers

    @property
    def helpers(self) -> HelperPool:
        """Pool of helper processes for calls that would block the event loop."""
        assert self._helpers is not None
        return self._helpers

    @abstractmethod
    def _running(self, model: str, version: str, namespace: str) -> Version:
        """Return the version that a request goes to. Raises Triton's errors."""

    @abstractmethod
    def running_versions(self) -> Iterable[Version]:
        """Return all versions that take requests, by the names of their models."""

    @abstractmethod
    def version_directory(self, running: ServableVersion) -> Path | None:
        """Return the directory of a version's files, or None if it no longer has one."""

    @property
    @abstractmethod
    def loadable(self) -> Mapping[str, str]:
        """The models of language that are not loaded and that a request would have loaded, and what each does."""

    def renew_routes(self) -> None:
        """Invalidate the routes of all headers, because a version was loaded or unloaded, or a weight changed."""
        self._epoch = object()
        self._splits.clear()

    def offer_loaded(self) -> None:
        """Let the requests go on that have waited for a model which is loaded now."""
        if self.waits:
            self.waits.offer(self._is_loaded)

    def _is_loaded(self, model: str) -> bool:
        try:
            self._running(model, "", "")
        except NotLoaded:
            return False
        except NeriteError:  # whoever waits is told why
            return True
        return True

    def infer(self, request: InferenceRequest, decoupled: str = _NOT_OVER_HTTP) -> None:
        """Answer a request through ``request.respond``; guarantees exactly one final response.

        ``decoupled`` is the error text for a model that may send several responses.
        """
        route = request.header.route
        if route is None or route.epoch is not self._epoch:
            try:
                route = self._resolve(request, decoupled)
            except NotLoaded as absent:
                request.header.route = RequestRoute(None, _AWAITED)
                self.waits.hold_request(absent.without_frames(), request, partial(self.infer, request, decoupled))
                return
            except Exception as error:
                request.respond(InferenceResponse.failed(refusal_of(error, request)))
                return
        if decoupled and route.stream_at is not None and _is_set(request.data[route.stream_at]):
            request.respond(InferenceResponse.failed(Unsupported(decoupled)))
            return
        if log.verbose_level:
            _log_request(request, route.version.label)
        try:
            route.version.submit(request)
        except Exception as error:
            request.respond(InferenceResponse.failed(refusal_of(error, request)))

    def request(
        self,
        header: RequestHeader,
        data: Sequence[Buffer | SharedMemoryInput],
        sink: ReplySink,
        arrived_ns: int,
        request_id: str,
    ) -> InferenceRequest:
        """Create a request; ``data`` has a location instead of bytes for each input in shared memory.

        Raises Triton's errors for invalid locations.
        """
        if not header.shared:
            return InferenceRequest(header, cast(Sequence[Buffer], data), sink, arrived_ns, request_id)

        def room(size: int) -> memoryview | None:
            if size < MIN_SIZE:
                return None
            return self.receive_buffer(header.model_name, header.model_version, size, 0)

        regions, owner = self.regions, owner_of(header.caller)
        inputs = [regions.read(each, room, owner) if isinstance(each, SharedMemoryInput) else each for each in data]
        request = SharedMemoryRequest(header, inputs, sink, arrived_ns, request_id)
        places = {output.name: output.place for output in header.outputs if output.place}
        destinations = {name: regions.output(place, owner) for name, place in places.items()}
        on_device = {name: each for name, each in destinations.items() if isinstance(each, DeviceBuffer)}
        request.places = {
            name: WRITTEN if isinstance(each, DeviceBuffer) else each for name, each in destinations.items()
        }
        if on_device:
            request.header = header.with_device_outputs(frozenset(on_device))
            request.sink = regions.outputs(sink, on_device)
        used = [each.region for each in (*data, *places.values()) if isinstance(each, SharedMemoryInput)]
        request.regions = regions.use(request, used)
        return request

    def version_of(self, request: InferenceRequest) -> Version:
        """Return the version for a request whose sink takes any number of responses. Raises ``NeriteError``."""
        route = request.header.route
        if route is None or route.epoch is not self._epoch:
            route = self._resolve(request)
        return cast(Version, route.version)

    def _resolve(self, request: InferenceRequest, decoupled: str = "") -> RequestRoute:
        header = request.header
        if self._stopping and not isinstance(request, ChildRequest):
            raise refusals.stopping()
        if self.routes and (split := self._split(header)) is not None:
            _check_responses(split, decoupled)
            route = header.route = RequestRoute(self._epoch, split, _stream_at(split, header))
            return route
        version = self.find(header.model_name, header.model_version, decoupled, header.namespace)
        version.signature.bind(header, request.id)
        route = header.route = RequestRoute(self._epoch, version, _stream_at(version, header))
        return route

    def _split(self, header: RequestHeader) -> RouteSplit | None:
        """Return the route that a request takes; None if it goes to a model, or to the version that it names."""
        if header.assignment is not None:
            name = header.assignment.route
        elif header.model_version:
            return None
        else:
            name = header.model_name
        return self.split(name, header.namespace)

    def split(self, name: str, namespace: str = "") -> RouteSplit | None:
        """Return the arms of a route that are ready; None if there is no route of that name.

        Raises ``Unavailable`` if none is ready.
        """
        split = self._splits.get((name, namespace))
        if split is None and (state := self.routes.state(name)) is not None:

            def find(model: str, version: str) -> Version:
                return self._running(model, version, namespace)

            split = RouteSplit(state, find, self._epoch, self._coin, owns=self._owns_routes)
            self._splits[name, namespace] = split
            for absent in split.absent:  # requests go to the other arms until these are loaded
                self.waits.hold(absent, None, 0, _nothing, _nothing)
        return split

    def split_or_rest(self, name: str, namespace: str = "") -> RouteSplit:
        """Return the arms of a route; if it was removed, the model that has its name, which requests go to since then.

        Raises ``NeriteError`` if nothing is ready.
        """
        split = self.split(name, namespace)
        if split is not None:
            return split
        version = self._running(name, "", namespace)
        rest = RouteState(WeightedRoute(name, (RouteArm(name, "", 1.0),)))
        return RouteSplit(rest, lambda *_: version, self._epoch, self._coin, owns=False)

    def assign(self, probe: InferenceRequest) -> tuple[Version, str, str, Assignment]:
        """Choose the arm of a call to a route before its requests are made.

        ``probe`` has what the key is made from. Return the version of the arm; and model, version and assignment that
        the headers of the requests have to have. Raises ``NeriteError``.
        """
        split = self.split(probe.header.model_name)
        if split is None:
            raise NotFound(f"Request for unknown model: '{probe.header.model_name}' has no route")
        version, model, number, assignment = split.assign(probe)
        return cast(Version, version), model, number, assignment

    def find(self, model: str, version: str, decoupled: str = _NOT_OVER_HTTP, namespace: str = "") -> Version:
        """Return the running version that a request goes to; an empty ``namespace`` searches all repositories.

        Raises Triton's errors. ``decoupled`` is the error text for a model that may send several responses to any
        request; empty if those are accepted.
        """
        running = self._running(model, version, namespace)
        _check_responses(running, decoupled)
        return running

    def signature(self, model: str, version: str) -> Signature:
        """Return the signature of the version that a request would go to. Raises Triton's errors."""
        return self._running(model, version, "").signature

    def signature_of(self, request: InferenceRequest) -> Signature:
        """Return the signature of the version that a request went to."""
        return self.went_to(request).signature

    def went_to(self, request: InferenceRequest) -> Version:
        """Return the version that a request was submitted to."""
        assert request.header.route is not None
        return cast(Version, request.header.route.version)

    def receive_buffer(self, model: str, version: str, size: int, data_at: int) -> memoryview | None:
        """Return memory for a large request that the model's instances can read without a copy, or None.

        ``data_at`` is the offset of the tensors in the request; they will be aligned.
        """
        try:
            running = self._running(model, version, "")
        except NeriteError:
            return None  # the complete request is rejected later, with the reason
        padding = -data_at % ALIGNMENT
        buffer = running.receive_buffer(size + padding)
        return None if buffer is None else buffer[padding:]


TransportEntry: TypeAlias = InferenceEntry[ServableVersion]
"""The entry that transports use."""
