"""docs/functions.md is run: its programs, and what it says of Triton's in-process package."""

from __future__ import annotations

import asyncio
import queue
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nerite
import nerite.tritonserver as tritonserver
from nerite.functions.function_source import FunctionSource
from nerite.functions.program_import import functions_of, import_program
from pages import ROOT, Page, run
from serving import served

PAGE = Page("docs/functions.md")


def test_every_block_is_tested_here() -> None:
    known = ("nerite.serve(double)", "python double.py", "curl", "Captioner", "server.client", "tritonserver.Server")
    assert len(PAGE.blocks) == len(known)
    for part in known:
        PAGE.block(part)


def test_five_lines(tmp_path: Path) -> None:
    ports = "http_port=0, grpc_port=0, metrics_port=0"
    (tmp_path / "double.py").write_text(PAGE.block("nerite.serve(double)").replace("(double)", f"(double, {ports})"))
    command = PAGE.block("python double.py").replace("python", sys.executable).split()
    with served(command, tmp_path / "log") as running:
        assert '"data":[2.0,4.0,6.0]' in run(PAGE.block("curl"), running)


def test_each_kind_of_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "caption.py").write_text(PAGE.block("Captioner"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    source = FunctionSource(str(tmp_path / "caption.py"), "")
    functions = [function for _, function in functions_of(source, import_program(source))]
    with nerite.Server(*functions) as server:
        found = server.client.caption(np.full((2, 2, 3), 7, np.uint8))
        assert (found.text, found.score) == ("a picture", 7.0)
        assert server.client.look_up(["colour", "size"]) == ["blue", "unknown"]
        assert list(server.model("count").stream(to=3)) == [0, 1, 2]
        assert list(server.model("echo").stream(text="a b")) == ["a", "b"]
        flags: dict[str, Any] = {"sequence_id": 5, "sequence_start": True, "sequence_end": True}
        assert server.model("total").infer(x=2.0, parameters=flags)["output"].item() == 2.0


def test_in_a_notebook(tmp_path: Path) -> None:
    (tmp_path / "notebook.py").write_text(PAGE.block("server.client"))
    assert run([sys.executable, "notebook.py"], cwd=tmp_path) == "[2. 4. 6.]\n(5, 3)\n"
    # A notebook runs its cells in an event loop.
    cell = "import asyncio, runpy\nasync def cell():\n    runpy.run_path('notebook.py')\nasyncio.run(cell())"
    assert run([sys.executable, "-c", cell], cwd=tmp_path) == "[2. 4. 6.]\n(5, 3)\n"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "examples" / "sources" / "scaler", tmp_path / "models" / "scaler")
    return tmp_path


def test_tritonserver(models: Path) -> None:
    (models / "in_process.py").write_text(PAGE.block("tritonserver.Server"))
    assert "'scaled': <nerite.tritonserver.tensor.Tensor object" in run([sys.executable, "in_process.py"], cwd=models)


STREAMING = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "text", "data_type": "TYPE_STRING", "dims": [-1]})
        config.add_output({"name": "word", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for word in pb_utils.get_input_tensor_by_name(request, "text").as_numpy():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("word", np.array([word], object))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def test_tritonserver_as_a_whole(models: Path) -> None:
    version = models / "models" / "words" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(STREAMING)
    server = tritonserver.Server(
        model_repository=models / "models",
        model_control_mode=tritonserver.ModelControlMode.EXPLICIT,
        startup_models=["scaler"],
    ).start(wait_until_ready=True)
    try:
        assert ("words", -1) in server.models()
        assert server.models()["scaler"].state == "READY"
        words = server.load("words")
        assert words.ready() and words.transaction_properties() == 2
        responses: queue.SimpleQueue[tritonserver.InferenceResponse] = queue.SimpleQueue()
        found = list(words.infer(inputs={"text": ["a", "b"]}, request_id="r1", response_queue=responses))
        assert [each.outputs["word"].to_string_array().tolist() for each in found[:2]] == [["a"], ["b"]]
        assert [each.final for each in found] == [False, False, True]
        assert responses.get().request_id == "r1"

        async def read() -> list[Any]:
            return [each.outputs async for each in words.async_infer(inputs={"text": np.array([b"x"], object)})]

        assert len(asyncio.run(read())) == 2
        model = server.model("scaler")
        (response,) = model.infer(inputs={"numbers": [1, 2, 3]})
        assert np.from_dlpack(response.outputs["scaled"]).shape == (3,)
        assert {"name": "numbers", "datatype": "FP32", "shape": [-1]} in model.metadata()["inputs"]
        assert 'nv_inference_request_success{model="scaler"' in server.metrics()
        with pytest.raises(tritonserver.InvalidArgumentError, match="unexpected inference input 'x'"):
            list(model.infer(inputs={"x": [1.0]}))
        (failed,) = model.infer(inputs={"x": np.ones(1, np.float32)}, raise_on_error=False)
        assert isinstance(failed.error, tritonserver.InvalidArgumentError)
        with pytest.raises(tritonserver.InvalidArgumentError, match="host memory"):
            list(model.infer(inputs={}, output_memory_type="gpu"))
        server.unload("words", wait_until_unloaded=True)
        assert not words.ready()
    finally:
        server.stop()
    assert not server.live()
    with pytest.raises(tritonserver.UnavailableError, match="call start"):
        server.models()
