from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from nerite.core import tensor as dtypes
from nerite.core.tensor import (
    DataType,
    TensorSpec,
    buffer_of,
    decode_bytes,
    encode_bytes,
    from_array,
    join_bytes,
    to_array,
)

NUMBERS = [datatype for datatype in dtypes.ALL if datatype not in (dtypes.BYTES, dtypes.BF16)]
SHAPES = npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Any numeric array: either byte order, contiguous or not."""
    datatype = draw(st.sampled_from(NUMBERS))
    array = draw(npst.arrays(datatype.numpy.newbyteorder(draw(st.sampled_from("<>"))), draw(SHAPES)))
    if array.ndim and draw(st.booleans()):
        array = np.moveaxis(array, 0, -1)[..., :: draw(st.sampled_from((1, -1, 2)))]
    return array


@given(arrays())
def test_an_array_survives_the_wire(array: np.ndarray[Any, Any]) -> None:
    spec, data = from_array("x", array)
    assert (spec.name, spec.shape) == ("x", array.shape)
    assert spec.byte_size == len(data) == array.nbytes
    assert bytes(data) == array.astype(spec.datatype.numpy).tobytes()
    back = to_array(spec, data)
    assert back.dtype == spec.datatype.numpy
    assert back.shape == array.shape
    np.testing.assert_array_equal(back, array)


def test_numbers_are_not_copied_where_their_memory_allows() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    spec, data = from_array("x", array)
    assert isinstance(data, memoryview)
    to_array(spec, data)[0, 0] = 7
    assert array[0, 0] == 7


def test_an_array_is_as_writable_as_its_bytes() -> None:
    spec = TensorSpec("x", dtypes.INT32, (2,))
    assert to_array(spec, bytearray(8)).flags.writeable
    assert not to_array(spec, bytes(8)).flags.writeable


def test_a_buffer_that_begins_at_an_odd_address() -> None:
    raw = bytearray(9)
    raw[1:] = np.array([1, 2], np.int32).tobytes()
    assert to_array(TensorSpec("x", dtypes.INT32, (2,)), memoryview(raw)[1:]).tolist() == [1, 2]


def test_bf16_is_its_words() -> None:
    words = to_array(TensorSpec("x", dtypes.BF16, (2,)), b"\x80\x3f\x00\x40")
    assert words.dtype == np.uint16
    assert words.tolist() == [0x3F80, 0x4000]


def test_buffer_of_converts_what_is_asked() -> None:
    assert bytes(buffer_of(np.array([1, 2]), dtypes.UINT8)) == b"\x01\x02"


@pytest.mark.parametrize("numpy", ["complex64", "datetime64[s]"])
def test_a_type_that_the_protocol_lacks_is_refused(numpy: str) -> None:
    with pytest.raises(TypeError, match=r"tensor 'x' has data type .*, which has no equivalent in the protocol"):
        from_array("x", np.zeros(2, numpy))


@given(st.lists(st.binary(max_size=300), max_size=8), st.data())
def test_texts_survive_the_wire(elements: list[bytes], data: st.DataObject) -> None:
    array = np.empty(len(elements), object)
    array[:] = elements
    shape = data.draw(st.sampled_from([(len(elements),), (1, len(elements)), (len(elements), 1)]))
    spec, raw = from_array("x", array.reshape(shape))
    assert (spec.datatype, spec.shape, spec.byte_size) == (dtypes.BYTES, shape, -1)
    assert bytes(raw) == b"".join(len(element).to_bytes(4, "little") + element for element in elements)
    for buffer in (raw, bytearray(raw), memoryview(raw)):
        back = to_array(spec, buffer)
        assert back.shape == shape
        assert back.reshape(-1).tolist() == elements


def test_texts_of_every_kind() -> None:
    assert encode_bytes(np.array(["é", 5, None, b"\xff"], object)) == join_bytes(["é".encode(), b"5", b"None", b"\xff"])
    assert encode_bytes(np.array(["é", "ab"])) == join_bytes(["é".encode(), b"ab"])
    assert encode_bytes(np.array([b"a\0b", b"c"])) == join_bytes([b"a\0b", b"c"])


def test_decode_gives_as_many_as_are_asked_for() -> None:
    assert decode_bytes(join_bytes([b"a", b"bc"]), 2).tolist() == [b"a", b"bc"]
    assert decode_bytes(b"", 0).shape == (0,)


@pytest.mark.parametrize(
    ("datatype", "shape", "elements", "byte_size"),
    [
        (dtypes.FP32, (2, 3), 6, 24),
        (dtypes.FP32, (), 1, 4),
        (dtypes.BOOL, (0, 7), 0, 0),
        (dtypes.BYTES, (2, 3), 6, -1),
        (dtypes.BYTES, (0,), 0, -1),
        (dtypes.BF16, (3,), 3, 6),
    ],
)
def test_sizes(datatype: DataType, shape: tuple[int, ...], elements: int, byte_size: int) -> None:
    spec = TensorSpec("x", datatype, shape)
    assert (spec.elements, spec.byte_size) == (elements, byte_size)


def test_specifications_compare_by_value() -> None:
    spec = TensorSpec("x", dtypes.FP32, (1, 2))
    assert spec == TensorSpec("x", dtypes.FP32, (1, 2))
    assert hash(spec) == hash(TensorSpec("x", dtypes.FP32, (1, 2)))
    others = [
        TensorSpec("y", dtypes.FP32, (1, 2)),
        TensorSpec("x", dtypes.FP64, (1, 2)),
        TensorSpec("x", dtypes.FP32, (2, 1)),
        ("x", dtypes.FP32, (1, 2)),
    ]
    assert all(spec != other for other in others)
    assert repr(spec) == "TensorSpec('x', FP32, [1, 2])"
