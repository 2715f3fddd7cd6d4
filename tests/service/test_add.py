"""``nerite add``, ``rm``, ``ls`` and ``show`` as people run them, beside a server that looks at the repository."""

from __future__ import annotations

import json
import os
import pickle
import pty
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_iris
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from foreign_models import paddle
from hearing_models import recording, speech_model, wav
from llm_models import language_model
from nerite.client import Client
from nerite.frameworks.openvino.graph import openvino
from painting_models import painting_model
from serving import NERITE, PATIENCE, Serving, eventually, serving
from speaking_models import speaking_model
from tools import require

FIXED = (
    "class TritonPythonModel:\n"
    "    @staticmethod\n"
    "    def auto_complete_config(config):\n"
    '        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [1]})\n'
    '        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [1]})\n'
    "        return config\n"
    "    def execute(self, requests):\n"
    "        raise RuntimeError('it answers nobody')\n"
)


def scaling(path: Path, factor: float = 2.0, features: int = 4) -> Path:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", features]) for name in ("x", "y"))
    weights = numpy_helper.from_array(np.float32(factor), "w")
    graph = helper.make_graph([helper.make_node("Mul", ["x", "w"], ["y"])], "graph", [x], [y], [weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def nerite(*arguments: str | Path, status: int = 0, environment: dict[str, str] | None = None) -> str:
    """Run a command; return what it printed, or what it complained of if it is to fail."""
    command = [str(NERITE), *map(str, arguments)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, **(environment or {})},
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr if status else done.stdout


@pytest.fixture(scope="module")
def watching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Serving]]:
    """A repository, and a server that looks at it every second."""
    folder = tmp_path_factory.mktemp("add")
    (folder / "models").mkdir()
    flags = ("--model-control-mode=poll", "--repository-poll-secs=1", "--exit-on-error=false")
    with serving(folder / "models", folder / "log", *flags) as server:
        yield folder / "models", server


