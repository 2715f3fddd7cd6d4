"""Inputs that are read in this process: files that people write, and what routers and clients are answered."""

from __future__ import annotations

import dataclasses
import io
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import orjson

from fuzz import routed
from fuzz.case import Case
from fuzz.lanes import Outcome
from nerite.admission.policy_file import open_policy
from nerite.batches.items import answer_line, body_of_line, read_items
from nerite.config import json_form, loading
from nerite.config.watched_file import FileContent
from nerite.core.errors import InvalidArgument
from nerite.http2 import Http2ClientConnection, Limits, ReplyHeaders, encode_request
from nerite.rollouts.declarations import parse_file
from nerite.routes.route_file import parse_route_file

_SECONDS: Final = 5.0
"""Seconds of processor time that reading a file may take. The largest take 0.2."""


class Reader:
    """Reads them."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-config-")
        self._model = Path(self._folder.name) / "foreign_segment"
        (self._model / "1").mkdir(parents=True)

    def read(self, case: Case) -> Outcome:
        """Read one input."""
        began = time.thread_time()
        try:
            if case.surface in ("cluster", "members", "responses"):
                right = routed.read(case.surface, case.parts)
            elif case.surface == "policy":
                right = self._read_policy(case.parts[0])
            elif case.surface == "batch":
                right = self._read_batch(case.parts[0])
            elif case.surface == "routes":
                right = _read_route(case.parts[0])
            elif case.surface == "rollouts":
                right = _read_rollout(case.parts[0])
            elif case.surface == "answers":
                right = _read_answers(case.parts)
            else:
                right = self._read_config(case.parts[0], case.parts[-1])
        except Exception as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            place = "" if trace is None else f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
            return Outcome(case, f"{type(error).__name__} in {place}", str(error)[:1_000].encode(errors="replace"))
        taken = time.thread_time() - began
        return Outcome(case, "it took long" if taken > _SECONDS else "", f"{taken:.1f} s".encode(), right)

    def _read_config(self, kind: bytes, text: bytes) -> bool:
        """Return whether a configuration has no mistakes."""
        override = None
        if kind == b"json":
            override = text.decode(errors="surrogateescape")
        else:
            (self._model / "config.pbtxt").write_bytes(text)
        loaded = loading.load_model_directory(self._model, override=override, auto_complete=len(text) % 4 != 0)
        for mistake in loaded.mistakes:
            if not (str(mistake) and mistake.remedy):
                raise AssertionError(f"a mistake without a remedy: {mistake}")
        for config in loaded.configs.values():
            told = json_form.to_json(config)
            again = json_form.from_json(told)
            if again != config and not _has_nan(config):
                raise AssertionError("a configuration is another after it was told and read")
        return not loaded.mistakes

    def _read_policy(self, text: bytes) -> bool:
        """Return whether a policy has no mistakes."""
        file = self._model / "policy.toml"
        file.write_bytes(text)
        try:
            open_policy(str(file))
        except InvalidArgument as error:
            return _refused(error, str(file), "the policy file")
        return True

    def _read_batch(self, text: bytes) -> bool:
        """Return whether the input of a batch has no mistakes."""
        found = read_items(io.BytesIO(text))
        for mistake in found.mistakes:
            orjson.dumps([mistake.text, mistake.param])
        for item in found.items:
            body = body_of_line(text[item.position : item.position + item.size], item)
            orjson.loads(answer_line("id", item.custom_id, 200, "", body))
        return not found.mistakes

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()


def _read_route(text: bytes) -> bool:
    """Return whether a route file has no mistakes; each must be told with its file."""
    try:
        found = parse_route_file(text, "route.toml", "chat")
    except InvalidArgument as error:
        return _refused(error, "route.toml")
    return len(found.places) == len(found.route.targets)


def _read_rollout(text: bytes) -> bool:
    """Return whether a rollout file has no mistakes; each must be told with its file."""
    try:
        parse_file("rollout.toml", FileContent(text))
    except InvalidArgument as error:
        return _refused(error, "rollout.toml")
    return True


def _refused(error: InvalidArgument, *places: str) -> bool:
    error.message.encode(errors="surrogateescape")
    if not error.message.startswith(places):
        raise AssertionError(f"a mistake without a place: {error.message}") from None
    return False


class _Calls:
    """The calls of a client; each has to end once."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.right = True

    def response_started(self, stream_id: int, headers: ReplyHeaders, end_stream: bool) -> None:
        self._note(stream_id, end_stream)

    def data_received(self, stream_id: int, data: bytes | memoryview, end_stream: bool) -> None:
        self._note(stream_id, end_stream)

    def trailers_received(self, stream_id: int, trailers: ReplyHeaders) -> None:
        self._note(stream_id, True)

    def stream_closed(self, stream_id: int, error_code: int) -> None:
        self._note(stream_id, True)

    def writable(self, stream_id: int) -> None:
        self._note(stream_id, False)

    def connection_closing(self, error_code: int, reason: str) -> None:
        self.right = self.right and not error_code

    def _note(self, stream_id: int, end: bool) -> None:
        if stream_id not in self.open:
            raise AssertionError(f"stream {stream_id} is told of after its end")
        if end:
            self.open.remove(stream_id)


def _read_answers(pieces: Sequence[bytes]) -> bool:
    """Feed a client with what a server sends; return whether it found no fault."""
    calls = _Calls()
    client = Http2ClientConnection(calls, Limits(), 0.0, lambda memo, block, headers, size: None)
    block = encode_request([(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x")])
    for place in range(4):
        stream_id = client.open_stream(block)
        calls.open.add(stream_id)
        client.send_data(stream_id, [bytes(30_000 * place)], place != 2)
    for piece in pieces:
        client.receive(piece, 0.0)
        client.outbound.clear()
    if client.open_streams != len(calls.open) or (client.closed and calls.open):
        raise AssertionError(f"{client.open_streams} streams are open, and {len(calls.open)} calls")
    right = calls.right and not client.closed
    client.lost()
    if calls.open:
        raise AssertionError(f"{len(calls.open)} calls never end")
    return right


def _has_nan(value: object) -> bool:
    """Return whether there is a number in it that is not equal to itself."""
    if isinstance(value, float):
        return value != value
    if dataclasses.is_dataclass(value):
        return any(_has_nan(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, dict):
        return any(map(_has_nan, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_has_nan, value))
