"""What a request asks of a language model, out of its tensors and parameters."""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import numpy as np

from nerite.config.mistake import nearest
from nerite.core.errors import InvalidArgument, NeriteError, Unsupported
from nerite.core.request import InferenceRequest
from nerite.core.tensor import Array, Buffer, decode_bytes
from nerite.core.text import MAX_NAME, MAX_VALUE
from nerite.llm import structured_output
from nerite.llm.structured_output import Grammar

# How the tokens of a request are chosen: sampling parameters under vLLM's names. Pure.
#
# A name that nobody knows is refused, with the one that was meant; so is one that vLLM knows and no engine of ours
# does, unless its value asks for nothing.

MOST_SEQUENCES: Final = 128
"""Of one prompt. Each takes memory before its first token, and a place in the batch."""
MOST_STOPS: Final = 64
"""All of them are looked for in the text after each step."""
MOST_STOP_CHARACTERS: Final = 4096
"""Of all stop strings together."""
MOST_TOKENS: Final = 1024
"""In ``stop_token_ids`` and ``logit_bias``."""
MOST_ALLOWED: Final = 65_536
"""In ``allowed_token_ids``."""
MOST_BAD_WORDS: Final = 256
LONGEST: Final = MAX_VALUE
"""Bytes of ``sampling_parameters``, which the server's event loop reads, too."""
MOST_PARAMETERS: Final = 256
"""Of a request whose sampling parameters are among them."""

_Number = TypeVar("_Number", int, float)

_CLOSE: Final = 0.8
"""A custom parameter of a request that is as close to one of ours was meant to be that."""
_MOST_BIAS: Final = 100
"""That is certain already: engines count with numbers in which much more is no number any more."""


@dataclass(frozen=True)
class SamplingParameters:
    """What a request may say. The defaults are those of vLLM."""

    n: int = 1
    """Sequences for one prompt."""
    max_tokens: int | None = 16
    """None: as many as the context has room for."""
    min_tokens: int = 0
    """Before that the model cannot say that it is done, and nothing stops it."""
    temperature: float = 1.0
    """0: always the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all of them."""
    min_p: float = 0.0
    seed: int | None = None
    """None: ever another."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many alternatives to tell of, beside the chosen token; None: not even that one's."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens, and what is added to how likely each is."""
    allowed_token_ids: tuple[int, ...] | None = None
    """None: all of them."""
    bad_words: tuple[str, ...] = ()
    """What the text must not have."""
    truncate_prompt_tokens: int | None = None
    """Of a longer prompt the last so many; -1: as many as there is room for."""
    lora_name: str = ""
    grammar: Grammar | None = None
    """What the text has to be an instance of."""
    priority: int = 0
    """Those of a lower number go first. Who asks can only say that a request may wait longer."""


_LACKING: Final[Mapping[str, Any]] = {
    "best_of": 1,
    "detokenize": True,
    "extra_args": None,
    "logits_processors": None,
    "output_kind": None,
    "prompt_logprobs": None,
}
"""What vLLM knows and we do not, and the value that asks for nothing."""

_STRUCTURED: Final = ("guided_decoding", "structured_outputs")
"""vLLM's earlier and later name for ``grammar``."""


