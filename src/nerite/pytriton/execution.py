"""Runs bound callables as a model of the Python backend."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final

import numpy as np

import triton_python_backend_utils as pb
from nerite.backends.python.module import CAUSES, describe_failure
from nerite.functions.execution import BackgroundLoop
from nerite.pytriton.decorators import TritonContext, current_context
from nerite.pytriton.exceptions import PyTritonUnrecoverableError, PyTritonValidationError
from nerite.pytriton.model_config.model_config import Tensor
from nerite.pytriton.proxy.types import Request

_log = logging.getLogger("nerite.pytriton")
_FINAL: Final = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_MOST_CALLS: Final = 128
"""Calls of an async callable that may be in progress."""


class BoundModel:
    """A model whose instances call bound callables: the first instance the first one, and so on."""

    callables: ClassVar[Sequence[Callable[..., Any]]]
    context: ClassVar[TritonContext]
    strict: ClassVar[bool]
    unrecoverable: ClassVar[Callable[[PyTritonUnrecoverableError], None]]

    def initialize(self, args: dict[str, str]) -> None:
        """Find the callable of this instance."""
        self._name = args["model_instance_name"]
        number = int(self._name.rpartition("_")[2]) if self._name.rpartition("_")[2].isdecimal() else 0
        self._call = self.callables[number % len(self.callables)]
        self._config = self.context.model_config
        self._outputs = {str(each.name): each for each in self._config.outputs}
        self._order = [str(each.name) for each in self._config.inputs]
        self._loop: BackgroundLoop | None = None

    def finalize(self) -> None:
        """End what is in progress."""
        if self._loop is not None:
            self._loop.close()

    def execute(self, requests: list[pb.InferenceRequest]) -> list[pb.InferenceResponse | None] | None:
        """Answer a batch of requests."""
        decoupled = self._config.decoupled
        senders = [request.get_response_sender() for request in requests] if decoupled else []
        token = current_context.set(self.context)
        try:
            result = self._call([self._request(request) for request in requests])
            if inspect.isasyncgen(result) or inspect.isawaitable(result):
                senders = senders or [request.get_response_sender() for request in requests]
                self._background().start(self._finish_later(result, senders))
                return None if decoupled else [None] * len(requests)
            if not decoupled:
                if inspect.isgenerator(result):
                    raise PyTritonValidationError("A generator needs ModelConfig(decoupled=True).")
                return [self._response(each) for each in self._checked(result, len(requests))]
            if inspect.isgenerator(result):
                for part in result:
                    if all(request.is_cancelled() for request in requests):
                        result.close()
                        break
                    self._send(senders, part)
            else:
                self._send(senders, result)
        except CAUSES as error:
            failed = self._failed(error)
            if not decoupled:
                return [failed] * len(requests)
            _end(senders, failed)
        else:
            _end(senders)
        finally:
            current_context.reset(token)
        return None

    async def _finish_later(self, result: Any, senders: Sequence[pb.InferenceResponseSender]) -> None:
        current_context.set(self.context)
        try:
            if inspect.isasyncgen(result):
                async for part in result:
                    self._send(senders, part)
            else:
                self._send(senders, await result, flags=0 if self._config.decoupled else _FINAL)
                if not self._config.decoupled:
                    return
        except CAUSES as error:
            _end(senders, self._failed(error))
        else:
            _end(senders)

    def _background(self) -> BackgroundLoop:
        if self._loop is None:
            self._loop = BackgroundLoop(self._name, _MOST_CALLS)
        return self._loop

    def _request(self, request: pb.InferenceRequest) -> Request:
        """Return a request with its inputs in the order of the configuration."""
        arrays = {each.name(): each.as_numpy() for each in request.inputs()}
        data = {name: arrays[name] for name in self._order if name in arrays}
        return Request(data, json.loads(request.parameters()), None, sorted(request.requested_output_names()))

    def _checked(self, result: Any, count: int) -> Sequence[Any]:
        if not isinstance(result, list | tuple) or len(result) != count:
            what = f"{len(result)} results" if isinstance(result, list | tuple) else f"{type(result)}"
            raise PyTritonValidationError(
                f"The callable returned {what} for {count} requests: return a list with one each."
            )
        return result

    def _send(self, senders: Sequence[pb.InferenceResponseSender], part: Any, flags: int = 0) -> None:
        for sender, each in zip(senders, self._checked(part, len(senders)), strict=True):
            if each is not None:
                sender.send(self._response(each), flags=flags)

    def _response(self, outputs: Any) -> pb.InferenceResponse:
        if not hasattr(outputs, "items"):
            raise PyTritonValidationError(f"The result of a request is {type(outputs)}: return a dict of arrays.")
        tensors = []
        for name, array in outputs.items():
            if not isinstance(array, np.ndarray):
                raise PyTritonValidationError(f"Output '{name}' is {type(array)}: make it a numpy array.")
            if self.strict:
                self._check(name, array)
            if array.dtype.kind == "U":
                array = np.char.encode(array, "utf-8")
            tensors.append(pb.Tensor(name, array))
        if self.strict and (missing := self._outputs.keys() - dict(outputs).keys()):
            raise PyTritonValidationError(f"The outputs {', '.join(sorted(missing))} are missing.")
        return pb.InferenceResponse(tensors)

    def _check(self, name: str, array: Any) -> None:
        """Compare an output with its declaration. Raises ``PyTritonValidationError``."""
        declared: Tensor | None = self._outputs.get(name)
        if declared is None:
            raise PyTritonValidationError(f"Output '{name}' is not declared. Declared: {', '.join(self._outputs)}.")
        numeric = declared.datatype.size > 0
        if (numeric and array.dtype != declared.datatype.numpy) or (not numeric and array.dtype.kind not in "SUO"):
            raise PyTritonValidationError(
                f"Output '{name}' has the type {array.dtype}, and {declared.dtype} is declared."
            )
        shape = array.shape[1:] if self._config.batching else array.shape
        if len(shape) != len(declared.shape) or any(
            wanted not in (-1, size) for size, wanted in zip(shape, declared.shape, strict=True)
        ):
            raise PyTritonValidationError(f"Output '{name}' has the shape {shape}, and {declared.shape} is declared.")

    def _failed(self, error: BaseException) -> pb.InferenceResponse:
        text = f"Failed to process the request(s) for model '{self._name}', message: {describe_failure(error)}"
        _log.error("%s", text)
        if isinstance(error, PyTritonUnrecoverableError):
            type(self).unrecoverable(error)
        return pb.InferenceResponse([], pb.TritonError(text))


def _end(senders: Sequence[pb.InferenceResponseSender], last: pb.InferenceResponse | None = None) -> None:
    for sender in senders:
        with suppress(pb.TritonModelException):  # the request has ended
            sender.send(last, flags=_FINAL)


def bound_class(
    callables: Sequence[Callable[..., Any]],
    context: TritonContext,
    strict: bool,
    unrecoverable: Callable[[PyTritonUnrecoverableError], None],
) -> type[BoundModel]:
    """Return the class that the Python backend creates instances of."""
    members = {
        "callables": tuple(callables),
        "context": context,
        "strict": strict,
        "unrecoverable": staticmethod(unrecoverable),
        "__module__": __name__,
    }
    return type("TritonPythonModel", (BoundModel,), members)
