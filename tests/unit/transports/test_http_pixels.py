"""Images to pixels, and images that are none."""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
import PIL.Image
import pytest

from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument, Unsupported
from nerite.core.signature import SignatureInput
from nerite.transports.http import files

COLOURS = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 10
"""Two high, three wide."""


def encoded(array: Any = COLOURS, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(array).save(file, form)
    return file.getvalue()


def image(*dims: int) -> SignatureInput:
    return SignatureInput("IMAGE", dtypes.UINT8, dims)


def read(declared: SignatureInput, data: bytes, max_size: int = 1_000_000) -> Any:
    array = files.read_image(declared, data, max_size)
    assert array.flags.c_contiguous and array.flags.writeable and array.dtype == np.uint8
    return array


def test_height_width_channels() -> None:
    for dims in ((-1, -1, 3), (2, 3, 3), (2, -1, 3)):
        assert np.array_equal(read(image(*dims), encoded()), COLOURS)


def test_height_width() -> None:
    grey = np.arange(6, dtype=np.uint8).reshape(2, 3)
    for dims in ((-1, -1), (2, 3), (-1, -1, 1), (1, -1, -1)):
        assert np.array_equal(read(image(*dims), encoded(grey)).reshape(2, 3), grey)
    assert read(image(-1, -1), encoded()).shape == (2, 3)


def test_channels_height_width() -> None:
    for dims in ((3, -1, -1), (3, 2, -1)):
        assert np.array_equal(read(image(*dims), encoded()), COLOURS.transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("dims", "shape"), [((-1, -1, 1), (2, 3, 1)), ((-1, -1, 4), (2, 3, 4)), ((1, -1, -1), (1, 2, 3))]
)
def test_channels_are_converted(dims: tuple[int, ...], shape: tuple[int, ...]) -> None:
    array = read(image(*dims), encoded())
    assert array.shape == shape
    if 4 in dims:
        assert np.array_equal(array[..., :3], COLOURS) and (array[..., 3] == 255).all()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats(form: str) -> None:
    plain = np.full((8, 8, 3), 128, np.uint8)
    assert np.abs(read(image(8, 8, 3), encoded(plain, form)).astype(int) - 128).max() <= 3


@pytest.mark.parametrize(
    ("declared", "taken"),
    [
        (image(-1, -1, 3), True),
        (image(1, 28, 28), True),
        (image(-1, -1, -1), False),
        (image(28, 28, 2), False),
        (image(-1, -1), True),
        (image(1, 1, 1, 3), False),
        (
            image(
                -1,
            ),
            False,
        ),
        (SignatureInput("IMAGE", dtypes.FP32, (3, 224, 224)), False),
        (SignatureInput("IMAGE", dtypes.BYTES, (1,)), False),
    ],
)
def test_inputs_that_take_pixels(declared: SignatureInput, taken: bool) -> None:
    assert files.takes_image(declared) == taken


@pytest.mark.parametrize(("dims", "shape"), [((2, 2, 3), "[2,3,3]"), ((3, 3, -1), "[3,2,3]"), ((4, -1, 3), "[2,3,3]")])
def test_another_size_is_refused(dims: tuple[int, ...], shape: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read(image(*dims), encoded())
    expected = str(list(dims)).replace(" ", "")
    assert caught.value.message == (
        f"unexpected size of the image for input 'IMAGE': expected {expected}, got {shape} "
        "(it is 3 wide and 2 high; images are not resized)"
    )


def test_more_than_eight_bits() -> None:
    deep = encoded(np.full((2, 2), 40_000, np.uint16))
    with pytest.raises(InvalidArgument, match="has more than 8 bits a channel, which UINT8 can not hold"):
        read(image(-1, -1, 1), deep)


def test_an_image_that_is_small_only_on_the_disk() -> None:
    flat = encoded(np.zeros((400, 400), np.uint8))
    assert len(flat) < 1000
    assert read(image(-1, -1, 3), flat, 480_000).shape == (400, 400, 3)
    with pytest.raises(
        InvalidArgument, match=r"has 480000 bytes of pixels, which exceeds .* Use --http-max-input-size"
    ):
        read(image(-1, -1, 3), flat, 479_999)


def test_pillow_has_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 2)
    with pytest.raises(InvalidArgument, match=r"can not be read: Image size \(6 pixels\) exceeds limit of 4 pixels"):
        read(image(-1, -1, 3), encoded())


@pytest.mark.parametrize("wrong", [b"", b"no image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"])
def test_what_is_no_image(wrong: bytes) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read(image(-1, -1, 3), wrong)
    assert caught.value.message == (
        "the image for input 'IMAGE' can not be read: it is none of JPEG, PNG, WEBP, GIF, BMP, TIFF"
    )


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_images_that_are_cut_off_or_damaged(form: str) -> None:
    """Each is an image or a refusal, and never another error."""
    whole = encoded(np.random.default_rng(7).integers(0, 256, (9, 9, 3), np.uint8), form)
    refused = 0
    for at in range(len(whole)):
        for broken in (whole[:at], whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]):
            try:
                read(image(-1, -1, 3), broken)
            except InvalidArgument:
                refused += 1
    assert refused > 10


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(Unsupported, match=r"pip install 'nerite\[image\]'"):
        read(image(-1, -1, 3), encoded())
