"""Items of a batch: the lines of its input file, every mistake with its line, and the lines of the output file."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Final, NamedTuple

import orjson

from nerite.core.client_text import MAX_DEPTH, nested_deeper, target_error
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.text import name_error, quoted_text, text_error

OPENAI_ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
_INFER: Final = re.compile(r"/v2/models/([^/]+)(?:/versions/[0-9]+)?/infer")
MAX_ITEMS: Final = 50_000
MAX_LINE: Final = 32 << 20
"""Bytes of a line."""
MAX_VALUES: Final = 4_000_000
_LIST_COST: Final = 16
"""Numbers or strings in a line, and how many of them a list or object counts as: while a line is parsed, no other
thread runs."""
_ROW_BYTES: Final = 200
"""Bytes that an item takes in the database, without its custom id and its answer."""
_MARK: Final = b"\xef\xbb\xbf"
"""Byte order mark, which some editors put at the beginning of UTF-8."""
_MAX_ERRORS: Final = 50
"""Mistakes that are listed of a file."""
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

    @property
    def row_bytes(self) -> int:
        """Bytes that the items take in the database before they have answers."""
        return sum(_ROW_BYTES + len(item.custom_id.encode()) for item in self.items)


class _Request(NamedTuple):
    """The request in a line."""

    custom_id: str
    url: str
    model: str
    body: Mapping[str, Any]


def is_endpoint(url: str) -> bool:
    """Return whether requests to ``url`` can be items."""
    return url in OPENAI_ENDPOINTS or (_INFER.fullmatch(url) is not None and target_error(url) is None)


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
        custom_id, url, own_model, _ = found
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


def _read(raw: bytes, line: int) -> _Request | ItemMistake:
    if len(raw) > MAX_LINE:
        return ItemMistake("invalid_json_line", f"The line has more than {MAX_LINE} bytes.", line)
    lists = raw.count(b"[") + raw.count(b"{")
    if lists * _LIST_COST + raw.count(b",") > MAX_VALUES:
        message = f"The line has more than {MAX_VALUES} values, of which each list or object counts as {_LIST_COST}."
        return ItemMistake("invalid_json_line", message, line)
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
    if not isinstance(custom_id, str) or not custom_id or name_error(custom_id):
        message = "'custom_id' must be a string of 1 to 1024 characters without control characters."
        return ItemMistake("invalid_custom_id", message, line, "custom_id")
    if document.get("method", "POST") != "POST":
        return ItemMistake("invalid_method", "'method' must be 'POST'.", line, "method")
    if not isinstance(url, str) or text_error(url) or not is_endpoint(url):
        endpoints = ", ".join(OPENAI_ENDPOINTS)
        message = f"'url' must be one of {endpoints}, or /v2/models/NAME/infer, where NAME is percent-encoded."
        return ItemMistake("invalid_url", message, line, "url")
    if not isinstance(body, dict):
        return ItemMistake("invalid_request", "'body' must be an object.", line, "body")
    if nested_deeper(raw, MAX_DEPTH + 1):  # the line is an object, too
        return ItemMistake("invalid_request", f"'body' is nested deeper than {MAX_DEPTH} levels.", line, "body")
    if body.get("stream"):
        return ItemMistake("invalid_request", "The answers of a batch are not streamed.", line, "body.stream")
    return _with_model(custom_id, url, body, line)


def _with_model(custom_id: str, url: str, body: Mapping[str, Any], line: int) -> _Request | ItemMistake:
    found = _INFER.fullmatch(url)
    model = body.get("model") if found is None else found[1]
    if not isinstance(model, str) or not model or name_error(model):
        return ItemMistake(
            "missing_required_parameter", "'body.model' must be the name of a model.", line, "body.model"
        )
    return _Request(custom_id, url, model, body)


def body_of_line(raw: bytes, item: ItemLine) -> bytes:
    """Return the body of the request in the line of an item that ``read_items`` has found there.

    Encoded anew, so that each member of an object occurs once, and has the value that was checked. Raises
    ``InvalidArgument`` if the line is a different one now.
    """
    found = _read(raw, item.line) if len(raw) == item.size else None
    if not isinstance(found, _Request) or found.custom_id != item.custom_id:
        raise InvalidArgument(f"the input file is damaged: the item is not in line {item.line} any more")
    return orjson.dumps(found.body)


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
