"""What a request asks of a language model, out of its tensors and parameters."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nerite.backends.llm import sampling
from nerite.backends.llm.images import MOST_BYTES, MOST_IMAGES
from nerite.backends.llm.sampling import SamplingParameters
from nerite.core.errors import InvalidArgument, Unsupported
from nerite.core.request import InferenceRequest
from nerite.core.tensor import Buffer, decode_bytes


@dataclass(frozen=True)
class Call:
    """A request, understood."""

    prompt: str
    sampling: SamplingParameters
    stream: bool
    """Whether each step is answered, or everything at once."""
    prepend: str
    """What stands before the text of the answer: the prompt, or nothing."""
    extras: frozenset[str]
    """The outputs that are wanted beside the text."""
    special_tokens: bool = True
    """Whether the tokenizer adds to the prompt what it adds to any text."""
    images: tuple[bytes, ...] = ()
    """Files, in the order in which the prompt speaks of them."""


def read(request: InferenceRequest) -> Call:
    """Return what ``request`` asks for. Raises ``NeriteError``."""
    given = dict(zip((spec.name for spec in request.header.inputs), request.data, strict=True))
    if "embedding_request" in given:
        raise Unsupported("the model makes no embeddings: leave the input 'embedding_request' out")
    prompt = _text(given, "text_input")
    stream = _flag(given, "stream")
    excluded = _flag(given, "exclude_input_in_output", default=stream)
    if stream and not excluded:
        raise InvalidArgument("When streaming, `exclude_input_in_output` = False is not allowed.")
    if "sampling_parameters" in given:
        wanted = sampling.from_json(_text(given, "sampling_parameters"))
    else:
        wanted = sampling.from_parameters(request.header.parameters)
    extras = frozenset(
        name.removeprefix("return_") for name in given if name.startswith("return_") and _flag(given, name)
    )
    special = _flag(given, "add_special_tokens", default=True)
    return Call(prompt, wanted, stream, "" if excluded else prompt, extras, special, tuple(_images(request)))


def _images(request: InferenceRequest) -> Iterator[bytes]:
    """Yield the files that are there in base64."""
    for spec, data in zip(request.header.inputs, request.data, strict=True):
        if spec.name == "image":
            if spec.elements > MOST_IMAGES:
                raise InvalidArgument(f"'image' has {spec.elements} images, and may have {MOST_IMAGES}")
            if len(data) > MOST_BYTES:
                raise InvalidArgument(f"'image' has {len(data)} bytes, and may have {MOST_BYTES}")
            for place, encoded in enumerate(decode_bytes(data, spec.elements)):
                try:
                    yield base64.b64decode(encoded, validate=True)
                except binascii.Error as error:
                    raise InvalidArgument(f"'image' {place} is no base64: {error}") from None


def _text(given: Mapping[str, Buffer], name: str) -> str:
    (element,) = decode_bytes(given[name], 1)
    try:
        return bytes(element).decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"'{name}' is no UTF-8: {error}") from None


def _flag(given: Mapping[str, Buffer], name: str, *, default: bool = False) -> bool:
    return bool(memoryview(given[name]).tobytes()[0]) if name in given else default
