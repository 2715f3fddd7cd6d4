"""An inference request, in two parts: a header that repeats from call to call, and the data that does not.

Clients send the same header again and again (same model, tensor names, types, shapes), so a header is an immutable
object that transports cache by its encoded bytes, and on which each layer leaves what it worked out once: the model
it resolves to, the outcome of validation, the bytes of a reply. A request proper is small: header, id, buffers, and
where the answer goes.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from nerite.core.byte_budget import Memo
from nerite.core.errors import InvalidArgument
from nerite.core.failures import Where, report
from nerite.core.tensor import Buffer, TensorSpec

if TYPE_CHECKING:
    from nerite.core.errors import NeriteError
    from nerite.core.response import InferenceResponse, Parameter

MAX_CORRELATION_ID = 128
"""Bytes of a correlation id that is text, as UTF-8: Triton says characters, and counts bytes."""


class SharedMemoryInput:
    """Where in a region of shared memory a tensor lies, or is to be written."""

    __slots__ = ("byte_size", "offset", "region")

    def __init__(self, region: str, offset: int, byte_size: int) -> None:
        self.region = region
        self.offset = offset
        self.byte_size = byte_size


class RequestedOutput:
    """One entry of the request's ``outputs``: which tensor, and how the caller wants it."""

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
        """HTTP only: as bytes behind the JSON, instead of in it."""
        self.base64 = base64
        """HTTP only: strings in the JSON are in base64."""
        self.classification = classification
        """More than zero: the top that many classes as strings, instead of the tensor."""
        self.place = place
        """Where in shared memory the caller wants it, None if it belongs into the answer."""


class ServedVersion(Protocol):
    """The loaded version of a model that a request goes to, as far as requests and those around them need it."""

    @property
    def label(self) -> str:
        """Its number, as text."""

    def submit(self, request: InferenceRequest) -> None:
        """Answer a request through its sink. Raises what no code foresaw."""

    def given_up(self, why: CancelReason) -> None:
        """Count a request that nobody waits for any more."""

    def traced_one(self, whole_ns: int, trace_id: int, at: int) -> None:
        """Note the trace of a request that was answered, ``at`` this time. On any thread."""

    def waits_for(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Return the calls to other models of which one must be answered before ``request``, which is here, can be."""

    def begun(self, request: InferenceRequest) -> bool:
        """Return whether an instance has ``request``, which is here."""


class RequestHeader:
    """Everything a request says but its id and its tensor bytes. Never changed after construction.

    ``route`` is the server's memo (see ``server.py``): where requests with this header go, as long as that is so.
    ``replies`` is the transport's: the encoded head of a reply, by response header. ``call`` is the backend's, if it
    has a use for one.
    """

    __slots__ = (
        "base64_by_default",
        "batch_key",
        "batch_size",
        "binary_by_default",
        "call",
        "caller",
        "classifies",
        "empty_final",
        "idempotency_key",
        "inputs",
        "model_name",
        "model_version",
        "outputs",
        "parameters",
        "priority",
        "replies",
        "route",
        "sequence_end",
        "sequence_id",
        "sequence_start",
        "shared",
        "sizes",
        "timeout_us",
        "wanted",
    )

    namespace = ""
    """The repository that the model is of. No client can say it: only the steps of ensembles do."""

    def __init__(
        self,
        model_name: str,
        model_version: str,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[RequestedOutput] = (),
        *,
        parameters: dict[str, Parameter] | None = None,
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
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        """As the caller wrote it; empty for whatever version the policy serves."""
        self.inputs = tuple(inputs)
        self.sizes = [spec.byte_size for spec in inputs]
        """What the data of each input must measure; -1 where only the data tells."""
        self.outputs = tuple(outputs)
        """Empty means: every output of the model."""
        self.wanted = frozenset(output.name for output in outputs)
        """The names of ``outputs``."""
        self.classifies = any(output.classification for output in outputs)
        self.parameters = parameters or {}
        """Custom parameters; the ones with a meaning of their own are attributes."""
        self.priority = priority
        self.timeout_us = timeout_us
        self.sequence_id = sequence_id
        self.sequence_start = sequence_start
        self.sequence_end = sequence_end
        self.binary_by_default = binary_by_default
        """HTTP: send outputs that ``outputs`` does not list as bytes."""
        self.base64_by_default = base64_by_default
        """HTTP: write the strings of outputs that ``outputs`` does not list in base64."""
        self.empty_final = empty_final
        """gRPC streams: send the last response of a decoupled model even if it says only that it is the last."""
        self.shared = shared or any(output.place for output in outputs)
        """Some tensors are in shared memory: ``shared`` says so of inputs."""
        self.caller = caller
        """Who asks, for whoever lets requests in; None where nobody wants to know."""
        self.idempotency_key = idempotency_key
        """What the client names the request by, if it means to ask again; none of the model's business."""
        self.route: tuple[object, ServedVersion] | None = None
        self.call: Any = None
        self.replies: Memo[Any, Any] = Memo()
        self.batch_size = 1
        """Rows this request brings; set by validation, 1 for a model without a batch dimension."""
        self.batch_key: object = None
        """Two requests may share a batch only if these are equal; set by validation."""

    def changed(self, **values: Any) -> RequestHeader:
        """Return a header that says the same but for ``values``, and leads to the same place.

        They are none of which anything else was worked out, as it was of the tensors.
        """
        other = copy.copy(self)
        for name, value in values.items():
            setattr(other, name, value)
        return other

    def identity(self) -> tuple[object, ...]:
        """Return a hashable value that is equal for headers that say the same."""
        # Values by their ``repr``: Python calls 1, 1.0 and True equal, a model need not.
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
            self.priority,
            self.timeout_us,
            (repr(self.sequence_id), self.sequence_start, self.sequence_end),
            self.binary_by_default,
            self.base64_by_default,
            self.empty_final,
            self.shared,
            self.caller,
            self.idempotency_key,
        )


