"""Disks that are full, and limits of the size of files: requests are answered, and what was not written is told."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import pytest

from faults import Bystanders, mounted, needs_mounts, seen
from serving import IDENTITY, Serving, binary_request, eventually, pbtxt, python_model, serving

EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")
FULL = "No space left on device"
LARGE = np.arange(3_000_000, dtype=np.float32).reshape(1, -1)


@pytest.fixture(scope="module", autouse=True)
def _mounts(tmp_path_factory: pytest.TempPathFactory) -> None:
    needs_mounts(tmp_path_factory.mktemp("mount"))


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """Have the file system of a folder full in the block."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    try:
        yield
    finally:
        filler.unlink()


def load_of_files(server: Serving) -> tuple[int, str]:
    """Load a model with files that come with the request."""
    model = "import triton_python_backend_utils as pb_utils\nclass TritonPythonModel:\n" + indent(IDENTITY, "    ")
    config: dict[str, Any] = {"backend": "python", "max_batch_size": 8}
    for name, tensor in (("input", "INPUT0"), ("output", "OUTPUT0")):
        config[name] = [{"name": tensor, "data_type": "TYPE_FP32", "dims": [-1]}]
    parameters = {"config": json.dumps(config), "file:1/model.py": base64.b64encode(model.encode()).decode()}
    status, _, answer = server.ask("POST", "/v2/repository/models/sent/load", {"parameters": parameters})
    return status, answer.decode()


def test_log_traces_and_files_of_a_load(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "other", IDENTITY)
    disk = tmp_path / "disk"
    disk.mkdir()
    flags = (f"--trace-config=triton,file={disk}/traces", "--trace-config=rate=1", "--trace-config=level=TIMESTAMPS")
    with serving(
        tmp_path / "models", tmp_path / "log", *EXPLICIT, *flags, within=mounted(disk, "2m"),
        environment={"TMPDIR": str(disk)},
    ) as server:  # fmt: skip
        inside = seen(server, disk)
        assert load_of_files(server)[0] == 200
        for number in range(120):
            assert server.infer("other", [number]) == [number]
        before = json.loads((inside / "traces").read_text())
        assert before
        with full(inside), Bystanders(server):
            status, error = load_of_files(server)
            assert status == 500
            assert FULL in error and str(disk) in error and "TMPDIR" in error
            assert server.infer("sent", [1.0]) == [1.0]
            for number in range(120):
                assert server.infer("other", [number]) == [number]
            eventually(lambda: "cannot write 100 traces, which are lost" in server.text)
        assert f"{FULL}: '{disk}/traces' (free up space there)" in server.text
        assert json.loads((inside / "traces").read_text()) == before
        assert [each.name for each in inside.glob("nerite-model-*")] != []
        assert load_of_files(server)[0] == 200
        for number in range(120):
            assert server.infer("sent", [number]) == [number]
        after = json.loads((inside / "traces").read_text())
        assert after[: len(before)] == before and len(after) > len(before)
        assert server.ask("POST", "/v2/repository/models/sent/unload")[0] == 200
        eventually(lambda: not list(inside.glob("nerite-model-*")))


def test_the_log(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "other", IDENTITY)
    python_model(tmp_path / "models", "talks", IDENTITY.replace(":\n", ":\n    print('x' * 1000)\n", 1))
    disk = tmp_path / "disk"
    disk.mkdir()

    class Inside(Serving):
        @property
        def text(self) -> str:
            log = seen(self, disk / "log")
            return log.read_text() if log.exists() else ""

    flags = (f"--log-file={disk}/log", *EXPLICIT)
    with serving(tmp_path / "models", tmp_path / "stderr", *flags, within=mounted(disk, "1m"), kind=Inside) as server:
        told = f"cannot write the log: {FULL}: '{disk}/log' (free up space there)"

        def is_told() -> bool:
            assert server.infer("talks", [1.0]) == [1.0]
            return told in (tmp_path / "stderr").read_text()

        with full(seen(server, disk)), Bystanders(server):
            eventually(is_told)
            for _ in range(10):
                is_told()
        assert (tmp_path / "stderr").read_text().count(told) == 1
        assert server.ask("POST", "/v2/repository/models/other/unload")[0] == 200
        eventually(lambda: "log records before this one were lost: " + FULL in server.text)
        eventually(lambda: "successfully unloaded 'other'" in server.text)
        assert re.search(r".[IWE]\d{4} \d\d:\d\d", server.text) is None, "each record has a line of its own"


def test_the_shared_memory_of_clients(tmp_path: Path) -> None:
    """Only what a client wants written there cannot be had: large tensors of others go another way."""
    python_model(tmp_path / "models", "other", IDENTITY)
    with serving(
        tmp_path / "models", tmp_path / "log", "--allow-client-shm=true", within=mounted("/dev/shm", "1m")
    ) as server:
        folder = seen(server, "/dev/shm")
        size = 800_000
        with (folder / "out").open("wb") as file:
            file.truncate(size)
        asked = {"key": "out", "offset": 0, "byte_size": size}
        assert server.ask("POST", "/v2/systemsharedmemory/region/out/register", asked)[0] == 200

        def ask() -> tuple[int, str]:
            place = {"shared_memory_region": "out", "shared_memory_byte_size": size}
            tensor = {"name": "INPUT0", "shape": [1, size // 4], "datatype": "FP32", "data": [1] * (size // 4)}
            body = {"inputs": [tensor], "outputs": [{"name": "OUTPUT0", "parameters": place}]}
            status, _, answer = server.ask("POST", "/v2/models/other/infer", body)
            return status, answer.decode()

        with full(folder), Bystanders(server):
            status, error = ask()
            assert status == 500
            assert (
                f"unable to write to shared memory region 'out': {FULL}: '/dev/shm/out' (free up space there)" in error
            )
            assert large(server)
        assert ask()[0] == 200
        assert np.frombuffer((folder / "out").read_bytes(), np.float32).all()


def large(server: Serving) -> bool:
    """Ask with a large tensor; return whether it comes back."""
    body, headers = binary_request(LARGE)
    status, _, answer = server.ask("POST", "/v2/models/other/infer", body, **headers)
    return status == 200 and answer.endswith(LARGE.tobytes())


def test_a_limit_of_the_size_of_files(tmp_path: Path) -> None:
    """Memory for tensors is a file to the system. Where it may not be large they are copied."""
    python_model(tmp_path / "models", "other", IDENTITY, pbtxt())
    limited = ("sh", "-c", 'ulimit -f 2048 && exec "$0" "$@"')
    with serving(tmp_path / "models", tmp_path / "log", within=limited) as server, Bystanders(server):
        for _ in range(3):
            assert large(server)
