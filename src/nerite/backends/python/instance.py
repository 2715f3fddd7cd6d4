"""Instance of a Python model: the object of its class, calls of its methods, and the responses it returns.

Also the event loop for ``async`` methods, rescheduled requests, and ``reshape``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import json
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final

from nerite.backends.configuration import Shape, TensorPort, all_outputs, batching, of_entry
from nerite.backends.interface import ExecutionTimes, InstanceContext, ModelContext
from nerite.backends.python.module import CAUSES, describe_failure, printable
from nerite.core import headers
from nerite.core.byte_budget import RESPONSE_HEADERS, Memo
from nerite.core.errors import BY_CODE, Internal, NeriteError
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse, Parameter, Reschedule, ResponseHeader
from nerite.core.signature import shape_text
from nerite.core.tensor import DeviceBuffer, TensorData, TensorSpec
from nerite.core.text import cut
from nerite.devices import exchange
from triton_python_backend_utils import TritonModelException
from triton_python_backend_utils.arguments import INT64, UINT64
from triton_python_backend_utils.errors import mistake_in_parameters
from triton_python_backend_utils.request import ServedRequest
from triton_python_backend_utils.response import InferenceResponse as ModelResponse
from triton_python_backend_utils.tensor import wire_form


class EventLoop:
    """Event loop of one instance, for models with ``async`` methods. Thread-safe.

    The loop runs in its own thread for the lifetime of the instance, so tasks and connection pools that a model starts
    continue between batches. Loop and thread are created lazily with the first coroutine.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        """Run ``coroutine`` and return its result, or raise its exception with only the coroutine's frames.

        Cancels it and raises ``TimeoutError`` if it takes longer than ``timeout`` seconds.
        """
        future = asyncio.run_coroutine_threadsafe(_settled(coroutine), self._started())
        try:
            value, error = future.result(timeout)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise
        if error is not None:
            raise error
        return value

    def start(self, coroutine: Coroutine[Any, Any, Any], ended: Callable[[Any, BaseException | None], None]) -> None:
        """Run ``coroutine`` concurrently; pass its result or exception to ``ended`` on the loop's thread."""

        async def run() -> None:
            ended(*await _settled(coroutine))

        asyncio.run_coroutine_threadsafe(run(), self._started())

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._work, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
        return self._loop

    def close(self) -> None:
        """Cancel running tasks and end the thread. Does nothing if the loop was never started."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop = None

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(RuntimeError):  # a task may have stopped the loop itself
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _settled(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    try:
        return await coroutine, None
    except BaseException as error:
        return None, error


NOT_ITERATIVE: Final = InferenceResponse.failed(
    Internal(
        "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to "
        "handle such a flag. Add to its configuration: sequence_batching { iterative_sequence: true }"
    )
)
"""The response to a request that a model reschedules without being allowed to."""


class Rescheduling:
    """Requests that a model reschedules with ``set_release_flags(TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)``.

    The model's sequences must be iterative. For such a request ``execute`` returns None, or a response that contains
    only states, which are kept for the next execution. (Triton allows only None: there a Python model cannot return
    states in this case.)
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """``config`` is in JSON form."""
        batching: Mapping[str, Any] = config.get("sequence_batching") or {}
        self.iterative = bool(batching.get("iterative_sequence"))
        """True if the model may reschedule requests."""
        self._states = frozenset(state["output_name"] for state in batching.get("state", ()))

    def wrong(self, response: object) -> str:
        """Return what is wrong with a response to a rescheduled request; empty if it is valid."""
        if response is None or self._only_states(response):
            return ""
        # The spelling is Triton's.
        return (
            "Expected a None object in the execute function return list for reschduled request, found type "
            f"'{type(response)}'. A response is allowed if it has no outputs but states of the sequence."
        )

    def outcome(
        self,
        request: InferenceRequest,
        response: ModelResponse | None,
        reply: Callable[[InferenceRequest, ModelResponse], InferenceResponse],
    ) -> InferenceResponse | None:
        """Return the result for a rescheduled request; None if the model has finished it through its sender."""
        if not self.iterative:
            return NOT_ITERATIVE
        if request.finished:
            return None
        if response is None:
            return Reschedule(None)
        states = reply(request, response)
        if states.error is not None:
            return states
        return Reschedule(states.header, states.data)

    def _only_states(self, response: object) -> bool:
        if not isinstance(response, ModelResponse) or response.has_error():
            return False
        return all(tensor.name() in self._states for tensor in response.output_tensors())