class ReplySink(Protocol):
    """Where answers go: a connection, a stream, a waiting caller.

    One that is a client's says in ``protocol`` how it speaks, ``HTTP`` or ``GRPC``, and may say in ``began_ns`` when
    the first of a request was here that did not come in one piece; in ``outer_span``, under which span of whose trace
    it was sent; and may tell by ``span_attributes`` of a request what is worth knowing of it. Traces look there.
    """

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Take one answer. Called on the loop's thread; in a worker, on any. ``final``: no other comes."""


class CancelReason(enum.Enum):
    """Why nobody waits for an answer any more."""

    CANCELLED = "cancelled"
    """Who asked said so: a client, or a model."""
    DISCONNECTED = "disconnected"
    """The connection of the client was lost, or closed."""
    TOO_LATE = "deadline"
    """The deadline of the request has passed."""


class _Nobody:
    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Drop an answer."""


NOBODY: Final = _Nobody()
"""The sink of a request that nobody sent."""


class InferenceRequest:
    """One call. Created by a transport, answered through ``respond``: the last time, and only then, with ``final``.

    Cancellation: ``cancel`` marks the request and tells whoever holds it (a queue, a worker). The holder then either
    answers ``Cancelled`` or, where work cannot be stopped, lets it finish; in both cases ``respond`` is called once.
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
    """Whether ``respond`` may be called from any thread, and with several responses."""
    caused = False
    """Whether another request causes it: somebody inside the server waits for it."""
    repeats = False
    """Whether another request of the same call has the same prompt, which is paid for once."""
    fused_segment: Any = None
    """Of a step of an ensemble: what may follow it at once, where its model lives with others."""

    def __init__(
        self, header: RequestHeader, data: Sequence[Buffer], sink: ReplySink, arrived_ns: int, id: str = ""
    ) -> None:
        self.header = header
        self.data = data
        """Wire form of each input, in the order of ``header.inputs``."""
        self.sink = sink
        self.arrived_ns = arrived_ns
        """``time.monotonic_ns`` when the request was complete."""
        self.id = id
        self.cancelled = False
        self.finished = False
        self.on_cancel: Callable[[InferenceRequest], None] | None = None
        """Set by whoever holds the request; called at most once, on the loop's thread."""
        self.on_pause: Callable[[InferenceRequest, bool], None] | None = None
        """Set by whoever can make the model wait between two responses."""
        self.queue: Any = None
        """The queue level that the request waits in, None when it waits in none."""
        self.queued_ns = arrived_ns
        """When it began to wait there."""

    def respond(self, response: InferenceResponse, final: bool = True) -> None:
        """Pass one answer to the caller. The only door out; ignored once a final answer has left.

        Never raises: where the sink fails, the request ends with an internal error, which the sink is given once.
        """
        if self.finished:
            return
        if final:
            self.finished = True
            self.on_cancel = self.on_pause = None
        try:
            self.sink.respond(self, response, final)
        except Exception as error:
            self._sink_failed(error, response)

    def _sink_failed(self, error: Exception, response: InferenceResponse) -> None:
        """End the request after its sink has failed to take ``response``."""
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
        """Say that nobody waits for the answer any more. Idempotent; does nothing to a finished request."""
        if self.cancelled or self.finished:
            return
        self.cancelled = True
        if self.header.route is not None:
            self.header.route[1].given_up(why)
        if self.on_cancel is not None:
            try:
                self.on_cancel(self)
            except Exception as error:
                self._report("cancel", error)

    def pause(self, paused: bool) -> None:
        """Say that no more responses are wanted for now, or that they are again."""
        if self.on_pause is not None:
            try:
                self.on_pause(self, paused)
            except Exception as error:
                self._report("cancel", error)

    def _report(self, where: Where, error: Exception) -> NeriteError:
        return report(where, error, f"of a request to model '{self.header.model_name}'", self.id)

    def is_cancelled(self) -> bool:
        """Return whether nobody waits for the answer any more. For models, which may ask at any time."""
        return self.cancelled

    @property
    def origin(self) -> InferenceRequest:
        """The request as whoever waits for it knows it."""
        return self

    @property
    def label(self) -> str:
        """The prefix of Triton's input errors."""
        return f"[request id: {self.id or '<id_unknown>'}] "


