"""Response of a model to one request, and the sender for several or late responses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import SupportsIndex

from nerite.core.errors import Internal, NeriteError
from nerite.core.request import InferenceRequest as CoreRequest
from nerite.core.response import EMPTY, Parameter
from nerite.core.response import InferenceResponse as CoreResponse
from triton_python_backend_utils import arguments
from triton_python_backend_utils.arguments import UINT32, Mismatch
from triton_python_backend_utils.errors import (
    Parameters,
    TritonError,
    TritonModelException,
    checked_parameters,
    incompatible,
    incompatible_call,
)
from triton_python_backend_utils.tensor import Tensor

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

_REMEDY = "make the model decoupled: model_transaction_policy { decoupled: true }."
_NONE = (
    "Unable to send response. Non-decoupled model cannot send complete final before sending a response. Send one "
    "before or with the flag TRITONSERVER_RESPONSE_COMPLETE_FINAL, an error if there is no other response, or "
    f"{_REMEDY}"
)
_SECOND = (
    "Unable to send response. Non-decoupled model cannot send more than one response. Send all outputs with the first, "
    f"or {_REMEDY}"
)


class InferenceResponse:
    """Response with output tensors or an error. With an error the tensors are ignored."""

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Parameters | None = None,
    ) -> None:
        try:
            if output_tensors.__class__ is not list:
                output_tensors = arguments.sequence(output_tensors)
            for tensor in output_tensors:
                if not isinstance(tensor, Tensor):
                    raise Mismatch
            if error is not None and not isinstance(error, TritonError):
                raise Mismatch
        except Mismatch as mismatch:
            raise _wrong(output_tensors, error, mismatch) from None
        self._tensors = [*output_tensors]
        self._error = error
        self._parameters: dict[str, Parameter] | None = None if parameters is None else checked_parameters(parameters)

    def output_tensors(self) -> list[Tensor]:
        """Return the tensors."""
        return list(self._tensors)

    def has_error(self) -> bool:
        """Return whether the response is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error, or None."""
        return self._error

    def parameters(self) -> str:
        """Return the parameters as a JSON object."""
        return json.dumps(self._parameters or {})


class InferenceResponseSender:
    """Sends the responses of a request one by one, during or after ``execute``. Thread-safe."""

    __slots__ = ("_closed", "_lock", "_request", "_sent", "_single", "_to_core")

    def __init__(
        self,
        request: CoreRequest,
        to_core: Callable[[CoreRequest, InferenceResponse], CoreResponse],
        *,
        single: bool = False,
    ) -> None:
        """``to_core`` converts a model's response to the server's. ``single``: exactly one response is required."""
        self._request = request
        self._to_core = to_core
        self._single = single
        self._sent = False
        self._closed = False
        self._lock = threading.Lock()

    def send(self, response: InferenceResponse | None = None, flags: SupportsIndex = 0) -> None:
        """Send one response; the flag ``TRITONSERVER_RESPONSE_COMPLETE_FINAL`` marks the last, which may be None.

        Blocks while the receiver has too many unread responses (backpressure). Raises ``TypeError`` for arguments of a
        wrong type, ``TritonModelException`` if the response cannot be sent or in a process forked by the model.
        """
        try:
            if response is not None and not isinstance(response, InferenceResponse):
                raise Mismatch
            flag = arguments.integer("flags", flags, UINT32)
        except Mismatch as mismatch:
            raise incompatible_call(
                "send",
                "(self: c_python_backend_utils.InferenceResponseSender, response: "
                "c_python_backend_utils.InferenceResponse = None, flags: int = 0) -> None",
                mismatch,
                self,
                response,
                flags,
            ) from None
        if flag not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and not flag:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        with self._lock:
            mistake = self._mistake(response) if self._single else ""
            if self._closed and not mistake:
                raise TritonModelException("Unable to send response. Response sender has been closed.")
            self._sent = True
            self._closed = bool(flag or mistake)
        if mistake:
            # An exception in a thread of the model may go unnoticed; without an answer the caller would wait forever.
            self._request.respond(CoreResponse.failed(Internal(mistake)))
            raise TritonModelException(mistake)
        answer = EMPTY if response is None else self._to_core(self._request, response)
        try:
            self._request.respond(answer, bool(flag))
        except NeriteError as error:
            raise TritonModelException(error.message) from None

    def _mistake(self, response: InferenceResponse | None) -> str:
        """Return why ``response`` must not be sent now if exactly one response is expected; empty if it may be."""
        if response is None:
            return "" if self._sent else _NONE
        return _SECOND if self._sent else ""

    def is_cancelled(self) -> bool:
        """Return whether the request has been cancelled, so that the model may stop working on it.

        Raises ``TritonModelException`` in a process forked by the model.
        """
        try:
            return self._request.is_cancelled()
        except NeriteError as error:
            raise TritonModelException(error.message) from None


def _wrong(tensors: object, error: object, mismatch: Mismatch) -> Exception:
    if isinstance(tensors, list | tuple) and any(tensor is None for tensor in tensors):
        return TritonModelException("Output tensor for inference response should not be empty.")
    return incompatible(
        "InferenceResponse(output_tensors: List[c_python_backend_utils.Tensor] = [], "
        "error: c_python_backend_utils.TritonError = None, parameters: object = None)",
        mismatch,
        *([tensors] if not isinstance(tensors, Sequence) or tensors else []),
        **({} if error is None else {"error": error}),
    )