def from_json(text: str | bytes) -> SamplingParameters:
    """Read the value of ``sampling_parameters``. Raises ``NeriteError``."""
    if len(text) > LONGEST:
        raise InvalidArgument(f"'sampling_parameters' has {len(text)} bytes, and may have {LONGEST}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"'sampling_parameters' is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument("'sampling_parameters' has to be a JSON object, such as {\"max_tokens\": 64}")
    return from_mapping(value)


def from_parameters(parameters: Mapping[str, Any]) -> SamplingParameters:
    """Read the parameters of a request. Those that look like none of ours are somebody else's. Raises ``NeriteError``.

    They have no lists: ``stop`` is one string.
    """
    if len(parameters) > MOST_PARAMETERS:
        raise InvalidArgument(f"the request has {len(parameters)} parameters, and may have {MOST_PARAMETERS}")
    known = (*_READERS, *_STRUCTURED, *_LACKING)
    ours = {name: value for name, value in parameters.items() if name in known or nearest(name, known, _CLOSE)}
    return from_mapping(ours)


def from_mapping(given: Mapping[str, Any]) -> SamplingParameters:
    """Return the parameters that ``given`` says. Raises ``InvalidArgument``, ``Unsupported``."""
    read: dict[str, Any] = {}
    for name, value in given.items():
        if name in _READERS:
            if value is not None or name in ("max_tokens", "seed", "logprobs"):
                read[name] = _READERS[name](name, value)
        elif name in _STRUCTURED:
            if value is not None:
                if "grammar" in read:
                    raise InvalidArgument(
                        f"{' and '.join(map(repr, _STRUCTURED))} are one thing: leave one of them out"
                    )
                read["grammar"] = structured_output.read_structured(name, value)
        elif name not in _LACKING:
            raise _unknown(name)
        elif value is not None and value != _LACKING[name]:
            raise Unsupported(f"the sampling parameter '{name}' is not offered: take it out")
    made = SamplingParameters(**read)
    _check(made)
    return made


def _check(made: SamplingParameters) -> None:
    cut = made.truncate_prompt_tokens
    for name, holds, wanted in (
        ("n", 1 <= made.n <= MOST_SEQUENCES, f"1 to {MOST_SEQUENCES}"),
        ("max_tokens", made.max_tokens is None or made.max_tokens >= 1, "at least 1"),
        ("min_tokens", 0 <= made.min_tokens <= (made.max_tokens or math.inf), "0 to max_tokens"),
        ("temperature", made.temperature >= 0, "0 or more"),
        ("top_p", 0 < made.top_p <= 1, "above 0, and 1 at most"),
        ("min_p", 0 <= made.min_p < 1, "0 or more, and below 1"),
        ("presence_penalty", abs(made.presence_penalty) <= 2, "-2 to 2"),
        ("frequency_penalty", abs(made.frequency_penalty) <= 2, "-2 to 2"),
        ("repetition_penalty", made.repetition_penalty > 0, "above 0"),
        ("logprobs", made.logprobs is None or made.logprobs >= 0, "0 or more"),
        ("priority", made.priority >= 0, "0 or more: a request can only be put behind others"),
        ("seed", made.seed is None or 0 <= made.seed < 2**63, "0 to 2**63 - 1"),
        ("truncate_prompt_tokens", cut is None or cut == -1 or cut > 0, "above 0, or -1 for what has room"),
        ("stop", all(made.stop), "text, and not empty"),
        ("stop", len(made.stop) <= MOST_STOPS, f"no more than {MOST_STOPS} texts"),
        (
            "stop",
            sum(map(len, made.stop)) <= MOST_STOP_CHARACTERS,
            f"no more than {MOST_STOP_CHARACTERS} characters in all",
        ),
        ("stop_token_ids", all(token >= 0 for token in made.stop_token_ids), "numbers of tokens"),
        ("stop_token_ids", len(made.stop_token_ids) <= MOST_TOKENS, f"no more than {MOST_TOKENS} tokens"),
        ("logit_bias", len(made.logit_bias) <= MOST_TOKENS, f"for no more than {MOST_TOKENS} tokens"),
        ("logit_bias", all(abs(bias) <= _MOST_BIAS for _, bias in made.logit_bias), f"-{_MOST_BIAS} to {_MOST_BIAS}"),
        ("allowed_token_ids", made.allowed_token_ids != (), "at least one token, or left out"),
        ("allowed_token_ids", len(made.allowed_token_ids or ()) <= MOST_ALLOWED, f"no more than {MOST_ALLOWED} tokens"),
        ("bad_words", all(made.bad_words), "text, and not empty"),
        ("bad_words", len(made.bad_words) <= MOST_BAD_WORDS, f"no more than {MOST_BAD_WORDS} texts"),
        ("bad_words", all(len(each) <= MAX_NAME for each in made.bad_words), f"of {MAX_NAME} characters at the most"),
    ):
        if not holds:
            raise _wrong(name, getattr(made, name), wanted)


def _unknown(name: str) -> NeriteError:
    meant = nearest(name, (*_READERS, *_STRUCTURED, *_LACKING))
    remedy = f"Did you mean {meant}?" if meant else f"There are: {', '.join(sorted(_READERS))}."
    return InvalidArgument(f"'{name}' is no sampling parameter. {remedy}")


def _wrong(name: str, value: Any, wanted: str) -> InvalidArgument:
    return InvalidArgument(f"'{name}' has to be {wanted}, got {reprlib.repr(value)}")


def _number(name: str, value: Any, kind: Callable[[Any], _Number], wanted: str) -> _Number:
    """Read a number; also as text, as parameters of requests may have it."""
    try:
        if isinstance(value, bool):
            raise ValueError
        number = kind(value)
        if not math.isfinite(number) or (not isinstance(value, str) and number != value):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise _wrong(name, value, wanted) from None
    return number


def _integer(name: str, value: Any) -> int:
    number = _number(name, value, int, "a whole number")
    if abs(number) >= 2**63:
        raise _wrong(name, value, "a number of 64 bits")
    return number


def _optional(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value)


def _float(name: str, value: Any) -> float:
    return _number(name, value, float, "a number")


def _top_k(name: str, value: Any) -> int:
    """Read a number; vLLM has two values for "all"."""
    number = _integer(name, value)
    if number < -1:
        raise _wrong(name, value, "a number of tokens, or -1 for all")
    return max(number, 0)


def _seed(name: str, value: Any) -> int | None:
    number = _optional(name, value)
    return None if number == -1 else number


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "text")
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise _wrong(name, value, "text, or a list of it")
    return tuple(values)


