"""Functions as models: in a server inside this process, behind ports, reloaded, and in a repository."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nerite
import triton_python_backend_utils as pb_utils
from nerite.client import Client
from nerite.core.errors import Internal, InvalidArgument, NeriteError
from pages import run
from serving import NERITE, eventually, served, serving

Float32 = nerite.Float32
N = "n"
FACTOR = 2.0
gate = threading.Event()


@dataclass
class Stats:
    low: float
    high: float


@nerite.model(batch=64, delay=0.05)
def double(x: Float32[N]) -> Float32[N]:  # type: ignore[valid-type]
    return x * FACTOR


@nerite.model(batch=8)
def shout(text: list[str]) -> list[str]:
    return [each.upper() for each in text]


@nerite.model
def greet(name: str, times: int = 1) -> str:
    return f"hello {name} " * times


@nerite.model
def stats(values: Float32[N]) -> Stats:  # type: ignore[valid-type]
    return Stats(float(np.min(values)), float(np.max(values)))


@nerite.model
def count(to: int) -> Iterator[int]:
    yield from range(to)


@nerite.model
async def count_later(to: int) -> AsyncIterator[int]:
    for number in range(to):
        await asyncio.sleep(0)
        yield number


@nerite.model(concurrency=8)
async def meet(x: int) -> int:
    """Answer when eight calls are in progress."""
    arrived = asyncio.Event()
    meeting.append(arrived)
    if len(meeting) == 8:
        for each in meeting:
            each.set()
    await arrived.wait()
    return x


meeting: list[asyncio.Event] = []


@nerite.model(sequences=4)
def total(x: float, state: nerite.SequenceState) -> float:
    state["sum"] = state.get("sum", 0.0) + x
    return float(state["sum"])


@nerite.model
def refuse(kind: str) -> str:
    if kind == "bad":
        raise nerite.BadRequest("this is wrong")
    if kind == "shape":
        return 3  # type: ignore[return-value]
    raise ValueError(f"cannot do {kind}")


@nerite.model
def ask(x: float) -> float:
    """Ask another model."""
    request = pb_utils.InferenceRequest(
        model_name="double",
        requested_output_names=["output"],
        inputs=[pb_utils.Tensor("x", np.array([[x]], np.float32))],
    )
    return float(request.exec().output_tensors()[0].as_numpy()[0, 0])


@pytest.fixture(scope="module")
def server() -> Iterator[nerite.Server]:
    functions = (double, shout, greet, stats, count, count_later, meet, total, refuse, ask)
    with nerite.Server(*functions, http_port=0) as running:
        yield running


def test_a_batch(server: nerite.Server) -> None:
    assert server.client.double([[1, 2], [3, 4]]).tolist() == [[2, 4], [6, 8]]
    assert server.client.double([1, 2]).tolist() == [2, 4]
    assert server.model("double").infer(x=np.ones((3, 2), np.float32))["output"].shape == (3, 2)


def test_requests_of_several_shapes_are_answered_apart(server: nerite.Server) -> None:
    model = server.model("double")
    inputs = [np.full((1 + number % 3, 1 + number % 2), number, np.float32) for number in range(24)]
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda x: model.infer(x=x)["output"], inputs))
    assert all(np.array_equal(answer, x * 2) for answer, x in zip(answers, inputs, strict=True))


def test_values_are_those_of_the_function(server: nerite.Server) -> None:
    assert server.client.shout(["a", "b"]) == ["A", "B"]
    assert server.client.shout("a") == "A"
    assert server.client.greet("you") == greet("you") == "hello you "
    assert server.client.greet("you", times=2) == "hello you hello you "
    assert server.client.stats([3, 1, 2]) == Stats(1.0, 3.0)


@pytest.mark.parametrize("name", ["count", "count_later"])
def test_streams(server: nerite.Server, name: str) -> None:
    model = server.model(name)
    assert list(model.stream(to=5)) == [0, 1, 2, 3, 4]
    assert list(model.stream(to=0)) == []

    async def read() -> list[Any]:
        return [part async for part in model.stream_async(to=200)]

    assert asyncio.run(read()) == list(range(200))
    with pytest.raises(InvalidArgument, match="sent 5 responses to this request"):
        model(5)


def test_a_stream_that_nobody_reads_ends(server: nerite.Server) -> None:
    parts = server.model("count").stream(to=10**12)
    assert [next(parts) for _ in range(3)] == [0, 1, 2]
    parts.close()  # type: ignore[attr-defined]
    assert list(server.model("count").stream(to=2)) == [0, 1]


def test_async_functions_are_in_progress_together(server: nerite.Server) -> None:
    model = server.model("meet")

    async def call() -> list[Any]:
        return await asyncio.gather(*(model.infer_async(x=number) for number in range(8)))

    assert [each["output"].item() for each in asyncio.run(call())] == list(range(8))


def test_sequences_have_a_state(server: nerite.Server) -> None:
    model = server.model("total")

    def step(sequence: int, x: float, **flags: bool) -> float:
        found: float = model.infer(x=x, parameters={"sequence_id": sequence, **flags})["output"].item()
        return found

    assert step(1, 1.0, sequence_start=True) == 1.0
    assert step(2, 5.0, sequence_start=True) == 5.0
    assert step(1, 2.0) == 3.0
    assert step(2, 5.0, sequence_end=True) == 10.0
    assert step(1, 3.0, sequence_end=True) == 6.0
    assert step(1, 3.0, sequence_start=True, sequence_end=True) == 3.0


def test_functions_call_other_models(server: nerite.Server) -> None:
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(server.client.ask, [1.0, 2.0, 3.0])) == [2.0, 4.0, 6.0]


def test_errors(server: nerite.Server) -> None:
    with pytest.raises(InvalidArgument, match=r"^this is wrong$"):
        server.client.refuse("bad")
    with pytest.raises(Internal, match="message: ValueError: cannot do more") as caught:
        server.client.refuse("more")
    assert "test_functions.py" in str(caught.value)
    with pytest.raises(Internal, match=r"refuse\(\): 'output' has the element 3, and declares Text"):
        server.client.refuse("shape")
    with pytest.raises(InvalidArgument, match="has no input 'y'"):
        server.client.double(y=1)
    with pytest.raises(AttributeError, match="unknown model"):
        server.client.nothing(1)


def test_ports_answer_as_any_server(server: nerite.Server) -> None:
    with Client(server.url) as client:
        assert client.infer("double", {"x": [[1.0]]})["output"].tolist() == [[2.0]]
        assert [part["output"] for part in client.stream("count", {"to": 2})] == [0, 1]


def test_functions_that_refer_to_the_program_and_come_later() -> None:
    seen: list[float] = []

    @nerite.model
    def keep(x: float) -> float:
        seen.append(x)
        return x

    with nerite.Server() as server:
        server.add(keep)
        server.client.keep(3.0)
        assert seen == [3.0]

        @nerite.model(name="keep")
        def other(x: float) -> float:
            return -x

        assert server.add(other)(3.0) == -3.0
        server.unload("keep")
        with pytest.raises(NeriteError):
            server.model("keep")


def test_a_setup_that_fails_is_told() -> None:
    @nerite.model(setup=lambda: 1 / 0)
    def broken(setup: Any, x: float) -> float:
        return x

    with pytest.raises(InvalidArgument, match="ZeroDivisionError"), nerite.Server(broken):
        pass
    assert not [path for path in sys.path if "/broken/" in path], "its code was closed"


def test_a_server_that_has_stopped() -> None:
    server = nerite.Server(greet)
    with server:
        model = server.model("greet")
    with pytest.raises(NeriteError, match="the server does not run"):
        model("you")
    with pytest.raises(InvalidArgument, match="no port is open"):
        server.url  # noqa: B018


PROGRAM = """
import nerite

