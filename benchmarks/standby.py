"""Time to the first answer: of a server that is started, and of one that stands by and is woken.

    python benchmarks/standby.py [--rounds N] [--only WORD] [--print]

The time of a start begins with the process, that of a wake-up with ``POST /v2/repository/wake``; both end with the
answer to a request. Files are in the page cache in both cases.
"""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import llm_checkpoint
from contestants import free_ports, identity_repository, stopped
from page import command_line, machine, publish

from nerite.backends.interface import ModelContext
from nerite.llm import installation
from onnx_models import resnet

_LLM: Final = "30M"
_PATIENCE: Final = 120.0
_STANDS_BY: Final = "Stands by to load"


class WokenModel(NamedTuple):
    """A model, and a request to it."""

    name: str
    write: Callable[[Path], None]
    path: str
    body: dict[str, Any]


def write_onnx(repository: Path) -> None:
    """Write an ONNX model of 45 MB."""
    model = repository / "net" / "1"
    model.mkdir(parents=True)
    (model / "model.onnx").write_bytes(resnet()[0].SerializeToString())
    (model.parent / "config.pbtxt").write_text('backend: "onnxruntime"\nmax_batch_size: 8\n')


def write_openvino(repository: Path) -> None:
    """Write the same model for OpenVINO, and have it converted."""
    model = repository / "net" / "1"
    model.mkdir(parents=True)
    (model / "model.onnx").write_bytes(resnet()[0].SerializeToString())
    convert = f"import openvino as o; o.save_model(o.convert_model('{model}/model.onnx'), '{model}/model.xml')"
    subprocess.run([sys.executable, "-c", convert], check=True)
    (model / "model.onnx").unlink()
    (model.parent / "config.pbtxt").write_text('backend: "openvino"\nmax_batch_size: 8\n')


def write_python(repository: Path) -> None:
    """Write a Python model in a worker."""
    identity_repository(repository.parent)


def write_llm(repository: Path) -> None:
    """Write a language model of 30 million parameters, and convert it as its first start would."""
    model = repository / "net"
    llm_checkpoint.write(_LLM, model / "1")
    (model / "config.pbtxt").write_text('backend: "llm"\n')
    installation.converted(ModelContext("net", 1, model, {}))


def tensors(name: str, *dims: int) -> dict[str, Any]:
    """Return a request with zeros."""
    count = 1
    for dim in dims:
        count *= dim
    return {"inputs": [{"name": name, "shape": [1, *dims], "datatype": "FP32", "data": [0.0] * count}]}


_PICTURE: Final = tensors("IN", *resnet()[1])
_PROMPT: Final = {"model": "net", "prompt": "def main", "max_tokens": 1}
MODELS: Final = (
    WokenModel("Python model in a worker", write_python, "/v2/models/identity/infer", tensors("INPUT0", 16)),
    WokenModel("ONNX Runtime, ResNet-18", write_onnx, "/v2/models/net/infer", _PICTURE),
    WokenModel("OpenVINO, ResNet-18", write_openvino, "/v2/models/net/infer", _PICTURE),
    WokenModel("language model, 30M, OpenVINO GenAI", write_llm, "/v1/completions", _PROMPT),
)


class StartedServer(NamedTuple):
    """A server that was started."""

    port: int
    log: Path
    process: subprocess.Popen[bytes]

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> bool:
        """Send a request; return whether it was answered with 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            response.read()
            return response.status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait. Raises ``RuntimeError`` if the server ends, or after two minutes."""
        deadline = time.monotonic() + _PATIENCE
        while not holds():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(self.log.read_text(errors="replace")[-2000:])
            time.sleep(0.005)


@contextmanager
def started(repository: Path, *flags: str) -> Iterator[StartedServer]:
    """Start a server; it may not be ready yet."""
    ports = free_ports()
    options = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)]
    nerite = [sys.executable, str(Path(sys.executable).with_name("nerite")), "serve"]
    log = repository.parent / "server.log"
    with log.open("wb") as sink:
        process = subprocess.Popen([*nerite, str(repository), *options, *flags], stdout=sink, stderr=sink)
    with stopped(process):
        yield StartedServer(ports[0], log, process)


def cold(model: WokenModel, repository: Path) -> float:
    """Return the seconds from the start of a server to its first answer."""
    began = time.monotonic()
    with started(repository) as server:
        server.until(lambda: server.ask("POST", model.path, model.body))
        return time.monotonic() - began


def woken(model: WokenModel, repository: Path) -> tuple[float, float]:
    """Return the seconds from a wake-up to its answer, and to that of the first request."""
    with started(repository, "--standby") as server:
        server.until(lambda: _STANDS_BY in server.log.read_text(errors="replace"))
        began = time.monotonic()
        assert server.ask("POST", "/v2/repository/wake"), server.log.read_text(errors="replace")[-2000:]
        loaded = time.monotonic() - began
        assert server.ask("POST", model.path, model.body), server.log.read_text(errors="replace")[-2000:]
        return loaded, time.monotonic() - began


def row(model: WokenModel, rounds: int) -> str:
    """Measure a model."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "models"
        model.write(repository)
        cold(model, repository)  # what the first start keeps for later ones
        starts = [cold(model, repository) for _ in range(rounds)]
        wakes = [woken(model, repository) for _ in range(rounds)]
    loaded, answered = (statistics.median(times) for times in zip(*wakes, strict=True))
    return f"| {model.name} | {statistics.median(starts):.2f} s | {loaded:.2f} s | {answered:.2f} s |"


if __name__ == "__main__":
    flags = command_line(__doc__, 0.0, 5)
    flags.add_argument("--only", default="", help="models whose name has this in it")
    given = flags.parse_args()
    lines = [
        f"Median of {given.rounds}; {machine()}.\n",
        "| model | started: first answer | woken: models ready | first answer |",
        "|---|---|---|---|",
    ]
    lines += [row(each, given.rounds) for each in MODELS if given.only in each.name]
    publish("standby", "\n".join(lines) + "\n", given)
