"""The check of a request against a model. The texts are Triton's; clients match on them."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles import Caller
from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument
from nerite.core.request import InferenceRequest, RequestedOutput, RequestHeader
from nerite.core.signature import Signature, SignatureInput, SignatureOutput, names_text, shape_text
from nerite.core.tensor import DataType, TensorSpec, join_bytes

NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try "
    "setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)
LABEL = "[request id: <id_unknown>] "


def spec(name: str, shape: tuple[int, ...], datatype: DataType = dtypes.FP32) -> TensorSpec:
    return TensorSpec(name, datatype, shape)


def signature(*inputs: SignatureInput, batch: int = 0) -> Signature:
    return Signature("M", batch, inputs, [SignatureOutput("OUT", dtypes.FP32, (-1,))])


def bound(of: Signature, *specs: TensorSpec, **fields: Any) -> RequestHeader:
    header = RequestHeader("M", "", specs, **fields)
    of.bind(header)
    return header


def refusal(of: Signature, *specs: TensorSpec, id: str = "", **fields: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        of.bind(RequestHeader("M", "", specs, **fields), id)
    return caught.value.message


PAIR = signature(SignatureInput("A", dtypes.FP32, (4,)), SignatureInput("B", dtypes.FP32, (4,)))
BATCHED = signature(SignatureInput("A", dtypes.FP32, (16,)), SignatureInput("B", dtypes.FP32, (2,)), batch=8)
A, B = spec("A", (4,)), spec("B", (4,))


def test_a_request_that_fits() -> None:
    header = bound(PAIR, B, A, outputs=[RequestedOutput("OUT")])
    assert (header.batch_size, header.batch_key) == (1, None)


def test_batch_size_is_the_first_dimension() -> None:
    assert bound(BATCHED, spec("A", (5, 16)), spec("B", (5, 2))).batch_size == 5
    assert bound(BATCHED, spec("A", (8, 16)), spec("B", (8, 2))).batch_size == 8


def test_batch_size_is_one_again_for_a_model_that_no_longer_batches() -> None:
    """Headers are kept, models are reloaded."""
    header = bound(signature(SignatureInput("A", dtypes.FP32, (2,)), batch=8), spec("A", (5, 2)))
    assert header.batch_size == 5
    signature(SignatureInput("A", dtypes.FP32, (-1, 2))).bind(header)
    assert header.batch_size == 1
    optional = signature(SignatureInput("A", dtypes.FP32, (2,), optional=True), batch=8)
    assert bound(optional).batch_size == 1


def test_dimensions_of_any_size() -> None:
    of = signature(SignatureInput("A", dtypes.FP32, (-1, 3)))
    bound(of, spec("A", (7, 3)))
    bound(of, spec("A", (0, 3)))


@pytest.mark.parametrize(
    ("of", "specs", "expected"),
    [
        (
            PAIR,
            [B],
            "expected 2 inputs but got 1 inputs for model 'M'. Got input(s) ['B'], but missing required input(s) "
            "['A']. Please provide all required input(s).",
        ),
        (
            PAIR,
            [],
            "expected 2 inputs but got 0 inputs for model 'M'. Got input(s) [], but missing required input(s) "
            "['A','B']. Please provide all required input(s).",
        ),
        (
            signature(
                SignatureInput("A", dtypes.FP32, (4,)),
                SignatureInput("B", dtypes.FP32, (4,)),
                SignatureInput("C", dtypes.FP32, (4,), True),
            ),
            [B],
            "expected number of inputs between 2 and 3 but got 1 inputs for model 'M'. Got input(s) ['B'], but missing "
            "required input(s) ['A']. Please provide all required input(s).",
        ),
        (PAIR, [A, A], "input 'A' already exists in request"),
        (PAIR, [A, B, A], "input 'A' already exists in request"),
        (
            PAIR,
            [spec("A", (4,), dtypes.INT64), B],
            "inference input 'A' data-type is 'INT64', but model 'M' expects 'FP32'",
        ),
        (PAIR, [spec("A", (3,)), B], "unexpected shape for input 'A' for model 'M'. Expected [4], got [3]. "),
        (PAIR, [spec("A", ()), B], "unexpected shape for input 'A' for model 'M'. Expected [4], got []. "),
        (PAIR, [spec("A", (4, 1)), B], "unexpected shape for input 'A' for model 'M'. Expected [4], got [4,1]. "),
        (
            signature(SignatureInput("A", dtypes.FP32, (2, -1))),
            [spec("A", (3, 1))],
            "unexpected shape for input 'A' for model 'M'. Expected [2,-1], got [3,1]. ",
        ),
        (
            BATCHED,
            [spec("A", (1, 8)), spec("B", (1, 2))],
            f"unexpected shape for input 'A' for model 'M'. Expected [-1,16], got [1,8]. {NOTE}",
        ),
        (
            BATCHED,
            [spec("A", (2,)), spec("B", (2, 2))],
            f"unexpected shape for input 'A' for model 'M'. Expected [-1,16], got [2]. {NOTE}",
        ),
        (
            BATCHED,
            [spec("A", ()), spec("B", (1, 2))],
            "input 'A' has no shape but model requires batch dimension for 'M'",
        ),
        (
            BATCHED,
            [spec("A", (9, 16)), spec("B", (9, 2))],
            "inference request batch-size must be <= 8 for 'M'",
        ),
        (
            PAIR,
            [spec("A", (3,), dtypes.INT32), B],
            "inference input 'A' data-type is 'INT32', but model 'M' expects 'FP32'",
        ),
    ],
)
def test_refusals_that_name_the_request(of: Signature, specs: list[TensorSpec], expected: str) -> None:
    assert refusal(of, *specs) == LABEL + expected
    assert refusal(of, *specs, id="seven") == f"[request id: seven] {expected}"


@pytest.mark.parametrize("shape", [(-1, 16), (2, -1), (-3, 16), (-1, -1)])
def test_a_size_below_zero(shape: tuple[int, ...]) -> None:
    told = refusal(BATCHED, spec("A", shape), spec("B", (shape[0], 2)))
    assert re.fullmatch(
        re.escape(LABEL) + r"All input dimensions should be specified for input '[AB]' for model 'M', got \[.*\]", told
    )


def test_a_size_below_zero_in_a_shape_that_is_wrong_anyway() -> None:
    told = refusal(PAIR, spec("A", (-4,)), B)
    assert told == f"{LABEL}unexpected shape for input 'A' for model 'M'. Expected [4], got [-4]. "


def test_an_output_that_is_named_twice() -> None:
    header = RequestHeader("M", "", [A], [RequestedOutput("X"), RequestedOutput("Y"), RequestedOutput("X")])
    with pytest.raises(InvalidArgument) as refused:
        PAIR.bind(header, "seven")
    assert refused.value.message == "[request id: seven] output 'X' already exists in request"


def test_a_batch_of_none() -> None:
    told = refusal(BATCHED, spec("A", (0, 16)), spec("B", (0, 2)), id="7")
    assert told.startswith("[request id: 7] input byte size mismatch for input 'B' for model 'M'. Expected 8, got 0 ")
    assert "must be at least 1" in told
    texts = signature(SignatureInput("A", dtypes.BYTES, (2,)), batch=8)
    told = refusal(texts, spec("A", (0, 2), dtypes.BYTES))
    assert told.startswith(f"{LABEL}expected 2 string elements for inference input 'A' for model 'M', got 0 ")


def test_batches_that_do_not_match() -> None:
    told = refusal(BATCHED, spec("A", (1, 16)), spec("B", (2, 2)))
    assert re.fullmatch(re.escape(LABEL) + r"input '[AB]' batch size does not match other inputs for 'M'", told)


def test_refusals_that_do_not_name_the_request() -> None:
    assert refusal(PAIR, A, spec("C", (4,))) == "unexpected inference input 'C' for model 'M'"
    assert refusal(PAIR, A, B, outputs=[RequestedOutput("X")]) == "unexpected inference output 'X' for model 'M'"


def test_the_size_of_the_batch_is_looked_at_before_the_shapes() -> None:
    told = refusal(BATCHED, spec("A", (9, 1)), spec("B", (9, 2)))
    assert told == f"{LABEL}inference request batch-size must be <= 8 for 'M'"


def test_of_two_wrong_inputs_the_last_is_told() -> None:
    told = refusal(PAIR, spec("B", (3,)), spec("A", (2,)))
    assert told == f"{LABEL}unexpected shape for input 'A' for model 'M'. Expected [4], got [2]. "


def test_outputs_are_looked_at_before_inputs() -> None:
    told = refusal(PAIR, A, spec("C", (4,)), outputs=[RequestedOutput("X")])
    assert told == "unexpected inference output 'X' for model 'M'"


def test_batch_key_of_fixed_shapes_is_always_the_same() -> None:
    keys = {bound(BATCHED, spec("A", (rows, 16)), spec("B", (rows, 2))).batch_key for rows in (1, 5)}
    assert len(keys) == 1


def test_batch_key_of_variable_shapes() -> None:
    of = signature(SignatureInput("A", dtypes.FP32, (-1,)), batch=8)
    one, same, other = (bound(of, spec("A", shape)).batch_key for shape in ((1, 3), (5, 3), (1, 4)))
    assert one == same
    assert one != other


def test_batch_key_of_ragged_inputs_ignores_the_shape() -> None:
    of = signature(SignatureInput("A", dtypes.FP32, (-1,), ragged=True), batch=8)
    assert bound(of, spec("A", (1, 3))).batch_key == bound(of, spec("A", (1, 4))).batch_key


def test_batch_key_of_optional_inputs_says_which_are_there() -> None:
    of = signature(
        SignatureInput("A", dtypes.FP32, (3,)), SignatureInput("B", dtypes.FP32, (3,), optional=True), batch=8
    )
    a, b = spec("A", (1, 3)), spec("B", (1, 3))
    assert bound(of, a).batch_key != bound(of, a, b).batch_key
    assert bound(of, a, b).batch_key == bound(of, b, a).batch_key


def check(datatype: DataType, shape: tuple[int, ...], data: bytes, id: str = "") -> str | None:
    of = signature(SignatureInput("IN", datatype, (-1,) * len(shape)))
    header = bound(of, spec("IN", shape, datatype))
    for buffer in (data, bytearray(data), memoryview(data)):
        error = of.check_data(InferenceRequest(header, [buffer], Caller(), 0, id))
    return None if error is None else error.message


def test_bytes_of_a_fixed_type() -> None:
    assert check(dtypes.FP32, (2,), bytes(8)) is None
    assert check(dtypes.FP32, (0,), b"") is None
    told = "input byte size mismatch for input 'IN' for model 'M'. Expected 8, got 7"
    assert check(dtypes.FP32, (2,), bytes(7)) == LABEL + told
    assert check(dtypes.FP32, (2,), bytes(7), "x") == "[request id: x] " + told


WHERE = "for inference input 'IN' for model 'M'"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (join_bytes([b"a"]), f"expected 2 string elements {WHERE}, got 1"),
        (b"", f"expected 2 string elements {WHERE}, got 0"),
        (join_bytes([b"a"] * 3), f"unexpected number of string elements 3 {WHERE}, expecting 2"),
        (
            join_bytes([b"a"]) + b"\1\0",
            f"incomplete string length indicator {WHERE}, expecting 4 bytes but only 2 bytes available. "
            "Please make sure the string length indicator is in one buffer.",
        ),
    ],
)
def test_texts_that_do_not_fit(data: bytes, expected: str) -> None:
    assert check(dtypes.BYTES, (2,), data) == LABEL + expected


@pytest.mark.parametrize("size", [3, 0xFFFFFFFF])
def test_a_text_that_is_cut_off(size: int) -> None:
    told = check(dtypes.BYTES, (1,), size.to_bytes(4, "little") + b"ab")
    assert told == (
        f"incomplete string data for inference input 'IN', expecting string of length {size} but only 2 bytes available"
    )


@given(st.lists(st.binary(max_size=20), max_size=6), st.integers(0, 8), st.data())
def test_texts_fit_exactly_if_whole_and_as_many(elements: list[bytes], expected: int, data: st.DataObject) -> None:
    raw = join_bytes(elements)
    assert (check(dtypes.BYTES, (expected,), raw) is None) == (len(elements) == expected)
    if raw and (cut := data.draw(st.integers(0, len(raw) - 1))) is not None:
        ends = [len(join_bytes(elements[:count])) for count in range(len(elements))]
        assert (check(dtypes.BYTES, (len(elements),), raw[:cut]) is None) is False
        if cut in ends:
            assert check(dtypes.BYTES, (ends.index(cut),), raw[:cut]) is None


def test_lists_as_triton_prints_them() -> None:
    assert shape_text([1, -1, 16]) == "[1,-1,16]"
    assert shape_text([]) == "[]"
    assert names_text(["A", "B"]) == "['A','B']"
    assert names_text([]) == "[]"
