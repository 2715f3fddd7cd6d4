"""Sizes with which a model's variable dimensions are measured. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from nerite.client import ClientError, TensorDescription
from nerite.core.errors import InvalidArgument
from nerite.tools.bench.requests import Shapes

Sizes = tuple[int, ...]

_PIXELS: Final = (224, 320, 640, 32)
"""Heights and widths of images, in the order in which they are tried."""
_LINE_WIDTHS: Final = (320, 224, 640, 32)
"""Widths if the height is fixed, as in models that recognise lines of text."""
_LENGTHS: Final = (128, 64, 32, 16)
"""Any other variable dimension: tokens, frames, samples or features."""
_CHANNELS: Final = (1, 3, 4)
_SMALL: Final = 100
"""A fixed height or width below this is that of a line of text; otherwise images are assumed to be square."""


def shape_option(name: str, sizes: Sequence[int]) -> str:
    """Return the option that specifies a shape; N stands for a size that may be chosen."""
    return f"--shape {name}:{','.join('N' if size == -1 else str(size) for size in sizes)}"


def check_shapes(given: Mapping[str, Sizes], inputs: Sequence[TensorDescription], *, batching: bool) -> None:
    """Raise ``InvalidArgument`` for a shape of an unknown input, or one that does not fit its input."""
    known = {tensor.name: tensor for tensor in inputs}
    for name, sizes in given.items():
        if name not in known:
            raise InvalidArgument(
                f"{shape_option(name, sizes)}: the model has no input '{name}'.\n"
                f"    Its inputs: {', '.join(map(str, inputs)) or 'none'}."
            )
        try:
            Shapes(int(batching), given).of(known[name])
        except ClientError as error:
            fitting = next(plausible_shapes([known[name]], batching=batching, given={}))[name]
            raise InvalidArgument(f"{error}.\n    Write for example {shape_option(name, fitting)}") from None


def variable_inputs(
    inputs: Sequence[TensorDescription], given: Collection[str], *, batching: bool
) -> list[TensorDescription]:
    """Return the inputs with variable dimensions, besides the batch, for which no shape was given."""
    return [tensor for tensor in inputs if tensor.name not in given and -1 in tensor.shape[batching:]]


def is_enlarged(tensor: TensorDescription, sizes: Sizes, *, batching: bool) -> bool:
    """Return whether a variable dimension of an input has a size other than 1 in a shape."""
    return any(own == -1 and size != 1 for own, size in zip(tensor.shape[batching:], sizes, strict=True))


def plausible_shapes(
    inputs: Sequence[TensorDescription], *, batching: bool, given: Mapping[str, Sizes]
) -> Iterator[dict[str, Sizes]]:
    """Yield shapes of all inputs to try, without the batch: the most plausible first, 1 for all free sizes last.

    Inputs of images (three dimensions, one of them channels) get pictures, others sequences of tokens. ``given`` are
    the shapes that the user specified.
    """
    tried: list[dict[str, Sizes]] = []
    for attempt in range(len(_LENGTHS) + 1):
        shapes = {
            tensor.name: given.get(tensor.name) or _plausible(tensor, tensor.shape[batching:], attempt, batching)
            for tensor in inputs
        }
        if shapes not in tried:
            tried.append(shapes)
            yield shapes


def _plausible(tensor: TensorDescription, dims: Sizes, attempt: int, batching: bool) -> Sizes:
    """Return the shape of one input in an attempt; in a model without batching, the first size may be that of one."""
    if tensor.datatype == "BYTES" or attempt == len(_LENGTHS):
        return tuple(1 if size == -1 else size for size in dims)
    if not batching and len(dims) > 1 and dims[0] in (-1, 1):
        return (1, *_sizes(dims[1:], attempt))
    return _sizes(dims, attempt)


def _sizes(dims: Sizes, attempt: int) -> Sizes:
    if len(dims) == 3 and (channels := _channels(dims)) is not None:
        first, second = (at for at in range(3) if at != channels)
        sides = _sides(dims[first], dims[second], attempt)
        found = dict(zip((first, second), sides, strict=True))
        return tuple(found.get(at, 3 if size == -1 else size) for at, size in enumerate(dims))
    return tuple(_LENGTHS[attempt] if size == -1 else size for size in dims)


def _channels(dims: Sizes) -> int | None:
    """Return which of three dimensions is that of channels: the first or last if it has so many, or is free."""
    by_number = next((at for at in (0, 2) if dims[at] in _CHANNELS), None)
    if by_number is not None or dims.count(-1) < 3:
        return by_number
    return 0


def _sides(height: int, width: int, attempt: int) -> tuple[int, int]:
    """Return height and width of an image."""
    fixed = max(height, width)
    if height != -1 and width != -1:
        return height, width
    if fixed == -1:
        return _PIXELS[attempt], _PIXELS[attempt]
    free = _LINE_WIDTHS[attempt] if fixed < _SMALL or attempt else fixed
    return (free if height == -1 else height), (free if width == -1 else width)
