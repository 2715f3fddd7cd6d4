"""Items of a batch: the lines of its input file, every mistake with its line, and the lines of the output file."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Final, NamedTuple

import orjson

from nerite.core.errors import NeriteError
from nerite.core.text import quoted_text, text_error

OPENAI_ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
_INFER: Final = re.compile(r"/v2/models/([^/\s?#%\x00-\x1f\x7f-\U0010ffff]+)(?:/versions/[0-9]+)?/infer")
"""A request target without anything that means something else to whoever parses it, such as an end of line."""
MAX_ITEMS: Final = 50_000
MAX_LINE: Final = 32 << 20
"""Bytes of a line."""
_MARK: Final = b"\xef\xbb\xbf"
"""Byte order mark, which some editors put at the beginning of UTF-8."""
_MAX_ERRORS: Final = 50
"""Mistakes that are listed of a file."""
_MANY: Final = 100
"""Brackets of a line above which it is found out how deeply they are nested."""
_SLICE: Final = 64
_PAUSE: Final = 0.0005
"""After so many lines a thread sleeps, so that the event loop can take the interpreter's lock."""
_FIELDS: Final = ("custom_id", "method", "url", "body")


class ItemMistake(NamedTuple):
    """A mistake in an input file, as OpenAI reports it."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    @property
    def text(self) -> str:
        """The message with its place."""
        return self.message if self.line is None else f"Line {self.line}: {self.message}"


class ItemLine(NamedTuple):
    """An item and the place of its line in the input file."""

    line: int
    """From 1."""
    custom_id: str
    position: int
    size: int


class ItemFile(NamedTuple):
    """What an input file contains."""

    items: list[ItemLine]
    mistakes: list[ItemMistake]
    model: str
    """Model of all items."""


def is_endpoint(url: str) -> bool:
    """Return whether requests to ``url`` can be items."""
    return url in OPENAI_ENDPOINTS or _INFER.fullmatch(url) is not None


def read_items(file: BinaryIO, endpoint: str = "") -> ItemFile:
    """Read an input file whose items go to ``endpoint``, or all to one and the same if that is empty. Blocks."""
    items: list[ItemLine] = []
    mistakes: list[ItemMistake] = []
    seen: dict[str, int] = {}
    model = ""
    for line, position, raw in _lines(file):
        if len(mistakes) >= _MAX_ERRORS:
            break
        found = _read(raw, line)
        if isinstance(found, ItemMistake):
            mistakes.append(found)
            continue
        custom_id, url, own_model = found
        endpoint, model = endpoint or url, model or own_model
        if url != endpoint:
            message = f"The URL '{quoted_text(url)}' does not match the endpoint '{quoted_text(endpoint)}'."
            mistakes.append(ItemMistake("mismatched_endpoint", message, line, "url"))
        elif own_model != model:
            message = f"The model '{quoted_text(own_model)}' differs from '{quoted_text(model)}' before."
            mistakes.append(ItemMistake("mismatched_model", message, line, "body.model"))
        elif (other := seen.setdefault(custom_id, line)) != line:
            message = f"The custom_id '{quoted_text(custom_id)}' is already that of line {other}."
            mistakes.append(ItemMistake("duplicate_custom_id", message, line, "custom_id"))
        elif len(items) == MAX_ITEMS:
            mistakes.append(ItemMistake("too_many_tasks", f"A batch has at most {MAX_ITEMS} items.", line))
            break
        else:
            items.append(ItemLine(line, custom_id, position, len(raw)))
        if line % _SLICE == 0:
            time.sleep(_PAUSE)
    if not items and not mistakes:
        mistakes.append(ItemMistake("empty_file", "The file has no items: it needs a JSON object on each line."))
    return ItemFile(items, mistakes, model)


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, position and bytes of each line that is not blank."""
    position = len(_MARK) if file.read(len(_MARK)) == _MARK else 0
    file.seek(position)
    number = 0
    while raw := file.readline(MAX_LINE + 1):
        number += 1
        if raw.strip():
            yield number, position, raw
        position += len(raw)
        if len(raw) > MAX_LINE and not raw.endswith(b"\n"):
            return


