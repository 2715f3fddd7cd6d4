"""Signatures: inputs and outputs of a model, and the validation of requests against them.

Headers are validated once per distinct header, not per request (see ``RequestHeader.route``). Data is validated by
``check_data``, which runs only for requests whose tensors do not have exactly the sizes that the header implies, and
therefore for every tensor of strings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.request import InferenceRequest, RequestedOutput, RequestHeader, with_request_id
from nerite.core.tensor import Buffer, DataType, DeviceBuffer, TensorSpec, WrongElementCount

_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try "
    "setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


class SignatureInput(NamedTuple):
    """A declared input. ``dims`` is without the batch dimension; -1 is any size. ``reshape`` is the model's shape."""

    name: str
    datatype: DataType
    dims: tuple[int, ...]
    optional: bool = False
    ragged: bool = False
    reshape: tuple[int, ...] | None = None


class SignatureOutput(NamedTuple):
    """A declared output. ``labels`` names the classes, for the classification extension; ``reshape`` as in inputs."""

    name: str
    datatype: DataType
    dims: tuple[int, ...]
    labels: tuple[str, ...] = ()
    reshape: tuple[int, ...] | None = None


def reshaped(
    shape: Sequence[int], have: Sequence[int], want: Sequence[int], *, batched: bool = False
) -> tuple[int, ...]:
    """Convert ``shape`` from the declared dimensions ``have`` to ``want``. Variable sizes (-1) keep their order.

    With ``batched``, dimension 0 is the batch, which neither declares, and is kept.
    """
    rest = shape[1:] if batched else shape
    free = iter([size for size, declared in zip(rest, have, strict=True) if declared == -1])
    sizes = tuple(next(free) if declared == -1 else declared for declared in want)
    return (shape[0], *sizes) if batched else sizes


def shape_text(values: Iterable[object]) -> str:
    """Format a shape as Triton does: ``[1,16]``."""
    return "[" + ",".join(map(str, values)) + "]"


def names_text(names: Iterable[str]) -> str:
    """Format a list of names as Triton does: ``['A','B']``."""
    return "[" + ",".join(f"'{name}'" for name in names) + "]"


def _repeated(entries: Iterable[TensorSpec | RequestedOutput]) -> str | None:
    """Return the first name that occurs twice, or None."""
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            return entry.name
        seen.add(entry.name)
    return None