@nerite.model(batch=8)
def double(x: nerite.Float32["n"]) -> nerite.Float32["n"]:
    return x * 2

@nerite.model
def pid(x: int) -> int:
    import os
    return os.getpid()
"""


_PORTS = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]


def test_a_program_that_serves_itself(tmp_path: Path) -> None:
    program = tmp_path / "app.py"
    program.write_text(PROGRAM + "\nnerite.serve(double, pid, http_port=0, grpc_port=0, metrics_port=0)\n")
    with served([sys.executable, "app.py"], tmp_path / "log") as running, Client(running.http) as client:
        assert client.infer("double", {"x": [[1.0]]})["output"].tolist() == [[2.0]]
        assert client.infer("pid", {"x": 1})["output"].item() != running.process.pid


def test_reload_on_save(tmp_path: Path) -> None:
    program = tmp_path / "app.py"
    program.write_text(PROGRAM)
    command = [str(NERITE), "serve", "app.py:double", "--reload", *_PORTS]
    with served(command, tmp_path / "log") as running, Client(running.http) as client:

        def answer() -> Any:
            return client.infer("double", {"x": [[1.0]]})["output"].tolist()

        assert answer() == [[2.0]]
        program.write_text("import nerite\nthis is wrong\n")
        eventually(lambda: "not reloaded, and served as before" in running.text)
        assert answer() == [[2.0]]
        program.write_text(PROGRAM.replace("* 2", "* 3"))
        eventually(lambda: answer() == [[3.0]])


def test_a_program_that_cannot_be_served(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("import nerite\n@nerite.model\ndef f(x): ...\n")
    done = subprocess.run([NERITE, "serve", "app.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "app.py:2: parameter 'x' of f() has no annotation" in done.stderr


def test_in_a_repository(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(PROGRAM)
    run([str(NERITE), "add", "app.py:double", "--model-repository", "models", "--no-measure"], cwd=tmp_path)
    (tmp_path / "app.py").unlink()
    with serving(tmp_path / "models", tmp_path / "log") as running, Client(running.http) as client:
        assert client.infer("double", {"x": [[1.0]]})["output"].tolist() == [[2.0]]
