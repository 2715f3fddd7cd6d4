"""The same models in Nerite, in MLServer and in NVIDIA's Triton around the framework: calls a second, side by side.

A network is wrapped for MLServer and for Triton's Python backend as their users do: the framework is opened once, and
computes what a request, or a batch of them, brings. The forests are served by MLServer's own runtimes. Each server has
one instance with one thread and, where it can batch, batches of up to 32 without a delay; MLServer is measured with its
adaptive batching and without, and the better of the two counts.

All are asked over gRPC with raw tensors, one row a call, by h2load, at 1, 8 and 32 calls at a time. They run at the
same time and take turns; a ratio is of medians.

MLServer is installed on first use into ``~/.cache/nerite-mlserver`` (about 700 MB), and takes the frameworks from the
environment that this runs in.

    python benchmarks/peers.py [--seconds S] [--rounds N] [--only CONTESTANT ...] [--print]
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tritonclient.grpc
from backends import written
from bare_loop import bare_loop
from contestants import Contestant, free_ports, nerite, real_triton, stopped, wait_ready
from loads import h2load, need
from page import command_line, machine, publish
from zoo import CONTESTANTS
from zoo.contestant import ROWS, rows, tensors

_MLSERVER = ("mlserver==1.7.1", "mlserver-xgboost==1.7.1", "mlserver-lightgbm==1.7.1", "mlserver-sklearn==1.7.1")
_WITH = "uvloop<0.22"
"""MLServer 1.7.1 asks later ones for an event loop in a way that they refuse."""
_RUNTIMES = {
    "xgboost": ("mlserver_xgboost.XGBoostModel", "xgboost.ubj"),
    "lightgbm": ("mlserver_lightgbm.LightGBMModel", "model.txt"),
    "sklearn": ("mlserver_sklearn.SKLearnModel", "forest.pkl"),
}
_CELLS = [
    *((name, model) for name in ("pytorch, exported", "onnxruntime") for model in ("cnn", "encoder")),
    *((name, "forest") for name in _RUNTIMES),
]
_BATCH = 32
_NERITE = """
max_batch_size: 32
dynamic_batching { }
instance_group [{ kind: KIND_CPU count: 1 }]
"""
_WRAPPED = """
import sys
from pathlib import Path
sys.path += [{zoo!r}, {packages!r}]
import numpy as np
import triton_python_backend_utils as pb_utils
from zoo import CONTESTANTS


class TritonPythonModel:
    def initialize(self, args):
        self.call = CONTESTANTS[{name!r}].opened({model!r}, Path({version!r}))

    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        computed = np.asarray(self.call(np.concatenate(given)), np.float32)
        parts = np.split(computed, np.cumsum([len(rows) for rows in given])[:-1])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", part)]) for part in parts]
"""


class Rates(NamedTuple):
    """Medians, in calls a second."""

    contestant: str
    model: str
    calls: int
    bare: float
    nerite: float
    triton: float
    mlserver: float
    adaptive: float


def mlserver_python() -> Path:
    """Return the interpreter of MLServer's environment, which is made on first use."""
    home = Path.home() / ".cache" / "nerite-mlserver"
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        subprocess.run([python, "-m", "pip", "--quiet", "install", *_MLSERVER, _WITH], check=True)
        (home / "ready").touch()
    # The frameworks that MLServer does not bring, behind its own packages.
    packages = next((home / "lib").glob("python*")) / "site-packages"
    (packages / "frameworks.pth").write_text(f"{Path(__file__).parent}\n{sysconfig.get_path('purelib')}\n")
    return python


@contextmanager
def mlserver(name: str, version: Path, contestant: str, folder: Path, *, adaptive: bool) -> Iterator[Contestant]:
    """Run MLServer with one model."""
    implementation, file = _RUNTIMES.get(contestant, ("zoo.mlserver_runtime.ZooModel", ""))
    model = version.parent.name
    extra = {"contestant": contestant, "model": model, "version": str(version)}
    settings = {
        "name": model,
        "implementation": implementation,
        "parameters": {"uri": str(version / file), "version": "1", "extra": extra},
    }
    if adaptive:
        settings |= {"max_batch_size": _BATCH, "max_batch_time": 0.001}
    place = folder / name.replace(" ", "-")
    (place / model).mkdir(parents=True)
    (place / model / "model-settings.json").write_text(json.dumps(settings))
    http, grpc, metrics = free_ports()
    ports = {"host": "127.0.0.1", "http_port": http, "grpc_port": grpc, "metrics_port": metrics}
    (place / "settings.json").write_text(json.dumps({**ports, "debug": False, "load_models_at_startup": True}))
    log = place / "log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [mlserver_python().with_name("mlserver"), "start", place]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, env=environment, stdout=sink, stderr=subprocess.STDOUT, cwd=place)
    with stopped(process):
        wait_ready(http, process, log, f"v2/models/{model}/ready")
        yield Contestant(name, http, grpc, process)


