"""Inference requests in two parts: a header that repeats from call to call, and the data that does not.

Clients send the same header again and again (same model, tensor names, types, shapes), so a header is an immutable,
interned object: transports look it up by its encoded bytes, and each layer memoizes its own results on it, such as the
resolved model, the outcome of validation, and the encoded reply. The request itself is small: header, id, buffers and
the sink of the response.
"""

from __future__ import annotations

import copy
import enum
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, cast

from nerite.core.byte_budget import Memo
from nerite.core.errors import InvalidArgument
from nerite.core.failures import Where, report
from nerite.core.tensor import DeviceBuffer

if TYPE_CHECKING:
    from nerite.core.errors import NeriteError
    from nerite.core.response import InferenceResponse, Parameter, ResponseHeader
    from nerite.core.tensor import Buffer, TensorData, TensorSpec

MAX_CORRELATION_ID = 128
"""UTF-8 bytes of a correlation id that is text: Triton documents characters, but counts bytes."""
EVERYBODY: Final = "default"
"""Name of the tenant for all callers without a tenant of their own. They share one account."""
SequenceKey: TypeAlias = "int | str | tuple[str, int | str]"
"""Names a sequence within a model: its correlation id, with the tenant if that is not everybody."""


class SharedMemoryInput:
    """Location in a shared memory region that a tensor is read from or written to."""

    __slots__ = ("byte_size", "offset", "region")

    def __init__(self, region: str, offset: int, byte_size: int) -> None:
        self.region = region
        self.offset = offset
        self.byte_size = byte_size


class RequestedOutput:
    """One entry of the request's ``outputs``: a tensor, and the form in which the caller wants it."""

    __slots__ = ("base64", "binary", "classification", "name", "place")

    def __init__(
        self,
        name: str,
        *,
        binary: bool = False,
        base64: bool = False,
        classification: int = 0,
        place: SharedMemoryInput | None = None,
    ) -> None:
        self.name = name
        self.binary = binary
        """HTTP only: send the tensor as bytes after the JSON instead of in it."""
        self.base64 = base64
        """HTTP only: encode strings in the JSON as base64."""
        self.classification = classification
        """If positive, return this many top classes as strings instead of the tensor."""
        self.place = place
        """Shared memory location to write the output to; None to return it in the response."""