def _read(raw: bytes, line: int) -> tuple[str, str, str] | ItemMistake:
    """Return custom id, URL and model of a line."""
    if len(raw) > MAX_LINE:
        return ItemMistake("invalid_json_line", f"The line has more than {MAX_LINE} bytes.", line)
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return ItemMistake("invalid_json_line", f"This line is not parseable as valid JSON: {error}", line)
    if not isinstance(document, dict):
        return ItemMistake("invalid_json_line", "This line is not a JSON object.", line)
    for name in document:
        if name not in _FIELDS:
            message = f"Unknown parameter: '{quoted_text(name)}'. There are: {', '.join(_FIELDS)}."
            return ItemMistake("unknown_parameter", message, line, quoted_text(name))
    for name in ("custom_id", "url", "body"):
        if document.get(name) is None:
            return ItemMistake("missing_required_parameter", f"Missing required parameter: '{name}'.", line, name)
    custom_id, url, body = document["custom_id"], document["url"], document["body"]
    if not isinstance(custom_id, str) or not custom_id or text_error(custom_id):
        return ItemMistake(
            "invalid_custom_id", "'custom_id' must be a string of 1 to 1024 characters.", line, "custom_id"
        )
    if document.get("method", "POST") != "POST":
        return ItemMistake("invalid_method", "'method' must be 'POST'.", line, "method")
    if not isinstance(url, str) or text_error(url) or not is_endpoint(url):
        endpoints = ", ".join(OPENAI_ENDPOINTS)
        message = f"'url' must be one of {endpoints}, or /v2/models/NAME/infer."
        return ItemMistake("invalid_url", message, line, "url")
    if not isinstance(body, dict):
        return ItemMistake("invalid_request", "'body' must be an object.", line, "body")
    if (raw.count(b"[") + raw.count(b"{")) > _MANY and not _can_be_written(body):
        return ItemMistake("invalid_request", "'body' is nested too deeply.", line, "body")
    if body.get("stream"):
        return ItemMistake("invalid_request", "The answers of a batch are not streamed.", line, "body.stream")
    return _model(custom_id, url, body, line)


def _model(custom_id: str, url: str, body: Mapping[str, Any], line: int) -> tuple[str, str, str] | ItemMistake:
    found = _INFER.fullmatch(url)
    model = body.get("model") if found is None else found[1]
    if not isinstance(model, str) or not model or text_error(model):
        return ItemMistake(
            "missing_required_parameter", "'body.model' must be the name of a model.", line, "body.model"
        )
    return custom_id, url, model


def _can_be_written(document: Any) -> bool:
    """Return whether a document that was parsed is not nested more deeply than documents that are written may be."""
    try:
        orjson.dumps(document)
    except orjson.JSONEncodeError:
        return False
    return True


def body_of_line(raw: bytes) -> bytes | ItemMistake:
    """Return the body of the request in a line that ``read_items`` has accepted.

    A mistake if the file has changed since.
    """
    try:
        return orjson.dumps(orjson.loads(raw)["body"])
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, LookupError, TypeError) as error:
        return ItemMistake("damaged_input", f"The line of this item can no longer be read: {error}")


# Lines of the output files

_IN_ONE_LINE: Final = bytes.maketrans(b"\r\n", b"  ")


def answer_line(item_id: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Return the line of an item that was answered."""
    try:
        document: Any = {"text": body.decode(errors="replace")}
        if _is_json(body):  # its line breaks are between its parts, never in a text
            document = orjson.Fragment(body.translate(_IN_ONE_LINE))
        response = {"status_code": status, "request_id": request_id, "body": document}
        return orjson.dumps({"id": item_id, "custom_id": custom_id, "response": response, "error": None})
    except orjson.JSONEncodeError as error:
        return error_line(item_id, custom_id, "invalid_answer", str(error))


def error_line(item_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Return the line of an item without an answer."""
    error = {"code": code, "message": message}
    return orjson.dumps({"id": item_id, "custom_id": custom_id, "response": None, "error": error})


def _is_json(body: bytes) -> bool:
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return True


EXPIRED: Final = (
    "batch_expired",
    "This request could not be executed before the completion window expired.",
)
"""OpenAI's code and text for an item that was not answered in time."""


class InvalidItems(NeriteError):
    """An input file has mistakes."""

    code = "INVALID_ARG"
    http_status = 400

    def __init__(self, mistake: ItemMistake) -> None:
        super().__init__(mistake.text)
        self.mistake = mistake