class ModelReshape:
    """Inputs and outputs with a ``reshape``: the model sees the shapes of ``reshape``, callers those of ``dims``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """``config`` is in JSON form."""
        self._inputs = _reshaped(config, "input")
        self._outputs = _reshaped(config, "output")

    def __bool__(self) -> bool:
        return bool(self._inputs or self._outputs)

    def inputs(self, header: RequestHeader) -> Sequence[TensorSpec]:
        """Return the inputs of a request in the model's shapes, memoized in the header."""
        specs = header.call
        if not isinstance(specs, tuple):
            specs = header.call = tuple(self._input(spec) for spec in header.inputs)
        return specs

    def _input(self, spec: TensorSpec) -> TensorSpec:
        port = self._inputs.get(spec.name)
        return spec if port is None else TensorSpec(spec.name, spec.datatype, port.to_model(spec.shape))

    def output(self, spec: TensorSpec) -> TensorSpec:
        """Return an output in the caller's shape. Raises ``Internal`` if its shape does not match ``reshape``."""
        port = self._outputs.get(spec.name)
        if port is None:
            return spec
        shape = spec.shape[1:] if port.batching else spec.shape
        if len(shape) != len(port.model_dims) or any(
            declared not in (-1, size) for size, declared in zip(shape, port.model_dims, strict=True)
        ):
            raise Internal(
                f"output '{spec.name}' has the shape {shape_text(spec.shape)}, but its 'reshape' in the configuration "
                f"is {shape_text(_with_batch(port.model_dims, port))}"
            )
        return TensorSpec(spec.name, spec.datatype, port.to_client(spec.shape))


def _reshaped(config: Mapping[str, Any], side: str) -> dict[str, TensorPort]:
    return {
        entry["name"]: of_entry(entry, batching=batching(config))
        for entry in config.get(side, ())
        if entry.get("reshape") is not None
    }


def _with_batch(dims: Shape, port: TensorPort) -> Shape:
    return (-1, *dims) if port.batching else dims


_INTEGERS = (INT64[0], UINT64[1])
"""Range of integers that HTTP and gRPC can transmit in a parameter of a response."""


class PythonReplies:
    """Builds the server's responses from those that one instance returns.

    Response headers are interned: responses with the same names, types and shapes have the same header object, so a
    transport encodes it once.
    """

    def __init__(
        self,
        model_name: str,
        model_version: str,
        declared_outputs: Sequence[str],
        failed: Callable[[str], NeriteError],
        *,
        decoupled: bool = False,
        reshape: ModelReshape | None = None,
    ) -> None:
        """``failed`` creates the error for a response that cannot be sent, given the reason."""
        self._failed = failed
        self.reshape = reshape
        self._model_name = model_name
        self._model_version = model_version
        self.declared = frozenset(declared_outputs)
        self.decoupled = decoupled
        self.again: set[ServedRequest] = set()
        self._headers: Memo[tuple[object, ...], ResponseHeader] = Memo()
        self._last_form: list[object] | None = None
        self._last_header: ResponseHeader

    def reply(self, request: InferenceRequest, returned: ModelResponse) -> InferenceResponse:
        """Return the response: the model's error, or the requested outputs in the model's order.

        Outputs that the configuration does not declare are omitted; type and shape are those of the model's tensor. A
        response that cannot be sent becomes an error.
        """
        try:
            if returned._error is not None:
                error = returned._error
                return InferenceResponse.failed(BY_CODE[error.code().name](printable(cut(error.message()))))
            wanted = request.header.wanted or self.declared
            form: list[object] = []
            data: list[TensorData] = []
            for tensor in returned._tensors:
                name = tensor._name
                if name in wanted:
                    form += (name, tensor._datatype, tensor._shape)
                    output = wire_form(tensor)
                    data.append(_device_output(request, name, output) if type(output) is DeviceBuffer else output)
            if returned._parameters:
                mistake = mistake_in_parameters(returned._parameters, _INTEGERS)
                if mistake is not None:
                    return InferenceResponse.failed(self._failed(f"The response cannot be sent. {mistake}"))
                return InferenceResponse(self._new_header(form, returned._parameters), data)
            # Usually equal to that of the last reply, and comparing is cheaper than a lookup.
            if form != self._last_form:
                self._last_header = self._header(tuple(form))
                self._last_form = form
            return InferenceResponse(self._last_header, data)
        except Exception as error:  # a subclass defined by the model may raise anything
            return InferenceResponse.failed(self._failed(f"The response cannot be sent. {describe_failure(error)}"))

    def _header(self, form: tuple[object, ...]) -> ResponseHeader:
        """Return the interned header for outputs of this form."""
        header = self._headers.get(form)
        if header is None:
            header = self._new_header(form, {})
            RESPONSE_HEADERS.put(self._headers, form, header, 2 * headers.response_header_bytes(header))
        return header

    def _new_header(self, form: Sequence[Any], parameters: dict[str, Parameter]) -> ResponseHeader:
        """Create a header; ``form`` is a flat sequence of name, type and shape of each output."""
        outputs = [TensorSpec(*output) for output in zip(*[iter(form)] * 3, strict=True)]
        if self.reshape is not None:
            outputs = list(map(self.reshape.output, outputs))
        return ResponseHeader(self._model_name, self._model_version, outputs, parameters)


