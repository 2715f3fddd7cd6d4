"""Many of everything: connections that say nothing, models that nobody asks."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from serving import IDENTITY, Serving, pbtxt, python_model, serving


def relu() -> bytes:
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 2]) for name in ("X", "Y")]
    graph = helper.make_graph([helper.make_node("Relu", ["X"], ["Y"])], "graph", sides[:1], sides[1:])
    proto: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return proto.SerializeToString()


def most_files(limits: str) -> int:
    """How many files a process may have open, by its own limits."""
    return int(next(line.split()[3] for line in Path(limits).read_text().splitlines() if line.startswith("Max open")))


def test_a_thousand_idle_connections(tmp_path: Path) -> None:
    """Under the usual limit of open files, which the server raises as far as it may."""
    python_model(tmp_path / "models", "echo", IDENTITY, pbtxt(batch=8))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("not enough files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with serving(tmp_path / "models", tmp_path / "log") as server, ExitStack() as stack:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
            assert most_files(f"/proc/{server.process.pid}/limits") == hard
            for number in range(1000):
                host, port = (server.http, server.grpc)[number % 2].split(":")
                stack.enter_context(socket.create_connection((host, int(port))))
            assert server.infer("echo", [1.0, 2.0]) == [1.0, 2.0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.timeout(120)
def test_a_thousand_models(tmp_path: Path) -> None:
    proto = relu()
    for number in range(1000):
        version = tmp_path / "models" / f"m{number}" / "1"
        version.mkdir(parents=True)
        (version / "model.onnx").write_bytes(proto)
    with serving(tmp_path / "models", tmp_path / "log") as server:
        assert server.ready()
        for number in (0, 500, 999):
            assert server.infer(f"m{number}", [-1.0, 2.0], name="X") == [0.0, 2.0]
        assert len(server.json("POST", "/v2/repository/index")) == 1000
        # An instance that nobody has asked has no thread.
        assert threads(server) < 100


def threads(server: Serving) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/task").iterdir()))