def wrapped(name: str, version: Path, folder: Path) -> Path:
    """Write the repository of Triton, whose Python backend computes with the framework."""
    model = version.parent.name
    place = folder / "wrapped" / model
    (place / "1").mkdir(parents=True)
    known = tensors(model)
    (place / "config.pbtxt").write_text(f'backend: "python"\n{known}{_NERITE}')
    (place / "1" / "model.py").write_text(
        _WRAPPED.format(
            zoo=str(Path(__file__).parent),
            packages=sysconfig.get_path("purelib"),
            name=name,
            model=model,
            version=str(version),
        )
    )
    return place.parent


def write_body(server: str, name: str, model: str, folder: Path) -> str:
    """Write the request of one row for a server, and return its name."""
    from nerite.wire.grpc_service import ModelInferRequest

    tensor = CONTESTANTS[name].input if server == "Nerite" else "X"
    message = ModelInferRequest(
        model_name=model,
        inputs=[{"name": tensor, "datatype": "FP32", "shape": [1, *ROWS[model]]}],
        raw_input_contents=[rows(model, 1).tobytes()],
    ).SerializeToString()
    body = f"{server.split(',')[0]}-{model}"
    (folder / f"{body}.grpc").write_bytes(b"\0" + len(message).to_bytes(4, "big") + message)
    return body


def answers(server: Contestant, name: str, model: str) -> None:
    """Ask once, as the load does. Raises what the client raises if the server does not answer with a number."""
    given = tritonclient.grpc.InferInput(
        CONTESTANTS[name].input if server.name == "Nerite" else "X", [1, *ROWS[model]], "FP32"
    )
    given.set_data_from_numpy(rows(model, 1))
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        answer = client.infer(model, [given])
        output = answer.get_response().outputs[0].name
        if not np.isfinite(answer.as_numpy(output).astype(float)).all():
            sys.exit(f"{server.name} computes something else than {name}")


def measure(name: str, model: str, seconds: int, rounds: int) -> list[Rates]:
    """Run all servers with one model, and let them take turns."""
    found = []
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        folder = Path(directory)
        version = written(name, model, folder / "models")
        (version.parent / "config.pbtxt").write_text(CONTESTANTS[name].config(model) + _NERITE)
        servers = [
            stack.enter_context(nerite("Nerite", version.parents[1], folder)),
            stack.enter_context(real_triton(wrapped(name, version, folder), folder)),
            stack.enter_context(mlserver("MLServer", version, name, folder, adaptive=False)),
            stack.enter_context(mlserver("MLServer, batching", version, name, folder, adaptive=True)),
        ]
        for server in servers:
            answers(server, name, model)
        for calls in (1, 8, 32):
            loads = {
                server.name: h2load(folder, write_body(server.name, name, model, folder), calls, 1, seconds)
                for server in servers
            }
            rates: dict[str, list[float]] = {"bare": [], **{server.name: [] for server in servers}}
            with bare_loop(name, version, calls) as loop:
                for _ in range(rounds):
                    rates["bare"].append(loop.rate(seconds))
                    for server in servers:
                        rates[server.name].append(loads[server.name](server).rate)
            found.append(Rates(name, model, calls, *(statistics.median(each) for each in rates.values())))
            print(table(found[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    return found


def table(found: list[Rates]) -> str:
    """Return the table."""
    lines = [
        "| framework | model | calls at a time | bare loop | Nerite | Triton around it | ratio "
        "| MLServer | with batching | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, model, calls, loop, ours, triton, plain, adaptive in found:
        lines.append(
            f"| {name} | {model} | {calls} | {loop:,.0f} | {ours:,.0f} | {triton:,.0f} | **{ours / triton:.2f}** "
            f"| {plain:,.0f} | {adaptive:,.0f} | **{ours / max(plain, adaptive):.2f}** |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and report."""
    parser = command_line(__doc__, 2, 3)
    parser.add_argument("--only", nargs="*", default=[], help="cells whose framework or model is one of these")
    arguments = parser.parse_args()
    need("h2load")
    found = []
    for name, model in _CELLS:
        if not arguments.only or {name, model} & set(arguments.only):
            found += measure(name, model, arguments.seconds, arguments.rounds)
    text = f"Measured on {machine()}; {arguments.rounds} rounds of {arguments.seconds} s.\n\n{table(found)}"
    publish("peers", text, arguments)


if __name__ == "__main__":
    main()
