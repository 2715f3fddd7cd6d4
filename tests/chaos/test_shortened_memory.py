"""Clients that shorten, lengthen and remove files of shared memory that the server uses: no process ends by that."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import IDENTITY, IN_PROCESS, Serving, eventually, pbtxt, python_model, serving

COUNT = 100_000
SIZE = 4 * COUNT
MODELS = ("worker", "inside")
ALLOWED = (200, 400)
"""What a request may be answered with whose memory may be too short."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("shortened")
    python_model(folder / "models", "worker", IDENTITY)
    python_model(folder / "models", "inside", IDENTITY, pbtxt(parameters=IN_PROCESS))
    with serving(folder / "models", folder / "log", "--allow-client-shm=true") as running:
        yield running


@pytest.fixture
def files(server: Serving) -> Iterator[dict[str, Path]]:
    """The files of the regions "in" and "out"."""
    found = {name: Path("/dev/shm") / f"nerite_short_{os.getpid()}_{name}" for name in ("in", "out")}
    for name, path in found.items():
        path.write_bytes(bytes(SIZE))
        register(server, name, path)
    yield found
    for path in found.values():
        path.unlink(missing_ok=True)
    assert server.ask("POST", "/v2/systemsharedmemory/unregister")[0] == 200


def register(server: Serving, name: str, path: Path) -> None:
    asked = {"key": path.name, "offset": 0, "byte_size": SIZE}
    assert server.ask("POST", f"/v2/systemsharedmemory/region/{name}/register", asked)[0] == 200


def ask(server: Serving, model: str, *, shared: str) -> tuple[int, str]:
    """Ask for an inference with the input, the output or both in shared memory."""
    place = {"shared_memory_byte_size": SIZE, "shared_memory_offset": 0}
    tensor: dict[str, Any] = {"name": "INPUT0", "shape": [1, COUNT], "datatype": "FP32"}
    if "in" in shared:
        tensor["parameters"] = {"shared_memory_region": "in", **place}
    else:
        tensor["data"] = [1] * COUNT
    body: dict[str, Any] = {"inputs": [tensor]}
    if "out" in shared:
        body["outputs"] = [{"name": "OUTPUT0", "parameters": {"shared_memory_region": "out", **place}}]
    status, _, answer = server.ask("POST", f"/v2/models/{model}/infer", body)
    return status, answer.decode() if status != 200 else ""


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("which", ["in", "out"])
@pytest.mark.parametrize("left", [0, 4096, SIZE - 1])
def test_a_file_that_is_too_short_fails_one_request(
    server: Serving, files: dict[str, Path], which: str, left: int, model: str
) -> None:
    workers = server.workers()
    assert ask(server, model, shared="in out") == (200, "")
    os.truncate(files[which], left)
    status, error = ask(server, model, shared=which)
    assert status == 400
    assert f"shared memory region '{which}' has been shortened: its file has {left} bytes" in error
    assert files[which].stat().st_size == left
    # The client makes it right again: by lengthening it, or by a new file and a new registration.
    os.truncate(files[which], 2 * SIZE)
    assert ask(server, model, shared="in out") == (200, "")
    files[which].unlink()
    assert ask(server, model, shared="in out") == (200, "")
    assert server.ask("POST", f"/v2/systemsharedmemory/region/{which}/unregister")[0] == 200
    assert "Unable to find shared memory region" in ask(server, model, shared=which)[1]
    files[which].write_bytes(bytes(SIZE))
    register(server, which, files[which])
    assert ask(server, model, shared="in out") == (200, "")
    assert server.workers() == workers


def test_files_that_change_under_load(server: Serving, files: dict[str, Path]) -> None:
    workers = server.workers()
    answered: dict[str, list[tuple[int, str]]] = {model: [] for model in MODELS}
    done = threading.Event()

    def load(model: str) -> None:
        while not done.is_set():
            answered[model].append(ask(server, model, shared="in out"))

    threads = [threading.Thread(target=load, args=(model,)) for model in MODELS for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        # Until both models have met files of each kind several times.
        def enough() -> bool:
            for path in list(files.values()) * 20:
                for size in (0, 3 * SIZE, SIZE // 2, SIZE):
                    os.truncate(path, size)
            return all(
                sum(status == kind for status, _ in answers) >= 20 for answers in answered.values() for kind in ALLOWED
            )

        eventually(enough)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    for answers in answered.values():
        assert {status for status, _ in answers} == set(ALLOWED)
        assert all("has been shortened" in error for status, error in answers if status == 400)
    for path in files.values():
        os.truncate(path, SIZE)
    assert [ask(server, model, shared="in out") for model in MODELS] == [(200, "")] * 2
    assert server.workers() == workers