def test_added_while_a_server_looks(watching: tuple[Path, Serving], tmp_path: Path) -> None:
    repository, server = watching
    flags = ("--model-repository", repository, "--json", "--yes", "--max-batch", "8", "--backend", "onnxruntime")
    report = json.loads(nerite("add", scaling(tmp_path / "my net.onnx"), *flags))
    assert (report["model"], report["versions"], report["kind"]) == ("my_net", [1], "ONNX model")
    assert report["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert [each["batch"] for each in report["latencies"]] == [1, 2, 4, 8]
    assert all(each["ms"] >= each["compute_ms"] > 0 for each in report["latencies"])
    assert [(each["count"], len(each["repeats"])) for each in report["instances"]] == [(1, 4), (2, 4)]
    assert report["accepted"]
    eventually(lambda: server.ready("my_net"))
    with Client(server.http) as client:
        assert client.infer("my_net", {"x": [1, 2, 3, 4]})["y"].tolist() == [[2, 4, 6, 8]]
        assert client.config("my_net")["max_batch_size"] == report["config"]["max_batch_size"]
    text = (repository / "my_net" / "config.pbtxt").read_text()
    assert "# Measured: " in text
    assert nerite("check", repository).endswith("no mistakes.\n")

    # Another version: the configuration stays, and a version that does not fit it is refused.
    other = scaling(tmp_path / "better.onnx", 3.0)
    nerite("add", other, "--name", "my_net", "--version", "2", "--model-repository", repository, "--no-measure")
    assert (repository / "my_net" / "config.pbtxt").read_text() == text
    eventually(lambda: server.state("my_net", "2") == "READY")
    with Client(server.http) as client:
        assert client.infer("my_net", {"x": [1, 2, 3, 4]})["y"].tolist() == [[3, 6, 9, 12]]
    wrong = scaling(tmp_path / "wrong.onnx", features=5)
    said = nerite("add", wrong, "--name", "my_net", "--version", "3", "--model-repository", repository, status=1)
    assert "wrong.onnx cannot be served: load failed for model 'my_net': version 3" in said

    # What the server serves is what the commands tell.
    table = nerite("ls", repository, "--url", server.http)
    assert "| my_net | 1, 2     | onnxruntime |" in table
    assert "2: READY" in table
    shown = json.loads(nerite("show", "my_net", "--model-repository", repository, "--url", server.http, "--json"))
    hashes = {entry["version"]: entry.get("content_hash") for entry in server.json("POST", "/v2/repository/index")}
    assert shown["content_hash"] == hashes["2"]
    for command in ("curl", "Command line"):
        done = subprocess.run(
            shown["snippets"][command], shell=True, capture_output=True, text=True, timeout=30, check=True,
            env={**os.environ, "PATH": f"{NERITE.parent}:{os.environ['PATH']}"},
        )  # fmt: skip
        assert '"y"' in done.stdout or "| y" in done.stdout
    program = subprocess.run(
        [str(NERITE.parent / "python"), "-c", shown["snippets"]["Python"]], capture_output=True, text=True, check=True
    )
    assert "'y': array([[0., 0., 0., 0.]]" in program.stdout

    nerite("rm", "my_net", "--model-repository", repository, "--yes")
    eventually(lambda: not server.ready("my_net"))
    assert "failed" not in server.text
    assert list(repository.iterdir()) == []


def test_backends_that_have_the_same_file(tmp_path: Path) -> None:
    """They are measured beside each other, and the one that is proposed serves."""
    net, repository = scaling(tmp_path / "net.onnx"), tmp_path / "models"
    report = json.loads(nerite("add", net, "--model-repository", repository, "--json", "--yes", "--max-batch", "4"))
    (rival,) = report["rivals"]
    assert (rival["backend"], [each["batch"] for each in rival["latencies"]]) == ("openvino", [1, 2, 4])
    advice = report["proposal"][0]
    assert advice["setting"] == "backend"
    assert "onnxruntime reaches " in advice["reason"]
    assert "openvino reaches " in advice["reason"]
    assert f'"{report["config"]["backend"]}"' == advice["value"]
    assert f"backend: {advice['value']}" in (repository / "net" / "config.pbtxt").read_text()

    flags = ("--name", "named", "--backend", "openvino", "--model-repository", repository)
    report = json.loads(nerite("add", net, *flags, "--json", "--max-batch", "8", "--no"))
    assert (report["config"]["backend"], report["rivals"]) == ("openvino", [])
    assert (report["accepted"], report["config"]["max_batch_size"]) == (False, 4)
    with serving(repository, tmp_path / "log") as server, Client(server.http) as client:
        assert client.config("named")["backend"] == "openvino"
        for name in ("net", "named"):
            assert client.infer(name, {"x": [1, 2, 3, 4]})["y"].tolist() == [[2, 4, 6, 8]]
    said = nerite("add", net, *flags, "--version", "2", status=1)
    assert "the backend of 'named' is determined by its config.pbtxt.\n    Omit --backend." in said


def test_paddle(tmp_path: Path) -> None:
    (tmp_path / "relu.pdmodel").write_bytes(paddle())
    nerite("add", tmp_path / "relu.pdmodel", "--model-repository", tmp_path / "models", "--no-measure")
    with serving(tmp_path / "models", tmp_path / "log") as server, Client(server.http) as client:
        (answer,) = client.infer("relu", {"X": [[-1, 2, -3, 4]]}).values()
    assert answer.tolist() == [[0, 2, 0, 4]]


def pictures(path: Path) -> Path:
    """Write a network for pictures of any size from 3 x 3 on: the means of the convolved channels."""
    x, y = (helper.make_tensor_value_info(*each) for each in (
        ("x", TensorProto.FLOAT, ["N", 3, "H", "W"]), ("y", TensorProto.FLOAT, ["N", 2, 1, 1])
    ))  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3], strides=[8, 8]),
        helper.make_node("GlobalAveragePool", ["c"], ["y"]),
    ]
    weights = numpy_helper.from_array(np.full((2, 3, 3, 3), 1 / 27, np.float32), "w")
    graph = helper.make_graph(nodes, "graph", [x], [y], [weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_sizes_that_are_free(tmp_path: Path) -> None:
    """They are measured as pictures are, and the command at the end works; a misfit is refused, and nothing is left."""
    net, repository = pictures(tmp_path / "free.onnx"), tmp_path / "models"
    flags = ("--model-repository", repository, "--backend", "onnxruntime", "--max-batch", "2")
    said = nerite("add", net, *flags, "--shape", "x:2,8,8", status=1)
    assert "--shape x:2,8,8 does not fit the input x" in said
    assert "Write for example --shape x:3,224,224" in said
    assert "there is no input 'z' to make up" in nerite("add", net, *flags, "--shape", "z:1", status=1)
    assert not repository.exists()
    measured = "Variable dimensions were given the sizes --shape x:3,224,224;"
    assert measured not in nerite("add", net, *flags, "--shape", "x:3,16,16", "--dry-run")
    said = nerite("add", net, *flags)
    assert measured in said
    command = next(line for line in said.splitlines() if line.startswith("Try it:")).split()[2:]
    assert command == ["nerite", "client", "infer", "free", "--random", "--shape", "x:3,224,224"]
    with serving(repository, tmp_path / "log") as server:
        assert "| y " in nerite("client", "--url", server.http, *command[2:])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_batch_that_is_bounded(tmp_path: Path) -> None:
    """It is measured up to its bound, and what was measured is written, though nobody is there to agree."""
    import torch

    rows = torch.export.Dim("rows", max=6)
    module = torch.nn.Linear(64, 64).eval()
    exported = torch.export.export(module, (torch.zeros(2, 64),), dynamic_shapes=({0: rows},))
    torch.export.save(exported, tmp_path / "bounded.pt2")
    repository = tmp_path / "models"
    report = json.loads(nerite("add", tmp_path / "bounded.pt2", "--model-repository", repository, "--json"))
    assert "Not measured" not in " ".join(report["remarks"])
    assert report["latencies"][-1]["batch"] <= 6
    assert report["accepted"]
    assert report["config"]["max_batch_size"] <= 6


def test_openvino_does_not_compute_with_half_precision_unasked(tmp_path: Path) -> None:
    """Outputs of values near 1 are those of float32; where the processor has BF16, a parameter disables it."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 64]) for name in ("x", "y"))
    # Nothing but roundings: a sum of many products would average them out.
    matrix = np.diag(np.linspace(0.9, 1.1, 64, dtype=np.float32))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "graph", [x], [y], [numpy_helper.from_array(matrix, "w")]
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "near.onnx"
    )
    repository = tmp_path / "models"
    (repository / "plain" / "1").mkdir(parents=True)
    shutil.copy(tmp_path / "near.onnx", repository / "plain" / "1" / "model.onnx")
    (repository / "plain" / "config.pbtxt").write_text('backend: "openvino"')
    flags = ("--backend", "openvino", "--max-batch", "4", "--json", "--model-repository", repository)
    report = json.loads(nerite("add", tmp_path / "near.onnx", *flags))
    halves = "BF16" in openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    chosen = [each["value"] for each in report["proposal"] if each["setting"] == "INFERENCE_PRECISION_HINT"]
    assert chosen == (["f32"] if halves else [])
    sent = np.random.default_rng(1).random((1, 64)).astype(np.float32)
    with serving(repository, tmp_path / "log") as server, Client(server.http) as client:
        np.testing.assert_allclose(client.infer("near", {"x": sent})["y"], sent @ matrix, atol=1e-3)
        # What nobody has chosen is told.
        assert ("model 'plain' is computed with bf16" in server.text) == halves
        assert "model 'near' is computed with" not in server.text


def test_a_language_model(tmp_path: Path) -> None:
    """Its configuration is short, and the command at the end is one that works."""
    language_model(tmp_path / "docent" / "1")
    repository = tmp_path / "models"
    said = nerite("add", tmp_path / "docent", "--model-repository", repository)
    assert "Try it:    nerite chat docent" in said
    assert "Measure it on a server: nerite bench docent --protocol openai" in said
    text = (repository / "docent" / "config.pbtxt").read_text()
    assert 'backend: "llm"' in text
    assert len(text.splitlines()) < 12
    with serving(repository, tmp_path / "log") as server:
        done = subprocess.run(
            [str(NERITE), "chat", "docent", "--url", server.http, "--max-tokens", "4"],
            input="Who?", capture_output=True, text=True, timeout=PATIENCE, check=True,
        )  # fmt: skip
        assert done.stdout.endswith("\n")


def test_models_of_speech_and_images(tmp_path: Path) -> None:
    """Each is added with a short configuration, and the command at the end is one that works."""
    speech_model(tmp_path / "listens")
    speaking_model(tmp_path / "speaks", "alice")
    painting_model(tmp_path / "paints")
    (tmp_path / "recording.wav").write_bytes(wav(recording(1)))
    repository = tmp_path / "models"
    commands = {}
    for name, work in (("listens", "transcribes"), ("speaks", "synthesizes"), ("paints", "generates images")):
        said = nerite("add", tmp_path / name, "--model-repository", repository)
        assert f"Not measured: it {work}" in said
        assert 'backend: "llm"' in (repository / name / "config.pbtxt").read_text()
        commands[name] = shlex.split(said.rpartition("Try it:")[2])
    require("curl")
    with serving(repository, tmp_path / "log") as server:
        for name, command in commands.items():
            here = [word.replace("localhost:8000", f"http://{server.http}") for word in command]
            asked = [*here, "-sS", "--fail-with-body"]
            done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False)
            assert done.returncode == 0, (here, done.stdout, done.stderr)
            assert name != "listens" or "text" in json.loads(done.stdout)
    assert (tmp_path / "speech.wav").read_bytes().startswith(b"RIFF")
    assert json.loads((tmp_path / "image.json").read_text())["data"][0]["b64_json"]


def test_a_pickle_that_is_trusted(tmp_path: Path) -> None:
    features, classes = load_iris(return_X_y=True)
    model = LogisticRegression(max_iter=500).fit(features, classes)
    (tmp_path / "iris.pkl").write_bytes(pickle.dumps(model))
    repository = tmp_path / "models"
    assert "--trust" in nerite("add", tmp_path / "iris.pkl", "--model-repository", repository, status=1)
    assert not repository.exists()
    (tmp_path / "cut.pkl").write_bytes((tmp_path / "iris.pkl").read_bytes()[:-9])
    said = nerite("add", tmp_path / "cut.pkl", "--model-repository", repository, "--trust", status=1)
    assert "the pickle could not be read: " in said
    assert "If it is truncated, copy it again." in said
    nerite("add", tmp_path / "iris.pkl", "--model-repository", repository, "--trust", "--no-measure")
    with serving(repository, tmp_path / "log") as server, Client(server.http) as client:
        answer = client.infer("iris", {"features": features[::50].astype(np.float32)})
    np.testing.assert_allclose(answer["probabilities"], model.predict_proba(features[::50]), atol=1e-5)
    assert answer["label"].ravel().tolist() == model.predict(features[::50]).tolist()


def test_a_pipeline_of_texts(tmp_path: Path) -> None:
    """Strings are its input; its answers are those of scikit-learn, and a backend that cannot read it says why."""
    texts = ["Good, really good film!", "a bad film", "so good", "bad, bad acting", "Ärgerlich bad", "I find it good"]
    labels = ["praise", "blame", "praise", "blame", "blame", "praise"]
    model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2), stop_words=None), LogisticRegression())
    (tmp_path / "reviews.pkl").write_bytes(pickle.dumps(model.fit(texts, labels)))
    repository = tmp_path / "models"
    flags = ("--trust", "--model-repository", repository, "--json", "--max-batch", "8")
    report = json.loads(nerite("add", tmp_path / "reviews.pkl", *flags))
    assert report["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [-1, 1]}]
    assert any(each.startswith("openvino reads files of this kind, but not this one: ") for each in report["remarks"])
    asked = ["what a GOOD film", "Bad! Ärgerlich.", "", "I a b c", "x"]
    with serving(repository, tmp_path / "log") as server, Client(server.http) as client:
        # One by one: the largest batch is what was measured to pay off.
        answers = [client.infer("reviews", {"text": [[each]]}) for each in asked]
    assert [answer["label"].item().decode() for answer in answers] == list(model.predict(asked))
    probabilities = np.concatenate([answer["probabilities"] for answer in answers])
    np.testing.assert_allclose(probabilities, model.predict_proba(asked), atol=1e-5)

    accents = make_pipeline(TfidfVectorizer(strip_accents="unicode"), LogisticRegression()).fit(texts, labels)
    (tmp_path / "accents.pkl").write_bytes(pickle.dumps(accents))
    said = nerite("add", tmp_path / "accents.pkl", "--trust", "--model-repository", repository, status=1)
    assert "could not be converted to ONNX" in said
    assert "serve it from a model.py" in said


def test_nothing_is_left_of_a_failure(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(scaling(tmp_path / "whole.onnx").read_bytes()[:-10])
    said = nerite("add", tmp_path / "net.onnx", "--model-repository", tmp_path / "models", status=1)
    assert said.startswith(f"nerite add: {tmp_path}/net.onnx: the file is truncated")
    (tmp_path / "model.py").write_text("class TritonPythonModel:\n    execute = print\n")
    said = nerite("add", tmp_path / "model.py", "--name", "m", "--model-repository", tmp_path / "models", status=1)
    assert "its configuration has neither inputs nor outputs.\n    Implement auto_complete_config" in said
    (tmp_path / "net.plan").write_bytes(b"ftrt" + bytes(50))
    said = nerite("add", tmp_path / "net.plan", "--model-repository", tmp_path / "models", status=1)
    assert "pip install 'nerite[tensorrt]'" in said
    assert "Pass --no-load to add it anyway" in said
    assert not (tmp_path / "models").exists()
    nerite("add", tmp_path / "net.plan", "--model-repository", tmp_path / "models", "--no-load")
    assert (tmp_path / "models" / "net" / "1" / "model.plan").exists()


def test_tried_and_not_added(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FIXED)
    environment = {"NERITE_MODEL_REPOSITORY": str(tmp_path / "models")}
    said = nerite("add", tmp_path / "model.py", "--name", "m", "--dry-run", environment=environment)
    assert f"Would be added as model 'm', version 1, in {tmp_path}/models." in said
    assert "Not measured, because it fails with random data" in said
    assert "it answers nobody" in said
    assert not (tmp_path / "models").exists()


def test_given_up(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import time\ntime.sleep(60)\n" + FIXED)
    command = [str(NERITE), "add", tmp_path / "model.py", "--name", "m", "--model-repository", tmp_path / "models"]
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually(lambda: any(tmp_path.glob("models/.adding-*/m/config.pbtxt")))
        process.send_signal(number)
        assert process.wait(30) == status
        assert not (tmp_path / "models").exists()


def test_at_a_terminal(tmp_path: Path) -> None:
    """A person sees how far it has come, and is asked."""
    ours, theirs = pty.openpty()
    command = [
        str(NERITE),
        "add",
        scaling(tmp_path / "net.onnx"),
        "--model-repository",
        tmp_path / "models",
        "--max-batch",
        "8",
    ]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    said = b""
    while b"Write these settings? [Y/n]" not in said:
        said += os.read(ours, 4096)
    os.write(ours, b"n\n")
    while process.poll() is None:
        try:
            said += os.read(ours, 4096)
        except OSError:  # the other end is closed
            time.sleep(0.01)
    os.close(ours)
    assert process.returncode == 0
    assert b"copying [" in said
    assert b"measuring batches of 8 with openvino ..." in said
    assert b"| max_batch_size" in said
    assert "Measured" not in (tmp_path / "models" / "net" / "config.pbtxt").read_text()
