"""An inference response: a header that repeats, and the data that does not. The mirror of ``request.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from nerite.core.errors import NeriteError
from nerite.core.tensor import Buffer, TensorSpec

Parameter: TypeAlias = bool | int | float | str
"""The value of a request or response parameter."""


class ResponseHeader:
    """Model, version and the specification of each output. Never changed after construction.

    ``encoded`` belongs to the transports: what they made of this header, so that an answer of a shape seen before
    costs no encoding.
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
    """Outputs, or an error, or (``EMPTY``) nothing but the news that this was all; never two of them.

    ``data`` holds the wire form of each output in the order of ``header.outputs``. The buffers may be views on memory
    that is used again when the last view is gone, so keep a view exactly as long as you need the bytes.
    """

    __slots__ = ("data", "error", "header")

    again = False
    """Not an answer at all: the model wants the request once more."""

    def __init__(
        self,
        header: ResponseHeader | None,
        data: Sequence[Buffer] = (),
        error: NeriteError | None = None,
    ) -> None:
        self.header = header
        self.data = data
        self.error = error

    @property
    def empty(self) -> bool:
        """Whether this says nothing but that no other response comes."""
        return self.header is None and self.error is None

    @classmethod
    def failed(cls, error: NeriteError) -> InferenceResponse:
        """Return the answer that says why there is none."""
        return cls(None, (), error)


class Reschedule(InferenceResponse):
    """What a model says of a request that it wants once more. Its outputs are states of the sequence, if any."""

    __slots__ = ()

    again = True


EMPTY: Final = InferenceResponse(None)
"""The last response of a request that had some before, or that has none."""
