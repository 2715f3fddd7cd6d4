"""Numbers of two bytes, FP16 and BF16, from JSON numbers and back.

Triton refuses them in JSON. What is too large becomes infinite, as it does with FP32 here, in numpy and in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import orjson
from numpy.typing import NDArray

from nerite.core import dtype as dtypes
from nerite.core.dtype import DataType
from nerite.core.tensor import Buffer

_Doubles = NDArray[np.float64]
_Words = NDArray[np.uint16]
_SIGN = 0x8000


def read(datatype: DataType, numbers: _Doubles) -> _Words:
    """Return ``numbers`` as words, each rounded once, to the nearest; of two as near, to the even one."""
    return _FORMATS[datatype].words(numbers)


def write(datatype: DataType, data: Buffer) -> bytes:
    """Return a JSON array, each number with as few digits as are read as the same; NaN and Infinity are bare words."""
    words: list[int] = np.frombuffer(data, "<u2").tolist()
    return b"[" + b",".join(map(_FORMATS[datatype].__getitem__, words)) + b"]"


class _Format(dict[int, bytes]):
    """One of the two types: how doubles become words of 16 bits, and the text of each word that was ever written."""

    def __init__(self, words: Callable[[_Doubles], _Words], doubles: Callable[[_Words], _Doubles]) -> None:
        super().__init__()
        self.words = words
        self._doubles = doubles

    @cached_property
    def _values(self) -> list[float]:
        """All numbers without a sign: ascending, then Infinity, then the NaNs."""
        values: list[float] = self._doubles(np.arange(_SIGN, dtype="<u2")).tolist()
        return values

    def __missing__(self, word: int) -> bytes:
        if word & _SIGN:
            positive = self[word ^ _SIGN]
            text = positive if positive == b"NaN" else b"-" + positive
        else:
            text = self._text(word)
        self[word] = text
        return text

    def _text(self, word: int) -> bytes:
        value = self._values[word]
        if value != value:
            return b"NaN"
        if value == float("inf"):
            return b"Infinity"
        if word == 0:
            return b"0.0"
        # What is read as this number lies between the middles to its neighbours, or on them if it is even.
        below = (self._values[word - 1] + value) / 2
        above = (value + self._values[word + 1]) / 2
        if above == float("inf"):
            above = value + (value - below)
        digits = 0
        while True:
            shorter = float(f"{value:.{digits}e}")
            if below < shorter < above or (word % 2 == 0 and shorter in (below, above)):
                return orjson.dumps(shorter)
            digits += 1


def _half_words(numbers: _Doubles) -> _Words:
    with np.errstate(over="ignore", under="ignore"):
        return numbers.astype("<f2").view("<u2")


def _half_doubles(words: _Words) -> _Doubles:
    return words.view("<f2").astype(np.float64)


def _brain_words(numbers: _Doubles) -> _Words:
    """Return the upper half of the FP32 numbers, rounded.

    On the way from 64 bits there, what is cut off is left as a last bit that is set, so that nothing is rounded twice.
    """
    with np.errstate(over="ignore", under="ignore"):
        singles = numbers.astype(np.float32)
    exact = singles.astype(np.float64)
    bits = singles.view(np.uint32)
    bits -= np.abs(exact) > np.abs(numbers)
    bits |= exact != numbers
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    words = (rounded >> np.uint32(16)).astype("<u2")
    words[np.isnan(numbers)] = 0x7FC0
    return words


def _brain_doubles(words: _Words) -> _Doubles:
    with np.errstate(invalid="ignore"):  # some NaNs signal, and are NaNs all the same
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


_FORMATS = {
    dtypes.FP16: _Format(_half_words, _half_doubles),
    dtypes.BF16: _Format(_brain_words, _brain_doubles),
}
