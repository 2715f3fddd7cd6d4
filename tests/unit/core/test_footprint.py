"""What headers are said to take in memory is not less than what they take, and not many times as much."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import pytest

from nerite.core import headers
from nerite.core import tensor as dtypes
from nerite.core.request import Caller, RequestedOutput, RequestHeader, SharedMemoryInput
from nerite.core.response import ResponseHeader
from nerite.core.tensor import TensorSpec

COUNT = 300


def specs(number: int, tensors: int, dimensions: int, name: int = 4) -> list[TensorSpec]:
    shape = range(number * 1000 + 300, number * 1000 + 300 + dimensions)
    return [
        TensorSpec(f"{place}".rjust(name, "N"), dtypes.FP32, tuple(size + place for size in shape))
        for place in range(tensors)
    ]


def plain(number: int) -> RequestHeader:
    return RequestHeader("model", "1", specs(number, 2, 2), [RequestedOutput("OUT", binary=True)])


def no_tensors(number: int) -> RequestHeader:
    return RequestHeader(f"{number}", "", ())


def many_tensors(number: int) -> RequestHeader:
    return RequestHeader("model", "", specs(number, 50, 4, 40))


def many_outputs(number: int) -> RequestHeader:
    place = SharedMemoryInput(f"region {number}", number, 1000 + number)
    outputs = [RequestedOutput(f"{number} {at}", place=place if at % 2 else None) for at in range(100)]
    return RequestHeader("model", "", specs(number, 1, 1), outputs)


def long_texts(number: int) -> RequestHeader:
    return RequestHeader(
        f"{number}".rjust(1000, "m"),
        f"{number}".rjust(1000, "v"),
        specs(number, 1, 1, 1000),
        [RequestedOutput(f"{number}".rjust(1000, "o"))],
        parameters={f"{number}".rjust(1000, "k"): f"{number}".rjust(1000, "√")},
        sequence_id=f"{number}".rjust(128, "s"),
        caller=Caller("tenant", f"{number}".rjust(1000, "c")),
    )


def many_parameters(number: int) -> RequestHeader:
    parameters = {f"parameter {at}": f"{number} {at}" if at % 2 else number * 1000 + at for at in range(100)}
    return RequestHeader("model", "", specs(number, 1, 1), parameters=parameters)


def taken(make: Callable[[int], object]) -> int:
    """Return the bytes that each of some objects takes."""
    kept = [make(number) for number in range(10)]  # what is made once is there
    kept.clear()
    gc.collect()
    tracemalloc.start()
    try:
        kept = [make(number) for number in range(COUNT)]
        gc.collect()
        return tracemalloc.get_traced_memory()[0] // COUNT
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "make", [plain, no_tensors, many_tensors, many_outputs, long_texts, many_parameters], ids=lambda make: make.__name__
)
def test_of_a_request_header_and_its_identity(make: Callable[[int], RequestHeader]) -> None:
    def kept(number: int) -> object:
        header = make(number)
        return header, {header.identity(): header}

    said = headers.request_header_bytes(make(7))
    assert said / 4 <= taken(kept) <= said


@pytest.mark.parametrize(("tensors", "dimensions"), [(0, 0), (1, 1), (3, 4), (50, 2)])
@pytest.mark.parametrize("parameters", [0, 20])
def test_of_a_response_header(tensors: int, dimensions: int, parameters: int) -> None:
    def make(number: int) -> ResponseHeader:
        said = {f"parameter {at}": f"{number} {at}" for at in range(parameters)}
        return ResponseHeader("model", "1", specs(number, tensors, dimensions), {**said})

    said = headers.response_header_bytes(make(7))
    assert said / 5 <= taken(make) <= said
