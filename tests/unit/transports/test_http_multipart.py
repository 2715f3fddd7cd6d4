"""Forms, taken apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.core.errors import InvalidArgument
from nerite.transports.http import files

TYPE = "multipart/form-data; boundary=xyz"
NAMED = b"Content-Disposition: form-data; name=A"


def form(*parts: tuple[str, bytes], boundary: bytes = b"xyz") -> bytes:
    """A form of parts, each its headers and its data."""
    made = [b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, headers.encode(), data) for headers, data in parts]
    return b"".join(made) + b"--%b--\r\n" % boundary


def parsed(body: bytes, content_type: str = TYPE) -> list[tuple[str, str, bytes]]:
    return [
        (part.name, part.media_type, bytes(part.data)) for part in files.parse_multipart(content_type, memoryview(body))
    ]


def test_a_file_and_a_value() -> None:
    body = form(
        ('Content-Disposition: form-data; name="IMAGE"; filename="cat.jpg"\r\nContent-Type: Image/JPEG', b"\xff\r\n\0"),
        ('content-disposition:form-data;name="THRESHOLD"', b"0.5"),
        ("Content-Disposition: form-data; filename=x.bin; name=RAW", b""),
        (r'Content-Disposition: form-data; filename="a\"; name=\"b"; name="C";', b"2"),
    )
    assert parsed(body) == [
        ("IMAGE", "image/jpeg", b"\xff\r\n\0"),
        ("THRESHOLD", "", b"0.5"),
        ("RAW", "application/octet-stream", b""),
        ("C", "application/octet-stream", b"2"),
    ]


def test_what_stands_before_and_behind_is_no_part() -> None:
    body = b"hello\r\n" + form(('Content-Disposition: form-data; name="A"', b"1")) + b"bye"
    assert parsed(body) == [("A", "", b"1")]
    assert parsed(b"--xyz--") == []


@pytest.mark.parametrize("content_type", ['multipart/form-data; charset=utf-8; boundary="x y"', "a;Boundary=xyz; b=c"])
def test_ways_to_say_the_boundary(content_type: str) -> None:
    boundary = b"x y" if "x y" in content_type else b"xyz"
    body = form(('Content-Disposition: form-data; name="A"', b"1"), boundary=boundary)
    assert parsed(body, content_type) == [("A", "", b"1")]


@given(st.lists(st.binary(max_size=30), max_size=4))
def test_data_are_any_bytes(data: list[bytes]) -> None:
    data = [each for each in data if b"--xyz" not in each]
    body = form(*(('Content-Disposition: form-data; name="A"', each) for each in data))
    assert parsed(body) == [("A", "", each) for each in data]


@pytest.mark.parametrize(
    ("body", "content_type", "told"),
    [
        (b"", "multipart/form-data", "a body of type multipart/form-data needs a boundary in its Content-Type"),
        (b"", TYPE, "the body is not a complete form"),
        (b"--xyz\r\nContent-Disposition: form-data; name=A\r\n\r\n1\r\n--xy", TYPE, "the body is not a complete form"),
        (form(("Content-Type: text/plain", b"1")), TYPE, "part 1 of the form has no name"),
        (b"--xyz\r\nnothing\r\n--xyz--", TYPE, "part 1 of the form has no name"),
        (b"", TYPE + "; boundary=b", "a body of type multipart/form-data needs a boundary"),
        (b"--xyz1\r\n" + NAMED + b"\r\n\r\n1\r\n--xyz--", TYPE, "part 1 of the form does not begin"),
        (form(("A: b\r\n" * 40 + NAMED.decode(), b"1")), TYPE, "part 1 of the form has more than"),
        (form((f"{NAMED.decode()}\r\n" * 2 + "A: b", b"1")), TYPE, "part 1 of the form has more than"),
        *(
            (form((f"Content-Disposition: {odd}", b"1")), TYPE, "part 1 of the form has a Content-Disposition")
            for odd in (
                "form-data; name=A; name=B",
                'form-data; name="A"B',
                "form-data; name=A; name*=UTF-8''B",
                'form-data; filename="x; name=A',
                "formdata; name=A",
            )
        ),
        (b"--xyz\r\nA: \xff\r\n\r\n1\r\n--xyz--", TYPE, "the head of part 1 of the form is not valid UTF-8"),
    ],
)
def test_forms_that_are_none(body: bytes, content_type: str, told: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parsed(body, content_type)
    assert caught.value.message.startswith(told)
