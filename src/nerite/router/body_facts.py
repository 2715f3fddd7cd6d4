"""What the choice of a member needs from a body, found with as little work as possible. Knows no tokenizer.

JSON with few values is parsed, which takes 0.2 ms for a prompt of 400 KB. Of any other JSON, only the members that are
wanted are looked for (``json_members``). What parsers might read differently is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import orjson

from nerite.core.client_text import checked
from nerite.core.errors import InvalidArgument
from nerite.core.text import MAX_NAME
from nerite.router.json_members import MalformedObject, WantedNames, places_of, value_at
from nerite.transports.http.files import parse_multipart

SMALL: Final = 512 * 1024
"""Size up to which JSON is parsed if it has few values."""
_TINY: Final = 16 * 1024
"""Size up to which JSON is parsed in any case: it takes 1.5 ms at most."""
_BYTES_PER_BRACKET: Final = 64
_BYTES_PER_QUOTE: Final = 8
"""JSON with more bytes for each is parsed in 5 ms for a megabyte."""
_WANTED: Final = WantedNames(
    "model", "stream", "max_tokens", "max_completion_tokens", "max_output_tokens", "user", "n", "messages", "prompt",
    "input", "previous_response_id",
)  # fmt: skip
_PARAMETERS: Final = WantedNames("parameters", "sequence_id", "sequence_start", "sequence_end")
_SEQUENCE_NAMES: Final = WantedNames("sequence_id", "sequence_start", "sequence_end")
_PROMPTS: Final = ("messages", "prompt", "input")
_MODEL: Final = b'"model"'
_SEQUENCE: Final = b'"sequence_id"'
_SEQUENCE_TEXTS: Final = (_SEQUENCE, b'"parameters"', b'"sequence_start"', b'"sequence_end"')
_LETTER: Final = re.compile(rb"\\u00[4-7]")
"""An escape that a name might have."""
_MAX_TOKENS: Final = re.compile(rb'"max_(?:completion_)?tokens"\s*:\s*([0-9]{1,9})(?![0-9.eE])')
_LORA: Final = re.compile(rb'"lora_name"\s*:\s*"([^"\\]{1,256})"')
_TEXT_INPUT: Final = b'"text_input"'
_MAX_ANSWER: Final = 10_000_000
_FORM_FIELDS: Final = ("model", "stream", "user")
_FIELD: Final = 4 * MAX_NAME + 1
"""Bytes of a field of a form that are read: more than a name may have."""


class BodyFacts(NamedTuple):
    """What is in the body of a request to the OpenAI API."""

    model: str
    streams: bool = False
    answer_limit: float = 0.0
    """Tokens of the answer that the request allows; 0: it does not say."""
    user: str = ""
    prompt: memoryview = memoryview(b"")
    """The bytes of the prompt, as the body has it."""
    continues: str = ""
    """Id of the response that the request continues."""


class SequenceFacts(NamedTuple):
    """Which sequence a request belongs to."""

    id: str = ""
    start: bool = False
    end: bool = False


def openai_facts(body: memoryview) -> BodyFacts:
    """Read a body of the OpenAI API. Raises ``InvalidArgument`` if it is not JSON, or does not name one model."""
    data = _searchable(body)
    if _is_quick(data, _MODEL):
        fields = _parsed(data)
        if any(key.lower() == "model" != key for key in fields):
            raise InvalidArgument("the body has a member 'model' in uppercase letters, which some servers read, too")
        start = next((at for key in _PROMPTS if (at := data.find(b'"%b"' % key.encode())) >= 0), 0)
    else:
        places = places_of(data, 0, _WANTED, last=True)
        fields = {key: value_at(data, place.value) for key, place in places.items()}
        start = next((places[key].name for key in _PROMPTS if key in places), 0)
    return _facts(fields, body[start:])


def _is_quick(data: bytes | bytearray, *names: bytes) -> bool:
    """Return whether parsing takes little time, and each of ``names``, with its quotes, occurs once at most."""
    size = len(data)
    if size > SMALL or any(data.find(name) != data.rfind(name) for name in names):
        return False
    if size > _TINY:
        brackets, quotes = data.count(b"[") + data.count(b"{"), data.count(b'"')
        if _BYTES_PER_BRACKET * brackets + _BYTES_PER_QUOTE * quotes > size:
            return False
    return not _may_escape_names(data)


def _may_escape_names(data: bytes | bytearray) -> bool:
    """Return whether there is an escape that a wanted name may have."""
    return data.rfind(b"\\u00") >= 0 and _LETTER.search(data) is not None


def _parsed(data: bytes | bytearray) -> dict[str, Any]:
    """Parse an object. Raises ``MalformedObject``."""
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise MalformedObject(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise MalformedObject("the body is not a JSON object")
    return fields


def form_facts(body: memoryview, content_type: str) -> BodyFacts:
    """Read a form of the OpenAI API, without its file. Raises ``InvalidArgument`` if it does not name one model."""
    fields: dict[str, str] = {}
    for part in parse_multipart(content_type, body):
        name = part.name.lower()
        if name in _FORM_FIELDS and name in fields:
            raise InvalidArgument(f"the form has the field '{name}' twice: send it once")
        if name in _FORM_FIELDS:
            fields[name] = bytes(part.data[:_FIELD]).decode(errors="replace") if name == part.name else ""
    model = fields.get("model", "")
    if not model:
        raise InvalidArgument("the form names no model: add the field 'model'")
    user, streams = fields.get("user", ""), fields.get("stream", "").lower() == "true"
    return BodyFacts(checked(model, "the name of a model"), streams, 0.0, user[:256])


def _facts(fields: Mapping[str, Any], prompt: memoryview) -> BodyFacts:
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidArgument("the body names no model: add the member 'model', a string")
    limit = next(
        (
            value
            for key in ("max_completion_tokens", "max_tokens", "max_output_tokens")
            if isinstance(value := fields.get(key), int)
        ),
        0,
    )
    copies = fields.get("n")
    if isinstance(copies, int) and 1 < copies <= 128:
        limit *= copies
    user, continues = fields.get("user"), fields.get("previous_response_id")
    return BodyFacts(
        checked(model, "the name of a model"),
        fields.get("stream") is True,
        float(min(max(limit, 0), _MAX_ANSWER)),
        user if isinstance(user, str) and len(user) <= 256 else "",
        prompt,
        continues if isinstance(continues, str) else "",
    )


def _searchable(body: memoryview) -> bytes | bytearray:
    """Return an object that can be searched, without a copy if the whole of it is the body."""
    whole = body.obj
    if isinstance(whole, bytes | bytearray) and len(whole) == len(body):
        return whole
    return bytes(body)


def sequence_of(text: memoryview) -> SequenceFacts:
    """Return the sequence that the JSON part of a KServe request names. Malformed JSON names none.

    Raises ``InvalidArgument`` if it is named twice.
    """
    data = _searchable(text)
    if _SEQUENCE not in data and not _may_escape_names(data):
        return SequenceFacts()
    try:
        parameters = _sequence_parameters(data)
    except MalformedObject:
        return SequenceFacts()
    name = parameters.get("sequence_id")
    if not isinstance(name, int | str) or isinstance(name, bool) or name in (0, ""):
        return SequenceFacts()
    text_name = checked(str(name), "sequence_id")
    return SequenceFacts(text_name, parameters.get("sequence_start") is True, parameters.get("sequence_end") is True)


def _sequence_parameters(data: bytes | bytearray) -> Mapping[str, Any]:
    """Return the members of a request that say which sequence it belongs to."""
    if _is_quick(data, *_SEQUENCE_TEXTS):
        fields = _parsed(data)
        parameters = fields.get("parameters")
        return parameters if isinstance(parameters, dict) else fields
    places = places_of(data, 0, _PARAMETERS, last=True)
    if "parameters" in places and data.startswith(b"{", places["parameters"].value):
        places = places_of(data, places["parameters"].value, _SEQUENCE_NAMES, last=False)
    return {key: value_at(data, place.value) for key, place in places.items()}


def lora_of(body: memoryview) -> str:
    """Return the LoRA adapter that a request to a language model chooses; empty if it names none.

    It is a hint: a text that looks like a member of the request may mislead it.
    """
    found = _LORA.search(_searchable(body)) if len(body) <= SMALL else None
    return found[1].decode(errors="replace") if found else ""


def generate_facts(body: memoryview) -> tuple[float, memoryview]:
    """Return the limit of the answer's tokens that a generate request states, 0 for none, and its prompt.

    Both are hints: a text that looks like a member of the request may mislead them.
    """
    data = _searchable(body)
    found = _MAX_TOKENS.search(data) if len(data) <= SMALL else None
    start = max(data.find(_TEXT_INPUT), 0)
    return float(min(int(found[1]), _MAX_ANSWER)) if found else 0.0, body[start:]
