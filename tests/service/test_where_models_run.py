"""Models of frameworks that run in the server unless they ask for a worker: of their own, or one that they share."""

from __future__ import annotations

import os
import signal
import zipfile
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from serving import adds, ensemble, eventually, pbtxt, python_model, serving, step


def doubling(models: Path, name: str, parameter: str, value: str) -> None:
    """Write an ONNX model from INPUT0 to OUTPUT0."""
    version = models / name / "1"
    version.mkdir(parents=True)
    sides = [helper.make_tensor_value_info(each, TensorProto.FLOAT, ["N", "W"]) for each in ("INPUT0", "OUTPUT0")]
    nodes = [helper.make_node("Add", ["INPUT0", "INPUT0"], ["OUTPUT0"])]
    graph = helper.make_graph(nodes, "graph", sides[:1], sides[1:])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), version / "model.onnx"
    )
    config = pbtxt().replace('backend: "python"', 'backend: "onnxruntime"').replace("KIND_CPU", "KIND_CPU count: 1")
    (models / name / "config.pbtxt").write_text(
        f'{config} parameters {{ key: "{parameter}" value: {{ string_value: "{value}" }} }}'
    )


def test_a_worker_of_its_own(tmp_path: Path) -> None:
    doubling(tmp_path / "models", "double", "EXECUTION_MODE", "worker")
    with serving(tmp_path / "models", tmp_path / "log") as server:
        before = server.workers()
        assert set(before) == {"double_0_0"}
        assert server.infer("double", [1.0, 2.0]) == [2.0, 4.0]
        os.kill(before["double_0_0"], signal.SIGKILL)
        eventually(lambda: server.workers().get("double_0_0", 0) not in (0, before["double_0_0"]))
        eventually(lambda: server.ready("double"))
        assert server.infer("double", [3.0]) == [6.0]


def test_a_worker_that_it_shares_with_others(tmp_path: Path) -> None:
    models = tmp_path / "models"
    doubling(models, "double", "WORKER", "steps")
    worker = 'parameters { key: "WORKER" value: { string_value: "steps" } }'
    for name, amount in (("before", 1), ("after", 10)):
        python_model(models, name, adds(amount), pbtxt(parameters=worker))
    ensemble(models, "row", step("before", "INPUT0", "a"), step("double", "a", "b"), step("after", "b", "OUTPUT0"))
    with serving(models, tmp_path / "log") as server:
        assert set(server.workers()) == {"steps_0"}
        assert server.infer("row", [1.0, 2.0]) == [14.0, 16.0]
        assert server.infer("row", [3.0]) == [18.0]
        for name in ("before", "double", "after"):
            assert server.json("GET", f"/v2/models/{name}/stats")["model_stats"][0]["execution_count"] == 2


def test_a_compiled_package_of_pytorch_never_comes_into_the_server(tmp_path: Path) -> None:
    """It would stay there for good. This one is none that can be loaded, which only PyTorch itself finds out."""
    version = tmp_path / "models" / "compiled" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(pbtxt().replace('"python"', '"pytorch"'))
    with zipfile.ZipFile(version / "model.pt2", "w") as package:
        package.writestr("model/data/aotinductor/model/code.wrapper.so", b"no library")
    with serving(tmp_path / "models", tmp_path / "log", "--model-control-mode=explicit") as server:
        status, _, answer = server.ask("POST", "/v2/repository/models/compiled/load")
        assert (status, b"the version of PyTorch that compiled it" in answer) == (400, True), answer
        assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
        eventually(lambda: server.workers() == {})
