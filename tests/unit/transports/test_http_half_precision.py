"""FP16 and BF16 as JSON numbers: every one of them there and back, and every number to the nearest of them."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.core import tensor as dtypes
from nerite.core.tensor import DataType, TensorSpec
from nerite.transports.http import json_tensors

HALVES = pytest.mark.parametrize("datatype", [dtypes.FP16, dtypes.BF16], ids=lambda datatype: datatype.name)
WORDS = np.arange(65536, dtype="<u2")
INFINITY = {dtypes.FP16: 0x7C00, dtypes.BF16: 0x7F80}


def values(datatype: DataType, words: Any) -> Any:
    """The doubles that words are."""
    if datatype is dtypes.FP16:
        return words.view("<f2").astype(np.float64)
    with np.errstate(invalid="ignore"):
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def spec(datatype: DataType, count: int) -> TensorSpec:
    return TensorSpec("X", datatype, (count,))


def read(datatype: DataType, numbers: list[Any]) -> Any:
    return np.frombuffer(json_tensors.read_tensor(spec(datatype, len(numbers)), numbers, half=True), "<u2")


def write(datatype: DataType, words: Any) -> list[float]:
    numbers: list[float] = json.loads(json_tensors.write_tensor(spec(datatype, words.size), words.tobytes(), half=True))
    return numbers


@HALVES
def test_all_of_them_there_and_back(datatype: DataType) -> None:
    back = read(datatype, write(datatype, WORDS))
    nan = np.isnan(values(datatype, WORDS))
    assert nan.sum() == 2 * (0x7FFF - INFINITY[datatype])
    assert np.array_equal(back[~nan], WORDS[~nan])
    assert np.isnan(values(datatype, back[nan])).all()


@HALVES
def test_no_digit_too_many(datatype: DataType) -> None:
    """One digit less, rounded, would be read as another number."""
    words = WORDS[1 : INFINITY[datatype]]
    exact = values(datatype, words).tolist()
    for digits in range(5):
        rounded = [float(f"{value:.{digits}e}") for value in exact]
        enough = read(datatype, rounded) == words
        written = write(datatype, words)
        assert [number for number, fits in zip(written, enough, strict=True) if fits] == [
            number for number, fits in zip(rounded, enough, strict=True) if fits
        ]
        words = words[~enough]
        exact = [value for value, fits in zip(exact, enough, strict=True) if not fits]
    assert not words.size


@HALVES
@given(number=st.floats(allow_nan=False, allow_infinity=False) | st.floats(-70000, 70000) | st.floats(-1e-37, 1e-37))
def test_every_number_is_rounded_to_the_nearest(datatype: DataType, number: float) -> None:
    (word,) = read(datatype, [number]).tolist()
    assert (word >> 15) == int(np.signbit(number))
    word &= 0x7FFF
    top = INFINITY[datatype]
    assert word <= top
    finite = [Fraction(value) for value in values(datatype, WORDS[max(word - 1, 0) : min(word + 2, top)]).tolist()]
    # Where infinity begins, as if numbers went on.
    if word + 1 >= top:
        largest, before = (Fraction(value) for value in values(datatype, WORDS[[top - 1, top - 2]]).tolist())
        finite.append(2 * largest - before)
    distances = {candidate: abs(abs(Fraction(number)) - candidate) for candidate in finite}
    if word == top:
        assert abs(Fraction(number)) >= finite[-1] - (finite[-1] - finite[-2]) / 2
        return
    here = Fraction(values(datatype, WORDS[[word]]).tolist()[0])
    nearest = min(distances.values())
    assert distances[here] == nearest
    if list(distances.values()).count(nearest) > 1:
        assert word % 2 == 0


@HALVES
def test_the_middle_between_two_goes_to_the_even_one(datatype: DataType) -> None:
    low = values(datatype, WORDS[: INFINITY[datatype] - 1])
    middle = (low + values(datatype, WORDS[1 : INFINITY[datatype]])) / 2
    words = read(datatype, middle.tolist())
    assert np.array_equal(words, (WORDS[: low.size] + 1) & 0xFFFE)


def test_nothing_is_rounded_twice() -> None:
    """In FP32 these are the middle between two numbers of BF16, from above and from below."""
    assert read(dtypes.BF16, [1.00390625 + 2**-40, 1.01171875 - 2**-40]).tolist() == [0x3F81, 0x3F81]


@HALVES
def test_what_is_no_number_and_what_is_too_large(datatype: DataType) -> None:
    top = INFINITY[datatype]
    words = read(datatype, [float("nan"), float("inf"), float("-inf"), 1e300, -(10**300), 0, -0.0])
    assert words[0] & 0x7FFF > top
    assert words[1:].tolist() == [top, top | 0x8000, top, top | 0x8000, 0, 0x8000]
    text = json_tensors.write_tensor(spec(datatype, 7), words.tobytes(), half=True)
    assert text == b"[NaN,Infinity,-Infinity,Infinity,-Infinity,0.0,-0.0]"


@HALVES
def test_the_data_need_not_be_aligned(datatype: DataType) -> None:
    raw = b"x" + read(datatype, [1.5, -2.25]).tobytes()
    assert json_tensors.write_tensor(spec(datatype, 2), memoryview(raw)[1:], half=True) == b"[1.5,-2.25]"


@HALVES
def test_no_elements(datatype: DataType) -> None:
    assert bytes(json_tensors.read_tensor(spec(datatype, 0), [], half=True)) == b""
    assert json_tensors.write_tensor(spec(datatype, 0), b"", half=True) == b"[]"