def _integers(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _wrong(name, value, "a list of numbers")
    return tuple(_integer(name, each) for each in value)


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Read an object whose keys are tokens: in JSON they are text."""
    if not isinstance(value, dict) or not all(token.isdecimal() for token in value):
        raise _wrong(name, value, 'an object such as {"1234": -100}, whose keys are numbers of tokens')
    return tuple((_integer(name, token), _float(name, bias)) for token, bias in value.items())


_READERS: Final[Mapping[str, Callable[[str, Any], Any]]] = cast(
    Mapping[str, Callable[[str, Any], Any]],
    {
        "n": _integer,
        "max_tokens": _optional,
        "min_tokens": _integer,
        "temperature": _float,
        "top_p": _float,
        "top_k": _top_k,
        "min_p": _float,
        "seed": _seed,
        "presence_penalty": _float,
        "frequency_penalty": _float,
        "repetition_penalty": _float,
        "stop": _texts,
        "stop_token_ids": _integers,
        "include_stop_str_in_output": _boolean,
        "ignore_eos": _boolean,
        "logprobs": _optional,
        "skip_special_tokens": _boolean,
        "spaces_between_special_tokens": _boolean,
        "logit_bias": _biases,
        "allowed_token_ids": _integers,
        "bad_words": _texts,
        "truncate_prompt_tokens": _optional,
        "lora_name": _text,
        "priority": _integer,
    },
)
"""What reads the value of each field of ``SamplingParameters``."""

# Images in a request: files to pixels. Needs Pillow, and only then imports it.

_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""What people send. Pillow reads more, some of it with the help of programs that should not see strangers' files."""
MOST_IMAGES: Final = 64
"""In a request."""
MOST_BYTES: Final = 64 * 1024 * 1024
"""Of all files of a request together, in base64."""
_MOST_PIXELS: Final = 64 * 1024 * 1024
"""Of one image: three times as many bytes."""
_MOST_TOGETHER: Final = 2 * _MOST_PIXELS
"""Of all images of a request."""


def pixels(files: Sequence[bytes]) -> tuple[Array, ...]:
    """Return the images as arrays of height, width and RGB. Raises ``NeriteError`` for what is no image.

    None is decoded before the sizes of all are known to be within the limits.
    """
    if not files:
        return ()
    try:
        import PIL.Image
    except ImportError:
        raise Unsupported(
            "images are decoded by Pillow, which is not installed where the model runs: pip install 'nerite[image]'"
        ) from None
    place = 0
    try:
        together, images = 0, []
        for place, file in enumerate(files):
            image = PIL.Image.open(io.BytesIO(file), formats=_FORMATS)
            size = image.width * image.height
            together += size
            if size > _MOST_PIXELS or together > _MOST_TOGETHER:
                which, most = ("", _MOST_PIXELS) if size > _MOST_PIXELS else (" with those before it", _MOST_TOGETHER)
                raise InvalidArgument(
                    f"'image' {place} is {image.width} wide and {image.height} high, and{which} may have {most} pixels"
                )
            images.append(image)
        decoded: list[Array] = []
        while images:
            place = len(decoded)
            with images.pop(0) as image:
                decoded.append(np.array(image.convert("RGB")))
    except InvalidArgument:
        raise
    except PIL.UnidentifiedImageError:
        raise InvalidArgument(f"'image' {place} is none of {', '.join(_FORMATS)}") from None
    except Exception as error:  # Pillow's readers raise whatever a broken file leads them to
        raise InvalidArgument(f"'image' {place} can not be read: {type(error).__name__}: {error}") from None
    return tuple(decoded)


@dataclass(frozen=True)
class LlmCall:
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


def read_call(request: InferenceRequest) -> LlmCall:
    """Return what ``request`` asks for. Raises ``NeriteError``."""
    given = dict(zip((spec.name for spec in request.header.inputs), request.data, strict=True))
    if "embedding_request" in given:
        raise Unsupported("the model makes no embeddings: leave the input 'embedding_request' out")
    prompt = _call_text(given, "text_input")
    stream = _flag(given, "stream")
    excluded = _flag(given, "exclude_input_in_output", default=stream)
    if stream and not excluded:
        raise InvalidArgument("When streaming, `exclude_input_in_output` = False is not allowed.")
    if "sampling_parameters" in given:
        wanted = from_json(_call_text(given, "sampling_parameters"))
    else:
        wanted = from_parameters(request.header.parameters)
    extras = frozenset(
        name.removeprefix("return_") for name in given if name.startswith("return_") and _flag(given, name)
    )
    special = _flag(given, "add_special_tokens", default=True)
    return LlmCall(prompt, wanted, stream, "" if excluded else prompt, extras, special, tuple(_images(request)))


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


def _call_text(given: Mapping[str, Buffer], name: str) -> str:
    (element,) = decode_bytes(given[name], 1)
    try:
        return bytes(element).decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"'{name}' is no UTF-8: {error}") from None


def _flag(given: Mapping[str, Buffer], name: str, *, default: bool = False) -> bool:
    return bool(memoryview(given[name]).tobytes()[0]) if name in given else default
