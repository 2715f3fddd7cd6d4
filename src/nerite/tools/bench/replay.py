"""Reads traces of past requests, to send them again at the recorded times.

Two formats are read: lines of JSON with lengths in tokens, as the Mooncake project publishes them, and the trace files
of Nerite and Triton (``--trace-config triton,file=``), which have times but no lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from nerite.client import ClientError

BLOCK: Final = 512
"""Tokens of a block, of which a trace has the hashes: equal hashes mean equal text."""
_FIELDS: Final = {"timestamp", "input_length", "output_length", "hash_ids", "text_input", "input_text"}
_TEXTS: Final = ("text_input", "input_text")
_MOST: Final = 10_000_000
_ARRIVED: Final = ("HTTP_RECV_START", "GRPC_WAITREAD_START", "REQUEST_START", "QUEUE_START")
"""Events of a trace file that tell when a request arrived, the earliest one first."""


class TracedRequest(NamedTuple):
    """A request of a trace. Lengths are in tokens; 0 if the trace does not tell."""

    at: float
    """Seconds on the clock of the trace."""
    input_tokens: int = 0
    output_tokens: int = 0
    blocks: tuple[int, ...] = ()
    text: str = ""


def read_trace(path: Path, model: str) -> tuple[TracedRequest, ...]:
    """Return the requests in a file, in the order of their times. Raises ``ClientError``."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ClientError(f"cannot read the trace {path}: {error.strerror}") from None
    requests = _of_server(path, content, model) if content.lstrip()[:1] == b"[" else _of_lines(path, content)
    if not requests:
        raise ClientError(f"{path} has no requests")
    return tuple(sorted(requests, key=lambda request: request.at))


def _of_lines(path: Path, content: bytes) -> list[TracedRequest]:
    found = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ClientError(f"{place} is not JSON: {error}") from None
        if not isinstance(entry, dict):
            raise ClientError(f'{place}: write {{"timestamp": MILLISECONDS, "input_length": TOKENS}}')
        found.append(_of_entry(entry, place))
    return found


def _of_entry(entry: Mapping[str, Any], place: str) -> TracedRequest:
    unknown = sorted(entry.keys() - _FIELDS)
    if unknown:
        known = ", ".join(sorted(_FIELDS))
        raise ClientError(f"{place}: unknown field '{unknown[0]}'. Remove it; known are {known}.")
    at = entry.get("timestamp")
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < 1e15:
        raise ClientError(f"{place}: 'timestamp' must be the time of the request in milliseconds")
    text = next((entry[name] for name in _TEXTS if name in entry), "")
    if not isinstance(text, str):
        raise ClientError(f"{place}: the text must be a string")
    blocks = entry.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
        raise ClientError(f"{place}: 'hash_ids' must be a list of integers")
    length = _length(entry, "input_length", place)
    if not length and not text:
        raise ClientError(f"{place}: either 'input_length' or 'text_input' is needed")
    if text and (length or blocks):
        raise ClientError(f"{place}: 'text_input' excludes 'input_length' and 'hash_ids'")
    if len(blocks) * BLOCK >= length + BLOCK:
        raise ClientError(f"{place}: {len(blocks)} blocks of {BLOCK} tokens are more than input_length {length}")
    return TracedRequest(at / 1e3, length, _length(entry, "output_length", place), tuple(blocks), text)


def _length(entry: Mapping[str, Any], name: str, place: str) -> int:
    value = entry.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise ClientError(f"{place}: '{name}' must be a number of tokens")
    return value


def _of_server(path: Path, content: bytes, model: str) -> list[TracedRequest]:
    try:
        records = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise ClientError(f"{path} is not JSON: {error}") from None
    records = [record for record in records if isinstance(record, dict)]
    names = {record.get("id"): str(record["model_name"]) for record in records if "model_name" in record}
    # Requests that a model or an ensemble made of others are consequences, which come by themselves.
    inner = {record.get("id") for record in records if record.get("parent_id")}
    times: dict[Any, dict[str, int]] = {}
    for record in records:
        times.setdefault(record.get("id"), {}).update(_events(record.get("timestamps", ())))
    mine = [identity for identity, name in names.items() if name == model and identity not in inner]
    if not mine:
        others = ", ".join(sorted(set(names.values()))) or "none"
        raise ClientError(f"{path} has no requests to model '{model}'. Models in it: {others}.")
    return [TracedRequest(_arrival(times[identity], path)) for identity in mine]


def _events(events: Iterable[Any]) -> dict[str, int]:
    return {str(event["name"]): int(event["ns"]) for event in events if isinstance(event, dict) and "ns" in event}


def _arrival(events: Mapping[str, int], path: Path) -> float:
    for name in _ARRIVED:
        if name in events:
            return events[name] / 1e9
    raise ClientError(f"{path} has a request without a time: record it with --trace-config level=TIMESTAMPS")
