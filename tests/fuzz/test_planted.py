"""A fuzzer that cannot fail is worth nothing: mistakes that were planted are found, and shrunk to one request."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fuzz import case as cases
from fuzz import models, monitor, runner
from fuzz.case import Case
from fuzz.lanes import Outcome, request
from fuzz.monitor import Sample
from fuzz.runner import Plan
from fuzz.stub import StubSubject
from fuzz.subject import Server
from fuzz.symptoms import Log, Symptom

SEED = 3


class Stub(StubSubject):
    """A small server with mistakes: a body with ``wedge`` stops it for good, ``trip`` is an internal error."""

    def __init__(self, patience: float, *, wedge: bytes = b"", trip: bytes = b"") -> None:
        self.profile = "plain"
        super().__init__(min(patience, 0.1 if wedge else 0.3), lanes=4)
        self._wedge = wedge
        self._trip = trip
        self._tripped = 0
        self._wedged = False
        self._dead = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if b"transfer-encoding: chunked" in head:
                    body = await reader.readuntil(b"\r\n\r\n")
                else:
                    body = await reader.readexactly(int(head.rpartition(b"content-length: ")[2].split(b"\r\n")[0]))
                self._wedged = self._wedged or bool(self._wedge and self._wedge in body)
                self._tripped += bool(self._trip and self._trip in head + body)
                if not self._wedged:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def send(self, inputs: Sequence[Case], *, together: bool = True) -> list[Outcome]:
        if not together:
            return [outcome for case in inputs for outcome in await self.lanes[0].send([case])]
        parts = [self.lanes[at].send(inputs[at::4]) for at in range(4)]
        return [outcome for part in await asyncio.gather(*parts) for outcome in part]

    async def check(self) -> list[Symptom]:
        tripped, self._tripped = self._tripped, 0
        if tripped:
            return [Symptom("unforeseen", "stub", "")]
        _, complaint = await self.lanes[0].ask([request(b"GET /", b"")])
        return [Symptom("canary", "stub", complaint)] if complaint else []


def run(
    folder: Path, make: Callable[[float], object], inputs: int, names: list[str], *, shrink: bool = True
) -> dict[tuple[str, str], Case]:
    """Run the fuzzer; return its findings by their symptoms, as they were written."""
    plan = Plan(SEED, names, inputs, folder=folder, patience=20.0, shrink=shrink, corpus=folder / "none")
    said: list[str] = []
    done = runner.go(lambda profile, patience: make(patience), plan, said.append)  # type: ignore[arg-type, return-value]
    written = [cases.read(path.read_text()) for path in folder.glob("*.case")]
    assert len(written) == len(done.findings), said
    return {key: finding.cases[0] for key, finding in done.findings.items() if len(finding.cases) == 1}


def test_nothing_is_found_where_nothing_is_wrong(tmp_path: Path) -> None:
    assert run(tmp_path, Stub, 800, ["json", "binary"]) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_byte_that_wedges_a_server(tmp_path: Path) -> None:
    found = run(tmp_path, lambda patience: Stub(patience, wedge=b"\xff"), 400, ["json"])
    assert found["canary", "stub"].parts[1] == b"\xff"
    assert (tmp_path / "canary-stub.case").read_text().splitlines()[-1] == "part: \\xff"


def test_a_member_that_is_an_internal_error(tmp_path: Path) -> None:
    found = run(tmp_path, lambda patience: Stub(patience, trip=b'"sequence_id"'), 400, ["json"])
    body = found["unforeseen", "stub"].parts[1]
    assert b'"sequence_id"' in body and len(body) <= len(b'{"parameters":{"sequence_id":0}}')


BROKEN = """
def execute(self, requests):
    answers = []
    for request in requests:
        values = request.inputs()[0].as_numpy()
        self.confused = getattr(self, "confused", False) or values.size == 16
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values + self.confused)]))
    return answers
"""


def test_a_model_that_answers_wrongly_from_some_request_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "IDENTITY", BROKEN)
    folder = tmp_path / "findings"
    plan = Plan(SEED, ["binary"], 400, folder=folder, shrink=False, corpus=tmp_path / "none")
    done = runner.go(lambda profile, patience: Server(profile, patience=patience), plan, lambda text: None)
    assert ("canary", "worker") in done.findings
    assert cases.read((folder / "canary-worker.case").read_text()).cases


def test_what_a_log_tells(tmp_path: Path) -> None:
    file = tmp_path / "log"
    log = Log(file)
    stack = 'Traceback (most recent call last):\\n  File \\"/src/nerite/a.py\\", line 7, in b\\nValueError: x'
    of_model = 'Traceback (most recent call last):\\n  File \\"/r/models/m/1/model.py\\", line 7, in b\\nValueError: x'
    file.write_text(f"E internal error, incident ab-1, in http\\n{stack}\nI fine\nE {of_model}\nE internal")
    assert [each.key for each in log.symptoms()] == [("unforeseen", "a.py:7 b")]
    with file.open("a") as more:
        more.write(" error, incident ab-2, in http: ValueError: x (stack: see incident ab-1)\n")
        more.write("W worker 'text_0_0' (pid 12) died: signal 9 (SIGKILL)\nException ignored in: <f>\nTraceback\n")
    found = [each.key for each in log.symptoms()]
    assert found[:2] == [("unforeseen", "a.py:7 b"), ("a worker died", "text")]
    assert len(found) == 3


def sample(memory: int, descriptors: int = 5, caches: int = 0) -> Sample:
    return Sample(
        Counter(), {"server": memory}, {"server": Counter({"socket:": descriptors})}, {"server": 2}, caches, 0
    )


def test_what_becomes_more() -> None:
    million = 10**6
    assert monitor.grown([sample(100 * million)] * 20) == []
    steady = [sample((100 + min(at, 10)) * million) for at in range(40)]
    assert monitor.grown(steady) == []
    leaks = [sample((100 + 3 * at) * million) for at in range(40)]
    assert [each.key for each in monitor.grown(leaks)] == [("memory", "server")]
    cached = [sample((100 + 3 * at) * million, caches=3 * at * million) for at in range(40)]
    assert monitor.grown(cached) == []
    assert monitor.more_open(sample(1), sample(1)) == []
    assert [each.key for each in monitor.more_open(sample(1), sample(1, 6))] == [("descriptors", "server")]
