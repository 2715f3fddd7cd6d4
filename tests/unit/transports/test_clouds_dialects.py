"""Where SageMaker and Vertex AI say how long the JSON is, and which errors mean that there is no memory left."""

from __future__ import annotations

import pytest

from nerite.core.errors import Internal, InvalidArgument
from nerite.transports.clouds import SAGEMAKER, SAGEMAKER_MODELS, VERTEX
from nerite.transports.http import head
from nerite.transports.http.head import RequestHead

KIND = "application/vnd.sagemaker-triton.binary+json;json-header-size="


def sent(content_type: str, length: int = 100) -> RequestHead:
    return head.parse_head(
        f"POST / HTTP/1.1\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\n\r\n".encode()
    )


@pytest.mark.parametrize(
    ("content_type", "size"),
    [
        ("", -1),
        ("application/json", -1),
        ("application/vnd.vertex-ai-triton.binary+json;json-header-size=7", -1),
        (KIND.upper() + "7", -1),
        (KIND + "7", 7),
        (KIND + " 7", 7),
        (KIND + "+7; charset=utf-8", 7),
        (KIND + "0", 0),
        (KIND + "100", 100),
    ],
)
def test_the_size_of_the_json(content_type: str, size: int) -> None:
    assert SAGEMAKER.json_size(sent(content_type)) == size


def test_each_cloud_has_its_own_type() -> None:
    content_type = KIND.replace("sagemaker", "vertex-ai") + "7"
    assert (SAGEMAKER.json_size(sent(content_type)), VERTEX.json_size(sent(content_type))) == (-1, 7)


@pytest.mark.parametrize(
    ("content_type", "text"),
    [
        (f"text/plain, {KIND}7", f"expect MIME type for binary data starts with '{KIND}', got: text/plain, {KIND}7"),
        (KIND, "Unable to parse inference header size, got: "),
        (f"{KIND}x", "Unable to parse inference header size, got: x"),
        (f"{KIND}{'9' * 5000}", f"Unable to parse inference header size, got: {'9' * 99}"),
        (f"{KIND}-1", "inference header size should be in range (0, 100), got: -1"),
        (f"{KIND}101", "inference header size should be in range (0, 100), got: 101"),
        (f"{KIND}{10**40}", f"inference header size should be in range (0, 100), got: {10**40}"),
    ],
)
def test_a_size_that_cannot_be(content_type: str, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SAGEMAKER.json_size(sent(content_type))
    assert caught.value.message.startswith(text)


def test_what_arrives_in_chunks_has_no_length_yet() -> None:
    raw = f"POST / HTTP/1.1\r\nContent-Type: {KIND}7\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert SAGEMAKER.json_size(head.parse_head(raw.encode())) == 7


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("CUDA out of memory. Tried to allocate 2 GiB", 507),
        ("CUDA_OUT_OF_MEMORY", 507),
        ("torch.cuda.OutOfMemoryError", 507),
        ("MemoryError: ", 507),
        ("failed to allocate memory for the arena", 507),
        ("no memory of this", 400),
        ("the room is too small", 400),
    ],
)
def test_no_memory_left(text: str, status: int) -> None:
    assert SAGEMAKER_MODELS.refusal(Internal(text), "text/plain").status == status
    assert SAGEMAKER.refusal(Internal(text), "text/plain").status == 500
