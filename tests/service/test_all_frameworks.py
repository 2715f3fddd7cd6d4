"""One server with a model of every kind, each brought by ``nerite add``: all that come together in one process.

What stock clients get is what each framework itself computes, whichever was loaded before it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

import frameworks
from frameworks import Artifact, Served
from nerite.backends import registry
from pages import ROOT, rows
from serving import IN_PROCESS, NERITE, Serving, eventually, serving

pytestmark = pytest.mark.timeout(300)  # frameworks are imported, and programs compiled

PROTOCOLS = (tritonclient.http, tritonclient.grpc)
LOOKUP = ROOT / "examples" / "backends" / "lookup"
TABLE = rows("docs/frameworks.md", "`backend`")
ONE_OF_EACH = ("python", "onnx", "exported", "openvino", "saved", "tflite", "boosted")
"""A model of each backend that needs no GPU and answers rows with rows."""
LANGUAGE_MODELS = ("llm", "tensorrt_llm", "vllm")
SYMBOLS = np.array([[b"H"], [b"Li"]], object)


class Repository(NamedTuple):
    """The models, and how a server is to be started for them."""

    path: Path
    models: dict[str, Served]
    flags: tuple[str, ...]
    environment: dict[str, str]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory, tensorflow_artifacts: Path) -> dict[str, Artifact]:
    return frameworks.artifacts(tmp_path_factory.mktemp("artifacts"), tensorflow_artifacts)


@pytest.fixture(scope="module")
def repository(
    tmp_path_factory: pytest.TempPathFactory, artifacts: dict[str, Artifact], tensorflow_artifacts: Path
) -> Repository:
    folder = tmp_path_factory.mktemp("frameworks")
    models = folder / "models"

    def add(artifact: Artifact) -> None:
        done = nerite_add(artifact.path, models, *artifact.flags)
        assert done.returncode == 0, done.stderr

    with ThreadPoolExecutor(2) as adding:
        list(adding.map(add, artifacts.values()))
    assert len({path.name for path in models.iterdir()} & artifacts.keys()) == 12
    served = {name: artifact.served for name, artifact in artifacts.items()}
    assert {served[name].backend for name in ONE_OF_EACH} == registry.ENTRIES.keys() - {"tensorrt", *LANGUAGE_MODELS}
    by_hand = {"inside": f'backend: "python"\n{IN_PROCESS}', "perceptron": 'backend: "perceptron"'}
    for name, config in by_hand.items():
        frameworks.write_perceptron(models / name / "1")
        (models / name / "config.pbtxt").write_text(config)
        served[name] = served["python"]._replace(backend="python" if name == "inside" else name)
    (models / "perceptron" / "1" / "model.py").unlink()
    (folder / "backends" / "perceptron").mkdir(parents=True)
    (folder / "backends" / "perceptron" / "model.py").write_text(frameworks.PERCEPTRON)
    for name, summing in frameworks.SUMMING.items():
        summing.place(models / name / "1", tensorflow_artifacts)
    shutil.copytree(LOOKUP / "models" / "elements", models / "elements")
    served["elements"] = Served("lookup", SYMBOLS, {"name": np.array([[b"Hydrogen"], [b"Lithium"]], object)})
    flags = ("--model-control-mode=explicit", f"--backend-directory={folder / 'backends'}")
    return Repository(models, served, flags, {"PYTHONPATH": f"{installed_lookup(folder / 'site')}:{LOOKUP}"})


def nerite_add(path: Path, models: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [str(NERITE), "add", str(path), "--model-repository", str(models), "--no-measure", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def installed_lookup(site: Path) -> Path:
    """Write what an installer would of the example of a backend in a package."""
    metadata = site / "nerite_lookup-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nerite-lookup\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[nerite.backends]\nlookup = nerite_lookup:LookupBackend\n")
    return site


@pytest.fixture(scope="module")
def server(repository: Repository, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """All models, loaded side by side."""
    log = tmp_path_factory.mktemp("log") / "log"
    flags = (*repository.flags, "--load-model=*")
    with serving(repository.path, log, *flags, environment=repository.environment) as running:
        yield running


def client(server: Serving, protocol: ModuleType) -> Any:
    return protocol.InferenceServerClient(server.http if protocol is tritonclient.http else server.grpc)


def check(asking: Any, protocol: ModuleType, name: str, model: Served, rows: slice) -> None:
    """Ask for some rows; the answer has to be that of the framework."""
    given = model.rows[rows]
    metadata = asking.get_model_metadata(name, **({} if protocol is tritonclient.http else {"as_json": True}))
    (described,) = metadata["inputs"]
    tensor = protocol.InferInput(described["name"], given.shape, described["datatype"])
    tensor.set_data_from_numpy(given)
    answer = asking.infer(name, [tensor])
    for output, expected in model.expected.items():
        found = answer.as_numpy(output)
        if expected.dtype == object:
            assert found.tolist() == expected[rows].tolist()
        else:
            np.testing.assert_allclose(found, expected[rows], rtol=1e-4, atol=1e-3, err_msg=name)


def check_all_at_once(server: Serving, models: Mapping[str, Served], times: int) -> None:
    """Ask every model from several threads, over both protocols, in batches of several sizes."""

    def ask(turn: int) -> None:
        protocol = PROTOCOLS[turn % 2]
        with client(server, protocol) as asking:
            for number, (name, model) in enumerate(models.items()):
                start = (turn + number) % 2
                check(asking, protocol, name, model, slice(start, start + 1 + (turn * 7 + number) % model.batch))

    with ThreadPoolExecutor(8) as callers:
        list(callers.map(ask, range(times)))


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=["http", "grpc"])
def test_answers_are_those_of_the_framework(server: Serving, repository: Repository, protocol: ModuleType) -> None:
    with client(server, protocol) as asking:
        for name, model in repository.models.items():
            for start in (0, len(model.rows) - model.batch):
                check(asking, protocol, name, model, slice(max(start, 0), max(start, 0) + model.batch))


def test_all_at_once(server: Serving, repository: Repository) -> None:
    check_all_at_once(server, repository.models, 16)


def test_what_is_told_of_each(server: Serving, repository: Repository) -> None:
    metrics = server.metrics()
    for name, model in repository.models.items():
        config = server.json("GET", f"/v2/models/{name}/config")
        assert (config["backend"], config["max_batch_size"] >= model.batch) == (model.backend, True), name
        (told,) = server.json("GET", f"/v2/models/{name}/stats")["model_stats"]
        assert told["inference_stats"]["success"]["count"] >= told["execution_count"] > 0, name
        counted = metrics[f'nv_inference_count{{model="{name}",version="{told["version"]}"}}']
        assert counted == told["inference_count"] > 0, name


def test_workers_for_those_that_are_isolated(server: Serving, repository: Repository) -> None:
    isolated = {name for name, model in repository.models.items() if is_isolated(name, model)}
    assert isolated == {"python", "perceptron", "saved"}
    assert server.workers().keys() == {"python_0", "perceptron_0", "tensorflow_0"}


def is_isolated(name: str, model: Served) -> bool:
    if model.backend not in registry.ENTRIES:
        return model.backend == "perceptron"
    return name != "inside" and registry.backend(model.backend).isolated


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_number_of_threads_that_is_none(server: Serving, repository: Repository, name: str) -> None:
    """The parameter of docs/frameworks.md is read: a wrong value is refused, and what served goes on."""
    parameter = TABLE[repository.models[name].backend]["threads of an instance"].strip("`")
    config = server.json("GET", f"/v2/models/{name}/config")
    config["parameters"][parameter] = {"string_value": "many"}
    status, _, body = server.ask(
        "POST", f"/v2/repository/models/{name}/load", {"parameters": {"config": json.dumps(config)}}
    )
    assert (status, b"many" in body) == (400, True), body
    assert parameter.encode() in body
    assert server.ready(name)


@pytest.mark.parametrize("name", frameworks.SUMMING)
def test_states(server: Serving, name: str) -> None:
    """Of the backends whose own tests have none."""
    summing = frameworks.SUMMING[name]
    with client(server, tritonclient.grpc) as asking:
        answers = []
        for step in range(3):
            tensor = tritonclient.grpc.InferInput("a", [1, summing.width], "FP32")
            tensor.set_data_from_numpy(np.ones((1, summing.width), np.float32))
            sequence = {"sequence_id": 5, "sequence_start": step == 0, "sequence_end": step == 2}
            answers.append(asking.infer(name, [tensor], **sequence).as_numpy(summing.output).tolist())
    assert answers == [[[answer] * summing.width] for answer in summing.answers]


def test_each_goes_and_comes_back(server: Serving, repository: Repository) -> None:
    """Workers end with their models, and the others go on answering."""
    rest = dict(repository.models)
    for name in frameworks.SUMMING:
        unload(server, name)
    for name in repository.models:
        del rest[name]
        unload(server, name)
        check_all_at_once(server, rest, 1)
    eventually(lambda: not server.workers())
    quick = {name: model for name, model in repository.models.items() if not is_isolated(name, model)}
    for name in reversed(quick):
        assert server.ask("POST", f"/v2/repository/models/{name}/load")[0] == 200
    check_all_at_once(server, quick, 4)


def unload(server: Serving, name: str) -> None:
    server.ask("POST", f"/v2/repository/models/{name}/unload")
    version = "3" if name == "directory" else "1"
    eventually(lambda: server.state(name, version) == "UNAVAILABLE")


def test_another_order(repository: Repository, tmp_path: Path) -> None:
    """Forests first, PyTorch last, and all that is there is asked while the next one is loaded."""
    order = ("boosted", "lightgbm", "sklearn", "tflite", "openvino", "inside", "onnx", "torchscript")
    there: dict[str, Served] = {}
    stop = threading.Event()

    def ask_all_the_while() -> None:
        while not stop.is_set():
            check_all_at_once(other, dict(there), 2)

    with (
        serving(repository.path, tmp_path / "log", *repository.flags, environment=repository.environment) as other,
        ThreadPoolExecutor(1) as asking,
    ):
        asked = asking.submit(ask_all_the_while)
        try:
            for name in order:
                status, _, body = other.ask("POST", f"/v2/repository/models/{name}/load")
                assert status == 200, body
                there[name] = repository.models[name]
        finally:
            stop.set()
        asked.result()
        check_all_at_once(other, there, 8)


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


AGAIN = "Copy or download it again"
BROKEN: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a cut ONNX model": ("onnx", half, AGAIN),
    "a cut TorchScript": ("torchscript", half, AGAIN),
    "a cut exported program": ("exported", half, AGAIN),
    "no weights": ("openvino", lambda path: path.with_suffix(".bin").unlink(), "Copy openvino.bin into the same dir"),
    "a cut SavedModel": ("saved", lambda path: half(path / "saved_model.pb"), AGAIN),
    "a cut forest of XGBoost": ("boosted", half, AGAIN),
    "a cut forest of LightGBM": ("lightgbm", half, AGAIN),
    "a cut LiteRT model": ("tflite", half, "The file is cut off or damaged: copy it again"),
    "another class": ("python", lambda path: (path / "model.py").write_text("class A: pass"), "Write a class"),
}
"""Of which artifact, what becomes of it, and what is to be done."""


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_refused_with_what_to_do(artifacts: dict[str, Artifact], tmp_path: Path, what: str) -> None:
    name, harm, remedy = BROKEN[what]
    artifact = artifacts[name]
    copy = shutil.copytree(artifact.path.parent, tmp_path / "artifacts") / artifact.path.name
    harm(copy)
    done = nerite_add(copy, tmp_path / "models", *artifact.flags)
    assert (done.returncode, done.stderr.startswith("nerite add: ")) == (1, True)
    assert "Traceback" not in done.stderr
    assert remedy in done.stderr
    assert not (tmp_path / "models").exists()
