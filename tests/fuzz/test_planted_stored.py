"""Mistakes that were planted in what outlives a request, in a picker and in parsers are found."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fuzz import local, picking, routed, surfaces
from fuzz.batch_runs import Books, Runs, items
from fuzz.canaries import Canaries
from fuzz.case import Case
from fuzz.lanes import Call, Outcome, wrong_end
from fuzz.local import Reader
from fuzz.stub import StubSubject
from fuzz.symptoms import Symptom
from fuzz.test_planted import Stub, run
from nerite.core.errors import InvalidArgument
from nerite.wire import ext_proc as wire


@pytest.mark.parametrize(
    ("surface", "sign"),
    [
        ("files", b"?limit="),
        ("usage", b"group_by"),
        ("chains", b"input_items"),
        ("names", b"x-nerite-class"),
        ("steering", b'"webhook"'),
    ],
)
def test_a_request_that_is_an_internal_error(tmp_path: Path, surface: str, sign: bytes) -> None:
    found = run(tmp_path, lambda patience: Stub(patience, trip=sign), 400, [surface])
    assert any(sign in part for part in found["unforeseen", "stub"].parts)


class Store(StubSubject):
    """A small server of files, batches and usage, with mistakes.

    A file with ``poison`` stops all batches for good, one with ``loss`` loses the line of its first item, and one with
    ``free`` is not in the usage.
    """

    profile = "plain"

    def __init__(self, patience: float = 0.3, *, poison: bytes = b"", loss: bytes = b"", free: bytes = b"") -> None:
        super().__init__(min(patience, 0.05 if poison else 0.3), lanes=2)
        self._poison, self._loss, self._free = poison, loss, free
        self._files: dict[str, bytes] = {}
        self._batches: dict[str, dict[str, Any]] = {}
        self._stopped = False
        self.answered = 0

    async def start(self) -> None:
        await super().start()
        self._books = Books(self.lanes[0])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                length = re.search(r"content-length: (\d+)", head.lower())
                assert length is not None
                method, target, _ = head.split(" ", 2)
                body = self._answer(method, target, await reader.readexactly(int(length[1])))
                status, kind = ("200 OK", "json") if body else ("400 No", "jsonl")
                kind = "jsonl" if target.endswith("/content") else kind
                raw = f"HTTP/1.1 {status}\r\nContent-Type: application/{kind}\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(raw.encode() + body)
        writer.close()

    def _answer(self, method: str, target: str, body: bytes) -> bytes:
        name = target.split("/")[3] if target.count("/") > 2 else ""
        if target == "/v1/files":
            self._files[name := f"file-{len(self._files)}"] = body
            return json.dumps({"id": name}).encode()
        if target == "/v1/batches":
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                return json.dumps(self._run(json.loads(body)["input_file_id"])).encode()
            return b""
        if target.startswith("/v1/batches/"):
            return json.dumps(self._batches[name]).encode()
        if "/usage" in target:
            row = {"model": "counted", "ending": "answered", "requests": self.answered}
            return json.dumps({"data": [row]}).encode()
        return self._files.pop(name, b"") if method == "DELETE" else self._files.get(name, b"")

    def _run(self, name: str) -> dict[str, Any]:
        text = self._files[name]
        self._stopped = self._stopped or bool(self._poison and self._poison in text)
        count = text.count(b'"custom_id"')
        lines = [b'{"custom_id": "%d"}\n' % at for at in range(bool(self._loss and self._loss in text), count)]
        self._files[f"out-{name}"] = b"".join(lines)
        counts = {"total": count, "completed": count, "failed": 0}
        ends = {"output_file_id": f"out-{name}" if lines else None, "error_file_id": None, "errors": None}
        status = "in_progress" if self._stopped else "completed"
        self.answered += 0 if self._free and self._free in text else 2 * (b"/counted/" in text)
        self._batches[name] = {"id": name, "status": status, "request_counts": counts, **ends}
        return self._batches[name]

    async def send(self, inputs: Sequence[Case], *, together: bool = True) -> list[Outcome]:
        return [await Runs(self.lanes[1]).send(case) for case in inputs]

    async def check(self) -> list[Symptom]:
        return await self._books.ask()


def test_nothing_is_found_where_no_batch_is_wrong(tmp_path: Path) -> None:
    assert run(tmp_path, Store, 60, ["batches"]) == {}


def test_a_line_that_stops_the_batches_of_everybody(tmp_path: Path) -> None:
    found = run(tmp_path, lambda patience: Store(patience, poison=b'"priority"'), 20, ["batches"])
    assert found["no end", "batches: no end of a batch within 0.05 s"].parts[1].count(b'"priority"') == 1
    assert ("canary", "batch") in found


def test_an_item_without_a_line(tmp_path: Path) -> None:
    found = run(tmp_path, lambda patience: Store(patience, loss=b'"priority"'), 60, ["batches"])
    assert found["end", "batches: completed items of a batch have not one line each"].parts[1].count(b'"priority"') == 1


def test_an_answer_without_a_row() -> None:
    async def ask() -> list[list[Symptom]]:
        store = Store()
        await store.start()
        found = [await store.check()]
        store.answered -= 1
        found.append(await store.check())
        await store.stop()
        return found

    right, wrong = asyncio.run(ask())
    assert right == []
    assert [(each.key, each.told) for each in wrong] == [(("canary", "ledger"), "3 rows for 4 answers")]
    assert items("counted", 2).count(b"/counted/") == 2


class Picker:
    """Stands for calls to a picker, which always names one endpoint."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    async def call(self, block: bytes, parts: Sequence[bytes], end: str = "") -> tuple[Call, str]:
        """Return the end of a call."""
        call = Call(asyncio.get_running_loop().create_future())
        call.fields = [("grpc-status", "0")]
        header = wire.HeaderValueOption(header=wire.HeaderValue(key="x", raw_value=self._endpoint.encode()))
        mutation = wire.HeaderMutation(set_headers=[header])
        answer = wire.HeadersResponse(response=wire.CommonResponse(header_mutation=mutation))
        call.data = bytearray(framed(wire.ProcessingResponse(request_headers=answer).SerializeToString()))
        return call, ""


def framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


def test_a_picker_that_picks_another() -> None:
    async def pick(endpoint: str) -> list[Symptom]:
        return await Canaries(None, Picker(endpoint)).pick("10.0.0.1:8000")  # type: ignore[arg-type]

    assert asyncio.run(pick("10.0.0.1:8000")) == []
    assert [each.key for each in asyncio.run(pick("10.0.0.2:8000"))] == [("canary", "picker")]


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (framed(wire.ProcessingResponse(request_body=wire.BodyResponse()).SerializeToString()), ""),
        (framed(b""), "an answer of a picker says nothing"),
        (framed(b"\xff"), "an answer of a picker is no message"),
    ],
)
def test_a_picker_that_answers_wrongly(data: bytes, complaint: str) -> None:
    async def judge() -> str:
        call = Call(asyncio.get_running_loop().create_future())
        call.fields = [(":status", "200"), ("grpc-status", "0")]
        call.data = bytearray(data)
        return wrong_end(call, picking.PROCESS.encode())

    assert asyncio.run(judge()) == complaint


@pytest.mark.parametrize(
    ("surface", "module", "parser"),
    [
        ("policy", local, "open_policy"),
        ("routes", local, "parse_route_file"),
        ("rollouts", local, "parse_file"),
        ("cluster", routed, "parse_cluster"),
        ("members", routed, "members_of_text"),
    ],
)
@pytest.mark.parametrize(("error", "told"), [(KeyError("x"), "KeyError"), (InvalidArgument("no"), "AssertionError")])
def test_a_mistake_that_is_told_wrongly(
    monkeypatch: pytest.MonkeyPatch, surface: str, module: Any, parser: str, error: Exception, told: str
) -> None:
    def broken(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(module, parser, broken)
    reader = Reader()
    assert reader.read(surfaces.case(surface, 1, 1)).complaint.startswith(f"{told} in ")
    reader.close()
