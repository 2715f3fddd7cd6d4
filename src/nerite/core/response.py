"""Inference responses in two parts, as in ``request.py``: a header that repeats, and the data that does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

if TYPE_CHECKING:
    from nerite.core.errors import NeriteError
    from nerite.core.tensor import Buffer, TensorData, TensorSpec

Parameter: TypeAlias = bool | int | float | str
"""The value of a request or response parameter."""


class ResponseHeader:
    """Model, version and the specification of each output. Immutable apart from its memo.

    ``encoded`` is the transports' memo of the encoded header, so that a response with shapes seen before needs no
    encoding.
    """

    __slots__ = ("encoded", "model_name", "model_version", "outputs", "parameters")

    def __init__(
        self,
        model_name: str,
        model_version: str,
        outputs: Sequence[TensorSpec],
        parameters: dict[str, Parameter] | None = None,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.outputs = tuple(outputs)
        self.parameters = parameters or {}
        self.encoded: Any = None


class InferenceResponse:
    """A response that has outputs, or an error, or neither (``EMPTY``), which only ends the request.

    ``data`` has the wire format of each output in the order of ``header.outputs``. The buffers may be views of memory
    that is reused once the last view is gone, so keep a view exactly as long as the bytes are needed.
    """

    __slots__ = ("data", "error", "header")

    again = False
    """Not a response for the caller: the model wants to execute the request again."""

    def __init__(
        self,
        header: ResponseHeader | None,
        data: Sequence[TensorData] = (),
        error: NeriteError | None = None,
    ) -> None:
        self.header = header
        self.data = data
        self.error = error

    @property
    def buffers(self) -> Sequence[Buffer]:
        """The data of a response that has none on a GPU: one to a request that does not want outputs there."""
        return cast("Sequence[Buffer]", self.data)

    @property
    def empty(self) -> bool:
        """Whether the response has neither outputs nor an error."""
        return self.header is None and self.error is None

    @classmethod
    def failed(cls, error: NeriteError) -> InferenceResponse:
        """Return a response with an error."""
        return cls(None, (), error)


class Reschedule(InferenceResponse):
    """Asks for another execution of a request (iterative sequence). Its outputs are states of the sequence, if any."""

    __slots__ = ()

    again = True


EMPTY: Final = InferenceResponse(None)
"""Final response without outputs, after earlier responses or as the only one."""