class Signature:
    """Inputs and outputs of one model version; dimension 0 of each is the batch if ``max_batch_size`` is positive."""

    __slots__ = ("inputs", "max_batch_size", "model_name", "outputs", "required", "uniform")

    def __init__(
        self, model_name: str, max_batch_size: int, inputs: Sequence[SignatureInput], outputs: Sequence[SignatureOutput]
    ) -> None:
        self.model_name = model_name
        self.max_batch_size = max_batch_size
        self.inputs = {declared.name: declared for declared in inputs}
        self.outputs = {declared.name: declared for declared in outputs}
        self.required = frozenset(declared.name for declared in inputs if not declared.optional)
        self.uniform = all(
            not declared.optional and (declared.ragged or -1 not in declared.dims) for declared in inputs
        )
        """Any two requests may share a batch, because no input is optional and no shape can differ."""

    def bind(self, header: RequestHeader, request_id: str = "") -> None:
        """Validate ``header`` and set its ``batch_size`` and ``batch_key``.

        Raises ``InvalidArgument`` with Triton's text for the first mistake, checking in Triton's order.
        """
        for what, entries in (("input", header.inputs), ("output", header.outputs)):
            if (twice := _repeated(entries)) is not None:
                raise with_request_id(InvalidArgument(f"{what} '{twice}' already exists in request"), request_id)
        for output in header.outputs:
            if output.name not in self.outputs:
                raise InvalidArgument(f"unexpected inference output '{output.name}' for model '{self.model_name}'")
        for spec in reversed(header.inputs):
            if spec.name not in self.inputs:
                raise InvalidArgument(f"unexpected inference input '{spec.name}' for model '{self.model_name}'")
        try:
            self._check_inputs(header)
        except InvalidArgument as error:
            raise with_request_id(error, request_id) from None

    def _check_inputs(self, header: RequestHeader) -> None:
        seen = {spec.name: spec for spec in header.inputs}
        if not self.required <= seen.keys():
            raise self._missing(seen)
        header.batch_size = self._batch_size(header) if self.max_batch_size > 0 else 1
        for spec in reversed(header.inputs):
            declared = self.inputs[spec.name]
            self._check_type(spec, declared)
            self._check_shape(spec, declared)
        if header.batch_size == 0:
            self._refuse_no_rows(header)
        header.batch_key = None if self.uniform else self._batch_key(header)

    def _batch_size(self, header: RequestHeader) -> int:
        """Return the size of dimension 0, which all inputs must share. Checks from last to first, as Triton does."""
        batch_size: int | None = None
        for spec in reversed(header.inputs):
            if not spec.shape:
                raise InvalidArgument(
                    f"input '{spec.name}' has no shape but model requires batch dimension for '{self.model_name}'"
                )
            if batch_size is None:
                batch_size = spec.shape[0]
            elif batch_size != spec.shape[0]:
                raise InvalidArgument(
                    f"input '{spec.name}' batch size does not match other inputs for '{self.model_name}'"
                )
        if batch_size is None:
            return 1
        if batch_size > self.max_batch_size:
            raise InvalidArgument(
                f"inference request batch-size must be <= {self.max_batch_size} for '{self.model_name}'"
            )
        return batch_size

    def _missing(self, seen: Mapping[str, TensorSpec]) -> InvalidArgument:
        given = list(seen)
        missing = [name for name in self.inputs if name in self.required and name not in seen]
        count = (
            f"expected {len(self.inputs)} inputs"
            if len(self.required) == len(self.inputs)
            else f"expected number of inputs between {len(self.required)} and {len(self.inputs)}"
        )
        return InvalidArgument(
            f"{count} but got {len(given)} inputs for model '{self.model_name}'. Got input(s) {names_text(given)}, "
            f"but missing required input(s) {names_text(missing)}. Please provide all required input(s)."
        )

    def _check_type(self, spec: TensorSpec, declared: SignatureInput) -> None:
        if spec.datatype is not declared.datatype:
            raise InvalidArgument(
                f"inference input '{spec.name}' data-type is '{spec.datatype.name}', "
                f"but model '{self.model_name}' expects '{declared.datatype.name}'"
            )

    def _check_shape(self, spec: TensorSpec, declared: SignatureInput) -> None:
        shape = spec.shape[1:] if self.max_batch_size > 0 else spec.shape
        if len(shape) == len(declared.dims) and all(
            expected in (-1, size) or size == -1 for size, expected in zip(shape, declared.dims, strict=True)
        ):
            if any(size < 0 for size in spec.shape):
                raise InvalidArgument(
                    f"All input dimensions should be specified for input '{spec.name}' for model "
                    f"'{self.model_name}', got {shape_text(spec.shape)}"
                )
            return
        expected = (-1, *declared.dims) if self.max_batch_size > 0 else declared.dims
        note = _BATCH_NOTE if self.max_batch_size > 0 else ""
        raise InvalidArgument(
            f"unexpected shape for input '{spec.name}' for model '{self.model_name}'. "
            f"Expected {shape_text(expected)}, got {shape_text(spec.shape)}. {note}"
        )

    def _refuse_no_rows(self, header: RequestHeader) -> None:
        """Raise for a batch size of 0; like Triton, report the byte size that a batch of 1 would have."""
        for spec in reversed(header.inputs):
            elements = math.prod(spec.shape[1:])
            if not elements:
                continue
            what = (
                f"input byte size mismatch for input '{spec.name}' for model '{self.model_name}'. "
                f"Expected {elements * spec.datatype.size}, got 0"
                if spec.datatype.size
                else f"expected {elements} string elements for inference input '{spec.name}' for model "
                f"'{self.model_name}', got 0"
            )
            raise InvalidArgument(f"{what} (the first dimension is the batch, which must be at least 1)")

    def _batch_key(self, header: RequestHeader) -> object:
        """Return what two requests must have in common to share a batch: optional inputs, and variable shapes."""
        return tuple(
            sorted(
                (spec.name, () if declared.ragged else spec.shape[1:])
                for spec in header.inputs
                if (declared := self.inputs[spec.name]).optional or (not declared.ragged and -1 in declared.dims)
            )
        )

    def check_data(self, request: InferenceRequest) -> NeriteError | None:
        """Validate the bytes of ``request`` against its header; return the error, or None."""
        for spec, size, data in zip(request.header.inputs, request.header.sizes, request.data, strict=True):
            if size >= 0:
                if len(data) != size:
                    return with_request_id(
                        InvalidArgument(
                            f"input byte size mismatch for input '{spec.name}' for model '{self.model_name}'. "
                            f"Expected {size}, got {len(data)}"
                        ),
                        request.id,
                    )
            elif not isinstance(data, DeviceBuffer) and (error := self._check_strings(spec, data, request)) is not None:
                return error  # strings on a GPU are checked when they have been copied to the host
        return None

    def _check_strings(self, spec: TensorSpec, data: Buffer, request: InferenceRequest) -> NeriteError | None:
        """Check that a BYTES tensor consists of complete elements, as many as its shape implies."""
        if type(data) is WrongElementCount:
            return self._miscounted(spec, data.elements, request)
        size = len(data)
        at = found = 0
        while at < size:
            if found == spec.elements:
                return self._miscounted(spec, found + 1, request)
            if size - at < 4:
                return InvalidArgument(
                    f"{request.label}incomplete string length indicator {self._where(spec)}, expecting 4 bytes but "
                    f"only {size - at} bytes available. Please make sure the string length indicator is in one buffer."
                )
            length = int.from_bytes(data[at : at + 4], "little")
            at += 4
            if length > size - at:
                # In Triton backends report this, which know neither the model's name nor the request's id.
                return InvalidArgument(
                    f"incomplete string data for inference input '{spec.name}', expecting string of length {length} "
                    f"but only {size - at} bytes available"
                )
            at += length
            found += 1
        return None if found == spec.elements else self._miscounted(spec, found, request)

    def _miscounted(self, spec: TensorSpec, found: int, request: InferenceRequest) -> NeriteError:
        """Return the error for a BYTES tensor with more or fewer elements than its shape implies."""
        where = self._where(spec)
        if found < spec.elements:
            return InvalidArgument(f"{request.label}expected {spec.elements} string elements {where}, got {found}")
        return InvalidArgument(
            f"{request.label}unexpected number of string elements {spec.elements + 1} {where}, "
            f"expecting {spec.elements}"
        )

    def _where(self, spec: TensorSpec) -> str:
        return f"for inference input '{spec.name}' for model '{self.model_name}'"
