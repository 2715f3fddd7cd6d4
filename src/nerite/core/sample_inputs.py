"""Sizes and values of made-up inputs: pictures, lines of text and sequences of tokens that a model may well accept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from nerite.core import tensor as dtypes
from nerite.core.signature import Signature, SignatureInput
from nerite.core.tensor import Array, DataType

Sizes = tuple[int, ...]

_PIXELS: Final = (224, 320, 640, 32)
"""Heights and widths of images, in the order in which they are tried."""
_LINE_WIDTHS: Final = (320, 224, 640, 32)
"""Widths if the height is fixed, as in models that recognise lines of text."""
_LENGTHS: Final = (128, 64, 32, 16)
"""Any other variable dimension: tokens, frames, samples or features."""
_CHANNELS: Final = (1, 3, 4)
_COLOURS: Final = (3, 4)
_SMALL: Final = 100
"""A fixed height or width below this is that of a line of text; otherwise images are assumed to be square."""
_MAX_ELEMENTS: Final = 1 << 24
"""Several variable dimensions that are neither of an image nor of tokens get smaller sizes than these together."""
_NONE_GIVEN: Final[Mapping[str, Sizes]] = MappingProxyType({})


def sample_shapes(signature: Signature, *, streams: bool) -> Iterator[dict[str, Sizes]]:
    """Yield shapes of all inputs to try, with a batch of one if the model has batches; the most plausible come first.

    Streams get one element, because their number of responses may depend on the sizes.
    """
    batching = signature.max_batch_size > 0
    found = list(plausible_shapes(signature.inputs.values(), batching=batching))
    for shapes in found[-1:] if streams else found:
        yield {name: (1, *sizes) if batching else sizes for name, sizes in shapes.items()}


def plausible_shapes(
    inputs: Iterable[SignatureInput], *, batching: bool, given: Mapping[str, Sizes] = _NONE_GIVEN
) -> Iterator[dict[str, Sizes]]:
    """Yield shapes of all inputs to try, without the batch: the most plausible first, 1 for all free sizes last.

    Inputs of images (three dimensions, one of them channels) get pictures, others sequences of tokens. ``given`` are
    the shapes that the user specified.
    """
    inputs = list(inputs)
    tried: list[dict[str, Sizes]] = []
    for attempt in range(len(_LENGTHS) + 1):
        shapes = {
            declared.name: given.get(declared.name) or _plausible(declared, attempt, batching) for declared in inputs
        }
        if shapes not in tried:
            tried.append(shapes)
            yield shapes


def _plausible(declared: SignatureInput, attempt: int, batching: bool) -> Sizes:
    """Return the shape of one input in an attempt; in a model without batching, the first size may be that of one."""
    dims = declared.dims
    if declared.datatype is dtypes.BYTES or attempt == len(_LENGTHS):
        return tuple(1 if size == -1 else size for size in dims)
    coloured = len(dims) == 3 and dims[:2] == (-1, -1) and dims[2] in _COLOURS
    if not batching and len(dims) > 1 and dims[0] in (-1, 1) and not coloured:
        return (1, *_sizes(dims[1:], attempt))
    return _sizes(dims, attempt)


def _sizes(dims: Sizes, attempt: int) -> Sizes:
    if len(dims) == 3 and (channels := _channels(dims)) is not None:
        first, second = (at for at in range(3) if at != channels)
        sides = _sides(dims[first], dims[second], attempt)
        found = dict(zip((first, second), sides, strict=True))
        return tuple(found.get(at, 3 if size == -1 else size) for at, size in enumerate(dims))
    length = _LENGTHS[attempt]
    while length > 1 and length ** dims.count(-1) > _MAX_ELEMENTS:
        length //= 2
    return tuple(length if size == -1 else size for size in dims)


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


# Values: of masks, all is meant; there is one segment; and numbers are those of pictures and of common tokens.

_WORDS: Final = ("amber", "coral", "drift", "foam", "kelp", "pearl", "reef", "shell", "tide", "wave")
_TOKENS: Final = 100


def constant_value(name: str, datatype: DataType) -> int | None:
    """Return the one number that all elements of an input should have, by its name; None if any number will do."""
    if datatype is dtypes.BYTES:
        return None
    name = name.lower()
    if "mask" in name:
        return 1
    return 0 if "token_type" in name or "segment" in name else None


def random_values(name: str, datatype: DataType, shape: Sizes) -> Array:
    """Return random data for an input: pictures, tokens or words. BF16 is float32 of which BF16 loses nothing."""
    kind = np.dtype(np.float32) if datatype is dtypes.BF16 else datatype.numpy
    if (constant := constant_value(name, datatype)) is not None:
        return np.full(shape, constant, kind)
    generator = np.random.default_rng()
    if datatype is dtypes.BYTES:
        return generator.choice(np.array(_WORDS, object), shape)
    if datatype is dtypes.BF16:
        # Multiples of 1/128 below 1 are exact in BF16.
        return (generator.integers(0, 128, shape) / 128).astype(kind)
    if kind.kind == "f":
        return generator.random(shape).astype(kind)
    if datatype is dtypes.UINT8:
        return generator.integers(0, 256, shape).astype(kind)
    return generator.integers(0, 2 if datatype is dtypes.BOOL else _TOKENS, shape).astype(kind)