class OutputDestination(Protocol):
    """Memory of a client's that an output is to be written to."""

    size: int

    def write(self, data: Buffer) -> None:
        """Write ``data``, of at most ``size`` bytes. Raises ``NeriteError`` if that is not possible any more."""


class SharedMemoryRequest(InferenceRequest):
    """A request some of whose outputs are to be written to shared memory."""

    __slots__ = ("__weakref__", "places")

    places: dict[str, OutputDestination]
    """Where outputs are to be written, by name."""


class RepeatedRequest(InferenceRequest):
    """A request for one more answer to the prompt of another."""

    __slots__ = ()

    repeats = True


def with_request_id(error: NeriteError, request_id: str) -> NeriteError:
    """Return ``error`` with Triton's ``[request id: …]`` in front, for the errors that carry it."""
    return error.prefixed(f"[request id: {request_id or '<id_unknown>'}] ")


# Who sends a request, for admission control and the caches. Models do not see it.


class Caller(NamedTuple):
    """What the head of a request says of who sent it. There is one only where a policy is in force."""

    tenant: str
    """By the name that the policy has for them."""
    wanted_class: str = ""
    """Empty: that of the tenant."""
    patience_ns: int = 0
    """From the request's arrival on; after that nobody waits for the answer. 0: for ever."""
    retry: bool = False
    """It was asked before."""


MIXED: Final = Caller("")
"""Of a request that is for several tenants at once, or for one that cannot be told: no cache keeps anything of it."""

# What a client names a request by, so that asking once more is not asking for more.

NAME: Final = "idempotency-key"
"""Of the header, of the metadata, and of the parameter of a request that stands in place of them."""
_MOST: Final = 255


class IdempotencyKey(NamedTuple):
    """The key that came with a request. Where a client asks for several things at once, each is a part of it."""

    text: str
    part: int = 0
    parts: int = 1

    def checked(self) -> IdempotencyKey:
        """Return the key as it is compared: with or without quotes it is the same. Raises ``InvalidArgument``."""
        text: Any = self.text
        if isinstance(text, str) and len(text) > 1 and text[0] == text[-1] == '"':  # as the RFC's drafts write it
            text = text[1:-1]
        if not isinstance(text, str) or not 0 < len(text) <= _MOST:
            raise InvalidArgument(f"'{NAME}' has to be a text of 1 to {_MOST} characters, such as a UUID")
        return self._replace(text=text)


# The requests that the running code is about: for whoever writes a line while one is executed.
#
# A context variable, so that coroutines which a model starts keep theirs while other batches run.

at_hand: Final[ContextVar[Sequence[InferenceRequest]]] = ContextVar("at_hand", default=())
"""Set while a batch is executed."""
_AT_HAND_MOST: Final = 8
"""Ids that are told of a batch."""


def request_ids_of(requests: Iterable[InferenceRequest]) -> str:
    """Return the ids of requests as one text, some of them if there are many; nothing if none has one."""
    ids = [request.id for request in requests if request.id]
    return ", ".join([*ids[:_AT_HAND_MOST], "…"] if len(ids) > _AT_HAND_MOST else ids)


def current_request_ids() -> str:
    """Return the ids of the requests that the running code is about."""
    return request_ids_of(at_hand.get())
