"""Converts tensors to the arguments of a function, and what it returns to tensors. Pure, but for reading images."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from nerite.core import tensor as dtypes
from nerite.core.signature import shape_text
from nerite.core.tensor import Array
from nerite.functions.signature import FunctionSignature, FunctionTensor, ValueForm, free_dimensions

_IMAGE_FORMATS: Final = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
MAX_PIXELS: Final = 64_000_000
"""Pixels of an image that a client may send: an image of 192 MB."""


class BadRequest(Exception):
    """The request is wrong. Raised by a function, it becomes the status 400, with its text alone."""


class WrongResult(Exception):
    """What a function returned does not fit what it declares."""


def argument_of(tensor: FunctionTensor, array: Array, *, batched: bool) -> Any:
    """Return what the function gets for an input. Raises ``BadRequest``."""
    if tensor.form is ValueForm.ARRAY:
        if not tensor.type.dims:
            array = array.reshape(array.shape[:1]) if batched else array.reshape(())
            if not batched and tensor.type.datatype is not dtypes.BYTES:
                return array[()]
        if tensor.type.text:
            return _decoded(tensor, array)
        return array if array.shape or batched else array[()]
    if tensor.form is ValueForm.VALUES:
        return _plain(tensor, array)
    values: list[Any] = _plain(tensor, array.reshape(-1))
    if tensor.form is ValueForm.IMAGE:
        values = [_image(tensor.name, each) for each in values]
    return values if batched else values[0]


def _plain(tensor: FunctionTensor, array: Array) -> Any:
    return (_decoded(tensor, array) if tensor.type.text else array).tolist()


def _decoded(tensor: FunctionTensor, array: Array) -> Array:
    texts = np.empty(array.shape, object)
    try:
        texts.reshape(-1)[:] = [bytes(each).decode() for each in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise BadRequest(f"input '{tensor.name}' is not UTF-8: {error.reason} at byte {error.start}") from None
    return texts


def _image(name: str, data: bytes) -> Any:
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data), formats=_IMAGE_FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise BadRequest(
                f"input '{name}' is an image of {image.width} x {image.height} pixels, more than {MAX_PIXELS:,}"
            )
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise BadRequest(f"input '{name}' is not an image file ({', '.join(_IMAGE_FORMATS)})") from None
    return image


def check_dimensions(signature: FunctionSignature, arrays: Mapping[str, Array], *, batched: bool) -> dict[str, int]:
    """Return the size of each named dimension of the inputs. Raises ``BadRequest`` if one has two sizes."""
    sizes: dict[str, tuple[int, str]] = {}
    for tensor, index, dimension in free_dimensions(signature.inputs):
        if tensor.name in arrays:
            size = arrays[tensor.name].shape[index + batched]
            before = sizes.setdefault(dimension, (size, tensor.name))
            if before[0] != size:
                raise BadRequest(
                    f"dimension '{dimension}' is {before[0]} in input '{before[1]}' and {size} in input '{tensor.name}'"
                )
    return {dimension: size for dimension, (size, _) in sizes.items()}


def results_of(
    signature: FunctionSignature, returned: Any, sizes: Mapping[str, int], rows: int | None
) -> dict[str, Array]:
    """Return the outputs of a call for ``rows`` rows; None without a batch. Raises ``WrongResult``."""
    outputs = signature.outputs
    if signature.answer is not None:
        if not isinstance(returned, signature.answer.record):
            raise WrongResult(f"it returned {_kind(returned)}, and declares {signature.answer.record.__name__}")
        values = [getattr(returned, name) for name in signature.answer.fields]
    elif len(outputs) > 1 or outputs[0].name != "output":
        if not isinstance(returned, tuple) or len(returned) != len(outputs):
            raise WrongResult(f"it returned {_kind(returned)}, and declares a tuple of {len(outputs)}")
        values = list(returned)
    else:
        values = [returned]
    known = dict(sizes)
    return {each.name: _result(each, value, known, rows) for each, value in zip(outputs, values, strict=True)}


def _result(tensor: FunctionTensor, value: Any, sizes: dict[str, int], rows: int | None) -> Array:
    what = f"'{tensor.name}'"
    if value is None:
        raise WrongResult(f"it returned None for {what}, and declares {tensor.type!r}")
    if tensor.form is ValueForm.IMAGE:
        value = [encoded_image(each) for each in ([value] if rows is None else value)]
    array = _array(tensor, value, what)
    dims = tensor.type.dims
    if not dims and tensor.form is not ValueForm.VALUES:
        array = array.reshape(-1, 1) if rows is not None and array.ndim == 1 else array
        array = array.reshape(1) if rows is None and array.size == 1 else array
        dims = (1,)
    given = array.shape if rows is None else array.shape[1:]
    if rows is not None and (not array.ndim or array.shape[0] != rows):
        raise WrongResult(
            f"{what} has the shape {shape_text(array.shape)}, but dimension 0 must be the batch, of {rows} rows"
        )
    if len(given) != len(dims):
        raise WrongResult(f"{what} has the shape {shape_text(array.shape)}, and declares {tensor.type!r}")
    for size, declared in zip(given, dims, strict=True):
        wanted = sizes.setdefault(declared, size) if isinstance(declared, str) else declared
        if wanted not in (-1, size):
            raise WrongResult(
                f"{what} has the shape {shape_text(array.shape)}, and declares {tensor.type!r}"
                + (f", where '{declared}' is {wanted}" if isinstance(declared, str) else "")
            )
    return array


def _array(tensor: FunctionTensor, value: Any, what: str) -> Array:
    datatype = tensor.type.datatype
    if datatype is dtypes.BYTES:
        return _strings(tensor, value, what)
    try:
        given = value if isinstance(value, np.ndarray | np.generic) else np.asarray(value)
    except Exception as error:  # a framework's own object
        raise WrongResult(f"{what} is {_kind(value)}, which is not an array: {error}") from None
    if given.dtype == datatype.numpy:
        return np.asarray(given)
    wanted = datatype.numpy
    if isinstance(value, np.ndarray | np.generic) or hasattr(value, "__array__"):
        raise WrongResult(
            f"{what} has the type {given.dtype}, and declares {tensor.type!r}: return .astype('{wanted.name}')"
        )
    if given.dtype.kind not in "biuf" or not (given.size == 0 or np.can_cast(given.dtype, wanted, "same_kind")):
        raise WrongResult(f"{what} is {value!r:.80}, and declares {tensor.type!r}")
    return given.astype(wanted)


def _strings(tensor: FunctionTensor, value: Any, what: str) -> Array:
    array = np.asarray(value, object) if not isinstance(value, str | bytes) else np.array(value, object)
    for each in array.reshape(-1):
        if not isinstance(each, str | bytes):
            raise WrongResult(f"{what} has the element {each!r:.80}, and declares {tensor.type!r}: return str or bytes")
    return array


def encoded_image(image: Any) -> bytes:
    """Return an image of PIL as a file; the bytes of a file as they are. Raises ``WrongResult``."""
    if isinstance(image, bytes):
        return image
    if not hasattr(image, "save"):
        raise WrongResult(f"it returned {_kind(image)} where it declares an image")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _kind(value: object) -> str:
    return f"an object of type '{type(value).__name__}'"


def arguments_of(
    signature: FunctionSignature, arrays: Mapping[str, Array], state: Any, *, batched: bool
) -> dict[str, Any]:
    """Return the keyword arguments of a call: values, dataclasses, the state. Raises ``BadRequest``."""
    values = {
        each.name: argument_of(each, arrays[each.name], batched=batched) if each.name in arrays else each.default
        for each in signature.inputs
    }
    found: dict[str, Any] = {}
    for parameter in signature.parameters:
        record = signature.records.get(parameter)
        if record is None:
            if parameter in arrays or not _is_optional(signature.inputs, parameter):
                found[parameter] = values[parameter]
        else:
            given = {name: values[name] for name in record.fields if name in arrays}
            found[parameter] = record.record(**given)
    if signature.state:
        found[signature.state] = state
    return found


def _is_optional(inputs: Sequence[FunctionTensor], name: str) -> bool:
    return any(each.optional for each in inputs if each.name == name)
