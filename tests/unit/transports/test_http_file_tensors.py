"""What a part of a form, or a body that is a file, is to an input."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_http_pixels import COLOURS, encoded

from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, InvalidArgument
from nerite.core.signature import SignatureInput
from nerite.core.tensor import DataType, TensorSpec, join_bytes
from nerite.transports.http import files
from nerite.transports.http.files import FormPart


def read(
    datatype: DataType, dims: tuple[int, ...], media_type: str, data: bytes, batched: bool = False, half: bool = False
) -> tuple[TensorSpec, bytes]:
    part = FormPart("X", media_type, memoryview(data))
    spec, made = files.read_file(SignatureInput("X", datatype, dims), batched, part, 1_000_000, half)
    assert spec.byte_size in (-1, len(made))
    return spec, bytes(made)


@pytest.mark.parametrize("media_type", ["image/jpeg", "audio/wav", "video/mp4", "application/pdf"])
def test_files(media_type: str) -> None:
    assert files.is_file(media_type)


@pytest.mark.parametrize(
    "media_type",
    ["", "application/json", "application/octet-stream", "text/plain", "application/x-www-form-urlencoded", "images"],
)
def test_types_that_mean_what_they_mean_to_triton(media_type: str) -> None:
    assert not files.is_file(media_type)


@pytest.mark.parametrize(("dims", "batched"), [((1,), False), ((1,), True), ((-1,), False), ((-1, 1), True)])
@pytest.mark.parametrize("media_type", ["image/jpeg", "application/octet-stream", "", "text/plain", "application/json"])
def test_a_file_is_the_one_element_of_bytes(dims: tuple[int, ...], batched: bool, media_type: str) -> None:
    spec, data = read(dtypes.BYTES, dims, media_type, b"\xff\0abc", batched)
    assert (spec.shape, data) == ((1,) * (len(dims) + batched), join_bytes([b"\xff\0abc"]))


def test_an_image_is_pixels() -> None:
    for batched in (False, True):
        spec, data = read(dtypes.UINT8, (-1, -1, 3), "image/png", encoded(), batched)
        assert (spec.shape, data) == ((1, 2, 3, 3) if batched else (2, 3, 3), COLOURS.tobytes())
    spec, data = read(dtypes.UINT8, (3, -1, -1), "image/png", encoded())
    assert (spec.shape, data) == ((3, 2, 3), COLOURS.transpose(2, 0, 1).tobytes())


def test_an_image_is_bytes_where_the_model_decodes_it() -> None:
    raw = encoded()
    for dims in ((-1,), (len(raw),)):
        spec, data = read(dtypes.UINT8, dims, "image/png", raw, batched=True)
        assert (spec.shape, data) == ((1, len(raw)), raw)


@pytest.mark.parametrize(
    ("datatype", "dims", "media_type"),
    [
        (dtypes.FP32, (3, 224, 224), "image/jpeg"),
        (dtypes.UINT8, (-1, -1, 3), "audio/wav"),
        (dtypes.UINT8, (2,), "image/jpeg"),
        (dtypes.BYTES, (2,), "image/jpeg"),
        (dtypes.FP32, (-1,), "application/octet-stream"),
    ],
)
def test_inputs_that_take_no_such_file(datatype: DataType, dims: tuple[int, ...], media_type: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read(datatype, dims, media_type, b"abc")
    shape = str(list(dims)).replace(" ", "")
    assert caught.value.message.startswith(
        f"input 'X' is {datatype.name} {shape}, which takes no file of type '{media_type}'. A file can be "
    )


def test_a_value_that_would_have_to_be_several_strings() -> None:
    with pytest.raises(InvalidArgument, match=r"input 'X' is BYTES \[2\], which takes no single string. A file can be"):
        read(dtypes.BYTES, (2,), "", b"abc")


@pytest.mark.parametrize(
    ("text", "dims", "batched", "shape"),
    [
        (b"0.5", (1,), False, (1,)),
        (b" 0.5 ", (1,), True, (1, 1)),
        (b"[1, 2, 3]", (-1,), True, (1, 3)),
        (b"[[1, 2], [3, 4]]", (2,), True, (2, 2)),
        (b"[]", (-1,), False, (0,)),
    ],
)
@pytest.mark.parametrize("media_type", ["", "application/json"])
def test_values_are_json(
    text: bytes, dims: tuple[int, ...], batched: bool, shape: tuple[int, ...], media_type: str
) -> None:
    spec, data = read(dtypes.FP32, dims, media_type, text, batched)
    assert spec.shape == shape
    assert np.frombuffer(data, np.float32).tolist() == np.array(json.loads(text), np.float32).reshape(-1).tolist()


def test_values_of_half_precision() -> None:
    assert read(dtypes.BF16, (1,), "", b"-1.5", half=True)[1] == b"\xc0\xbf"
    with pytest.raises(InvalidArgument, match="--http-json-half-precision"):
        read(dtypes.BF16, (1,), "", b"-1.5")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"one", "failed to parse the request JSON buffer: Invalid value. at 0"),
        (b'"1"', "Unable to parse 'data': attempt to access JSON non-number as double"),
        (b"[1, 2]", "The schema can not convert input 'X' to tensor with proper shape"),
    ],
)
def test_values_that_are_wrong(text: bytes, told: str) -> None:
    with pytest.raises((Internal, InvalidArgument)) as caught:
        read(dtypes.FP32, (1,), "", text)
    assert caught.value.message == told