class ServedVersion(Protocol):
    """The loaded model version that a request goes to, as far as this package needs it."""

    @property
    def label(self) -> str:
        """The version number as text."""

    def submit(self, request: InferenceRequest) -> None:
        """Answer a request through its sink. Raises only unforeseen exceptions."""

    def given_up(self, why: CancelReason) -> None:
        """Count a request whose caller no longer waits."""

    def traced_one(self, whole_ns: int, trace_id: int, at: int) -> None:
        """Record the trace of a request answered at time ``at``. Thread-safe."""

    def waits_for(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Return the calls to other models, one of which must be answered before ``request`` can make progress.

        The request is one that this version holds.
        """

    def begun(self, request: InferenceRequest) -> bool:
        """Return whether an instance has started ``request``, which this version holds."""


class Assignment(NamedTuple):
    """The arm of a route that a request was assigned to first."""

    route: str
    arm: str
    """Label of the arm."""
    candidate: bool
    """The arm is the one that a rollout compares with the others."""
    probability: float
    """Probability with which the candidate was chosen."""
    cluster: int = 0
    """Hash of the sticky key; 0 without one, and where the key is in the data."""


class RequestRoute(NamedTuple):
    """The version that a request goes to."""

    epoch: object
    """The route is valid while the server has this epoch: it changes with the set of loaded versions."""
    version: ServedVersion
    stream_at: int | None = None
    """Place of the input with which the request asks for several responses; None if it cannot or does not."""


class RequestHeader:
    """Everything in a request except its id and tensor bytes. Immutable apart from its memos.

    Each memo has one owner, which alone sets it: ``route`` the server, ``batch_size`` and ``batch_key`` the signature
    that validates the header, ``call`` the backend, and ``replies`` the transport.
    """

    __slots__ = (
        "_variant",
        "assignment",
        "base64_by_default",
        "batch_key",
        "batch_size",
        "binary_by_default",
        "call",
        "caller",
        "classifies",
        "device_outputs",
        "empty_final",
        "forwarded",
        "idempotency_key",
        "inputs",
        "model_name",
        "model_version",
        "outputs",
        "parameters",
        "preferred_device",
        "priority",
        "replies",
        "route",
        "sequence_end",
        "sequence_id",
        "sequence_key",
        "sequence_start",
        "shared",
        "sizes",
        "sticky_fields",
        "timeout_us",
        "wanted",
    )

    namespace = ""
    """Repository of the model. Only steps of ensembles set it; clients cannot."""

    def __init__(
        self,
        model_name: str,
        model_version: str,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[RequestedOutput] = (),
        *,
        parameters: dict[str, Parameter] | None = None,
        forwarded: Collection[str] = (),
        priority: int = 0,
        timeout_us: int = 0,
        sequence_id: int | str = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
        binary_by_default: bool = False,
        base64_by_default: bool = False,
        empty_final: bool = False,
        shared: bool = False,
        caller: Caller | None = None,
        idempotency_key: IdempotencyKey | None = None,
        sticky_fields: Mapping[str, str] | None = None,
        assignment: Assignment | None = None,
        device_outputs: frozenset[str] = frozenset(),
        preferred_device: int = -1,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        """Version as the caller wrote it; empty selects the version by the version policy."""
        self.inputs = tuple(inputs)
        self.sizes = [spec.byte_size for spec in inputs]
        """Required byte size of each input; -1 if it depends on the data."""
        self.outputs = tuple(outputs)
        """Requested outputs; empty requests all outputs of the model."""
        self.wanted = frozenset(output.name for output in outputs)
        """Names of ``outputs``."""
        self.classifies = any(output.classification for output in outputs)
        self.parameters = parameters or {}
        """Custom parameters; parameters with a defined meaning are attributes."""
        self.forwarded = forwarded
        """Names of parameters that the caller has not written for this model: header fields, those of an ensemble."""
        self.priority = priority
        self.timeout_us = timeout_us
        self.sequence_id = sequence_id
        self.sequence_start = sequence_start
        self.sequence_end = sequence_end
        self.binary_by_default = binary_by_default
        """HTTP: send outputs that ``outputs`` does not list as bytes."""
        self.base64_by_default = base64_by_default
        """HTTP: encode strings as base64 for outputs that ``outputs`` does not list."""
        self.empty_final = empty_final
        """gRPC streams: send the final response of a decoupled model even if it has no outputs."""
        self.shared = shared or any(output.place for output in outputs)
        """Some inputs (the parameter ``shared``) or outputs are in shared memory."""
        self.device_outputs = device_outputs
        """Outputs that may be answered in the memory of a GPU. Clients get them on the host."""
        self.preferred_device = preferred_device
        """The GPU on which a model wants all outputs of its call; -1 for the host."""
        self.caller = caller
        """Identity of the client for admission control; None if no policy is in force."""
        self.idempotency_key = idempotency_key
        """Key under which the client may retry the request. Models never see it."""
        self.sticky_fields = sticky_fields
        """Header fields that keep the client on an arm of a route. Models never see them."""
        self.assignment = assignment
        """The arm that the request was assigned to, if its model was named by a route."""
        self.route: RequestRoute | None = None
        self.batch_size = 1
        """Rows of this request; 1 for a model without a batch dimension."""
        self.batch_key: object = None
        """Two requests may share a batch only if their keys are equal."""
        self.call: object = None
        """What the backend has derived from the header."""
        self.replies: Memo[ResponseHeader, Any] = Memo()
        """Encoded heads of responses."""
        self.sequence_key = _sequence_key(caller, sequence_id)
        """Names the sequence: the ids of one tenant are not those of another."""
        self._variant: RequestHeader | None = None
        """The last one that ``with_device_outputs`` returned."""

    def changed(self, **values: Any) -> RequestHeader:
        """Return a copy with the attributes in ``values`` replaced, which keeps route and memos.

        Only attributes that no other attribute or memo was derived from may be replaced, which excludes the tensors.
        """
        other = copy.copy(self)
        for name, value in values.items():
            setattr(other, name, value)
        if "caller" in values:
            other.sequence_key = _sequence_key(other.caller, other.sequence_id)
        return other

    def takes_on_device(self, output: str) -> bool:
        """Return whether an output may be answered in the memory of a GPU."""
        return output in self.device_outputs or self.preferred_device >= 0

    def with_device_outputs(self, names: frozenset[str]) -> RequestHeader:
        """Return a header that differs in these outputs, which may be answered in the memory of a GPU."""
        variant = self._variant
        if variant is None or variant.device_outputs != names:
            variant = self._variant = self.changed(device_outputs=names)
        return variant

    def readdressed(self, model: str, version: str, assignment: Assignment | None) -> RequestHeader:
        """Return a copy for another model or version, without memos."""
        return self.changed(
            model_name=model,
            model_version=version,
            assignment=assignment,
            route=None,
            batch_size=1,
            batch_key=None,
            call=None,
            replies=Memo(),
        )

    def identity(self) -> tuple[object, ...]:
        """Return a hashable value that is equal for headers with equal content."""
        # Values by their ``repr``: in Python 1, 1.0 and True are equal, for a model they may differ.
        return (
            self.model_name,
            self.model_version,
            self.inputs,
            tuple(
                (output.name, output.binary, output.base64, output.classification)
                if output.place is None
                else (output.name, output.place.region, output.place.offset, output.place.byte_size)
                for output in self.outputs
            ),
            tuple(sorted((key, repr(value)) for key, value in self.parameters.items())),
            frozenset(self.forwarded),
            self.priority,
            self.timeout_us,
            (repr(self.sequence_id), self.sequence_start, self.sequence_end),
            self.binary_by_default,
            self.base64_by_default,
            self.empty_final,
            self.shared,
            self.caller,
            self.idempotency_key,
            tuple(self.sticky_fields.items()) if self.sticky_fields else None,
            self.device_outputs,
            self.preferred_device,
        )


def _sequence_key(caller: Caller | None, sequence_id: int | str) -> SequenceKey:
    if caller is None or caller.tenant == EVERYBODY:
        return sequence_id
    return caller.tenant, sequence_id


class ReplySink(Protocol):
    """Receives the responses of a request: a connection, a stream, a waiting caller.

    The sink of a client's request has attributes for traces: ``protocol`` (``HTTP`` or ``GRPC``); optionally
    ``began_ns``, when the first bytes of a request arrived that came in several pieces; ``outer_span``, the client's
    span that the request belongs under; and ``span_attributes``, which returns additional attributes of a request.
    """

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Take one response; ``final`` marks the last. Called on the loop's thread, in a worker on any thread."""


class CancelReason(enum.Enum):
    """Reason why the caller no longer waits for a response."""

    CANCELLED = "cancelled"
    """The client or calling model cancelled the request."""
    DISCONNECTED = "disconnected"
    """The connection of the client was lost or closed."""
    TOO_LATE = "deadline"
    """The deadline of the request has passed."""
    PREEMPTED = "preempted"
    """The request is of the idle class, and others wait."""


class _DiscardingSink:
    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Discard a response."""


NOBODY: Final = _DiscardingSink()
"""Sink that discards responses, for requests of the server itself."""


class InferenceRequest:
    """One inference call, created by a transport and answered through ``respond``; only the last call has ``final``.

    ``cancel`` marks the request and notifies its current holder (a queue, a worker). The holder then either answers
    ``Cancelled`` or, if the work cannot be stopped, lets it finish; in both cases ``respond`` is called once.
    """

    __slots__ = (
        "arrived_ns",
        "cancelled",
        "data",
        "finished",
        "header",
        "id",
        "on_cancel",
        "on_pause",
        "queue",
        "queued_ns",
        "sink",
    )

    streams = False
    """``respond`` may be called from any thread, and with several responses."""
    caused = False
    """Another request causes this one, so the server itself waits for it."""
    repeats = False
    """Another request of the same call has the same prompt, which quotas charge once."""
    shares_memory = False
    """Inputs or outputs are in shared memory of the client."""
    background = False
    """Nobody waits for the answer: no quota counts it, and a queue that is not empty need not take it."""

    def __init__(
        self, header: RequestHeader, data: Sequence[TensorData], sink: ReplySink, arrived_ns: int, id: str = ""
    ) -> None:
        self.header = header
        self.data = data
        """Wire format of each input, in the order of ``header.inputs``."""
        self.sink = sink
        self.arrived_ns = arrived_ns
        """``time.monotonic_ns`` when the request was complete."""
        self.id = id
        self.cancelled = False
        self.finished = False
        self.on_cancel: Callable[[InferenceRequest], None] | None = None
        """Set by the current holder of the request; called at most once, on the loop's thread."""
        self.on_pause: Callable[[InferenceRequest, bool], None] | None = None
        """Set by a holder that can make the model wait between two responses (backpressure)."""
        self.queue: object | None = None
        """What the request waits in, for that to recognise its own requests; None once it no longer waits."""
        self.queued_ns = arrived_ns
        """Time at which it was queued there."""

    def respond(self, response: InferenceResponse, final: bool = True) -> None:
        """Pass one response to the caller. All responses go through here; none is passed on after a final one.

        Never raises: if the sink fails, the request ends with an internal error, which the sink is given once.
        """
        if self.finished:
            return
        if final:
            self.finished = True
            self.on_cancel = self.on_pause = None
        try:
            self.sink.respond(self, response, final)
        except Exception as error:
            self.sink_failed(error, response)

    def sink_failed(self, error: Exception, response: InferenceResponse) -> None:
        """End the request after its sink raised on ``response``. Never raises."""
        failure = self._report("reply", error)
        if not self.finished:
            self.cancel()
            self.finished = True
            self.on_cancel = self.on_pause = None
        try:
            self.sink.respond(self, response.failed(failure), True)
        except Exception as again:
            self._report("reply", again)

    def cancel(self, why: CancelReason = CancelReason.CANCELLED) -> None:
        """Mark the request as cancelled and notify its holder. Idempotent; has no effect on a finished request."""
        if self.cancelled or self.finished:
            return
        self.cancelled = True
        if self.header.route is not None:
            self.header.route.version.given_up(why)
        if self.on_cancel is not None:
            try:
                self.on_cancel(self)
            except Exception as error:
                self._report("cancel", error)

    def pause(self, paused: bool) -> None:
        """Apply or release backpressure: ask the holder to withhold responses, or to resume them."""
        if self.on_pause is not None:
            try:
                self.on_pause(self, paused)
            except Exception as error:
                self._report("cancel", error)

    def _report(self, where: Where, error: Exception) -> NeriteError:
        return report(where, error, f"of a request to model '{self.header.model_name}'", self.id)

    def is_cancelled(self) -> bool:
        """Return whether the request was cancelled. For models, which may poll it at any time."""
        return self.cancelled

    @property
    def on_device(self) -> bool:
        """Whether an input is in the memory of a GPU."""
        return any(isinstance(each, DeviceBuffer) for each in self.data)

    @property
    def buffers(self) -> Sequence[Buffer]:
        """The data of a request that has none on a GPU: one to a version that takes none there."""
        return cast("Sequence[Buffer]", self.data)

    @property
    def origin(self) -> InferenceRequest:
        """The request as its caller created it; differs from ``self`` for wrappers."""
        return self

    @property
    def label(self) -> str:
        """Prefix of Triton's input errors."""
        return f"[request id: {self.id or '<id_unknown>'}] "


class OutputDestination(Protocol):
    """Client memory that an output is written to."""

    size: int

    def write(self, data: Buffer) -> None:
        """Write ``data``, of at most ``size`` bytes. Raises ``NeriteError`` if that is no longer possible."""


class _Written:
    """Destination of an output that is there already."""

    size = sys.maxsize

    def write(self, data: Buffer) -> None:
        """Do nothing."""


WRITTEN: Final = _Written()


class SharedMemoryRequest(InferenceRequest):
    """A request with inputs or outputs in shared memory of the client."""

    __slots__ = ("__weakref__", "places", "regions")

    shares_memory = True
    regions: Sequence[tuple[str, int]]
    """Names and numbers of the shared memory regions that it uses."""
    places: dict[str, OutputDestination]
    """Destinations of outputs in shared memory, by name."""


class RepeatedRequest(InferenceRequest):
    """A request for one more completion of another request's prompt."""

    __slots__ = ()

    repeats = True


def with_request_id(error: NeriteError, request_id: str) -> NeriteError:
    """Return ``error`` with Triton's ``[request id: …]`` in front, for the errors that have this prefix."""
    return error.prefixed(f"[request id: {request_id or '<id_unknown>'}] ")


class Caller(NamedTuple):
    """Identity of the client behind a request, as admission control and the caches see it. Models never see it.

    Read from the head of the request, and only if a policy is in force.
    """

    tenant: str
    """Name of the tenant in the policy."""
    wanted_class: str = ""
    """Requested class; empty for the tenant's own."""
    patience_ns: int = 0
    """Time from the request's arrival to its deadline. 0: no deadline."""
    retry: bool = False
    """The client marked the request as a retry."""
    trusted: bool = False
    """The id of the request is to be believed: a router with a key gave it, or the server itself."""
    paid: bool = False
    """Quotas were charged for an earlier attempt."""


def owner_of(caller: Caller | None) -> str:
    """Return whose a name is that a client has chosen: its tenant; empty for everybody's."""
    return "" if caller is None or caller.tenant == EVERYBODY else caller.tenant


MIXED: Final = Caller("")
"""Caller of a request on behalf of several tenants or of an unknown one: no cache stores anything of it."""

NAME: Final = "idempotency-key"
"""Name of the HTTP header, of the gRPC metadata, and of the request parameter that replaces them."""
_MAX_KEY: Final = 255
"""Characters of an idempotency key."""


class IdempotencyKey(NamedTuple):
    """Key under which a client may retry a request without a second execution.

    If a client's call consists of several requests, each is a numbered part of it.
    """

    text: str
    part: int = 0
    parts: int = 1

    def checked(self) -> IdempotencyKey:
        """Return the key in canonical form, without quotes. Raises ``InvalidArgument``."""
        text: Any = self.text
        if isinstance(text, str) and len(text) > 1 and text[0] == text[-1] == '"':  # quoted, as in the RFC drafts
            text = text[1:-1]
        if not isinstance(text, str) or not 0 < len(text) <= _MAX_KEY or not text.isprintable():
            raise InvalidArgument(f"'{NAME}' must be a string of 1 to {_MAX_KEY} printable characters, such as a UUID")
        return self._replace(text=text)


at_hand: Final[ContextVar[Sequence[InferenceRequest]]] = ContextVar("at_hand", default=())
"""Requests of the batch that the running code executes; log lines get their ids from here.

A context variable, so that coroutines which a model starts keep their requests while other batches run.
"""
_MAX_IDS: Final = 8
"""Ids of a batch that are listed."""


def request_ids_of(requests: Iterable[InferenceRequest]) -> str:
    """Return the ids of requests, separated by commas and truncated after ``_MAX_IDS``; empty if none has an id."""
    ids = [request.id for request in requests if request.id]
    return ", ".join([*ids[:_MAX_IDS], "…"] if len(ids) > _MAX_IDS else ids)


def current_request_ids() -> str:
    """Return the ids of the requests that the running code executes."""
    return request_ids_of(at_hand.get())