def _device_output(request: InferenceRequest, name: str, output: DeviceBuffer) -> TensorData:
    """Return an output that is on a GPU, complete; on the host unless the caller takes it where it is."""
    exchange.complete(output.device)
    return output if request.header.takes_on_device(name) else exchange.to_host(output)


_log = logging.getLogger("nerite.python")

READY_LIMIT = 5.0
"""Seconds that an asynchronous ``is_ready`` may take."""


class PythonInstance:
    """Instance of a ``TritonPythonModel``. Used by one thread at a time."""

    def __init__(
        self, model: ModelContext, model_class: type, context: InstanceContext, file: Path | None = None
    ) -> None:
        """Create an object of the class, which is defined in ``file``, and initialize it.

        Raises ``Internal`` with what the model raises.
        """
        self._name = context.name
        self._file = file or model_file(model)
        outputs = [output["name"] for output in all_outputs(model.config)]
        self._decoupled = bool(model.config.get("model_transaction_policy", {}).get("decoupled"))
        # Not a method: without a reference cycle, a model that fails to initialize is freed at once.
        self._failed = functools.partial(_failed, context.name)
        self._replies = PythonReplies(
            model.name,
            str(model.version),
            outputs,
            self._failed,
            decoupled=self._decoupled,
            reshape=ModelReshape(model.config) or None,
        )
        self._rescheduling = Rescheduling(model.config)
        self._loop = EventLoop(context.name)
        try:
            self.model: Any = model_class()
            if hasattr(self.model, "initialize"):
                self._finished(self.model.initialize(_arguments(model, context)))
        except CAUSES as error:
            self._loop.close()
            raise Internal(describe_failure(error)) from error

    def execute(
        self, requests: Sequence[InferenceRequest], timings: ExecutionTimes
    ) -> Sequence[InferenceResponse | None]:
        """Call the model with the whole batch, a list of requests of any shapes; nothing is stacked.

        The result is None for a request that the model answers through its sender, and a ``Reschedule`` for one that it
        reschedules. A response that cannot be sent fails only its own request.

        Raises ``Internal`` with what the model raises, or if the returned value as a whole is invalid.
        """
        replies = self._replies
        served = [ServedRequest(request, replies) for request in requests]
        timings.inputs_ready()
        try:
            returned = self.model.execute(served)
            if self._decoupled and inspect.iscoroutine(returned) and not self._rescheduling.iterative:
                self._loop.start(returned, functools.partial(self._ended, served))
                returned = None
            elif type(returned) is not list:
                returned = self._finished(returned)
        except CAUSES as error:
            replies.again.difference_update(served)
            raise self._failed(self._reason(error)) from error
        timings.computed()
        again: Set[ServedRequest] = frozenset()
        if replies.again:
            again = replies.again.intersection(served)
            replies.again -= again
        if returned is None and not self._decoupled and all(one.has_sender for one in served):
            returned = [None] * len(served)
        wrong = self._wrong(returned, len(served))
        if wrong:
            raise self._failed(wrong)
        if self._decoupled:
            returned = [None] * len(requests)
            if not again:
                return returned
        return [
            replies.reply(one.core, response)
            if isinstance(response, ModelResponse) and not (again and one in again)
            else self._without_reply(one, response, again)
            for one, response in zip(served, returned, strict=True)
        ]

    @property
    def checks_readiness(self) -> bool:
        """True if the model defines ``is_ready``."""
        return hasattr(self.model, "is_ready")

    def is_ready(self) -> bool:
        """Return the result of the model's ``is_ready``, True if it has none, False if it fails."""
        if not self.checks_readiness:
            return True
        try:
            ready = self._finished(self.model.is_ready(), READY_LIMIT)
            if not isinstance(ready, bool):
                raise TritonModelException("is_ready() must return a boolean value")
        except CAUSES as error:
            _log.error("is_ready of '%s' failed: %s", self._name, describe_failure(error))
            return False
        return ready

    def close(self) -> None:
        """Finalize the model. Exceptions of the model are logged."""
        try:
            if hasattr(self.model, "finalize"):
                self._finished(self.model.finalize())
        except CAUSES as error:
            _log.error("finalize of '%s' failed: %s", self._name, describe_failure(error))
        finally:
            self._loop.close()
            self.model = None

    def _without_reply(
        self, request: ServedRequest, returned: Any, again: Set[ServedRequest]
    ) -> InferenceResponse | None:
        """Return the result for a request that is in ``again``, or for which the model returned no response."""
        if request in again:
            try:
                wrong = self._rescheduling.wrong(returned)
                if not wrong:
                    return self._rescheduling.outcome(request.core, returned, self._replies.reply)
            except Exception as error:  # a subclass defined by the model may raise anything
                wrong = describe_failure(error)
        elif returned is None and (self._decoupled or request.has_sender):
            return None
        else:
            wrong = (
                "Expected an 'InferenceResponse' object in the execute function return list, found type "
                f"'{type(returned)}'."
            )
        return InferenceResponse.failed(self._failed(wrong))

    def _ended(self, served: Sequence[ServedRequest], returned: Any, error: BaseException | None) -> None:
        """Fail the unanswered requests of a batch after its ``async execute`` has ended with an error."""
        if error is not None and not isinstance(error, CAUSES):
            raise error
        wrong = self._reason(error) if error is not None else self._wrong(returned, 0)
        if wrong:
            failed = InferenceResponse.failed(self._failed(wrong))
            for request in served:
                request.core.respond(failed)
        again = self._replies.again.intersection(served)
        self._replies.again -= again
        for request in again:
            request.core.respond(NOT_ITERATIVE)

    def _finished(self, returned: Any, timeout: float | None = None) -> Any:
        """Return the result of a model's method; run it on the loop first if it is a coroutine."""
        return self._loop.run(returned, timeout) if inspect.iscoroutine(returned) else returned

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, AttributeError) and not hasattr(self.model, "execute"):
            return f"Python model {self._file} does not implement `execute` method."
        return describe_failure(error)

    def _wrong(self, returned: Any, count: int) -> str:
        """Return Triton's text for an invalid result of ``execute`` for ``count`` requests.

        Empty if it is a list of ``count`` elements of any kind, or None from a decoupled model.
        """
        if self._decoupled:
            if returned is None:
                return ""
            return f"Python model '{self._name}' is using the decoupled mode and the execute function must return None."
        if not isinstance(returned, list):
            return f"Expected a list in the execute return, found type '{type(returned)}'."
        if len(returned) != count:
            return (
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{count}, and InferenceResponse(s) size is:{len(returned)}\n"
            )
        return ""


def _failed(name: str, reason: str) -> Internal:
    """Log why instance ``name`` failed, and return the error for its requests."""
    message = f"Failed to process the request(s) for model '{name}', message: {reason}"
    _log.error("%s", message)
    return Internal(message)


def model_file(model: ModelContext) -> Path:
    """Return the path of a model's code: ``default_model_filename``, or model.py."""
    return model.version_directory / (model.config.get("default_model_filename") or "model.py")


def _arguments(model: ModelContext, context: InstanceContext) -> dict[str, str]:
    """Return the argument of ``initialize``. All values are strings, including numbers."""
    return {
        "model_config": json.dumps(dict(model.config), separators=(",", ":")),
        "model_instance_kind": context.kind,
        "model_instance_name": context.name,
        "model_instance_device_id": str(context.device),
        "model_repository": str(model.directory),
        "model_version": str(model.version),
        "model_name": model.name,
    }
