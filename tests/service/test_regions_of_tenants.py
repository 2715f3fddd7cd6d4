"""Shared memory of tenants: no request reads, lists, overwrites or unregisters the regions of another one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from serving import IDENTITY, Serving, pbtxt, python_model, serving

POLICY: Final = """
[tenants.alice]
keys = ["alice's"]

[tenants.bob]
keys = ["bob's"]
"""
KEY: Final = f"nerite_tenants_{os.getpid()}"


@pytest.fixture(scope="module", params=["1", "2"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server without front processes, and with some."""
    folder = tmp_path_factory.mktemp("regions")
    python_model(folder / "models", "same", IDENTITY, pbtxt(batch=8, dims="4"))
    (folder / "policy.toml").write_text(POLICY)
    flags = (f"--policy-file={folder / 'policy.toml'}", f"--front-processes={request.param}", "--allow-client-shm=true")
    with serving(folder / "models", folder / "log", *flags) as running:
        yield running


@pytest.fixture
def files() -> Iterator[dict[str, Path]]:
    """What each tenant has shared."""
    made = {name: Path("/dev/shm") / f"{KEY}_{name}" for name in ("alice", "bob", "")}
    for number, path in enumerate(made.values(), 1):
        path.write_bytes(np.full(8, number, np.float32).tobytes())
    yield made
    for path in made.values():
        path.unlink()


class Client:
    """Asks over HTTP as a tenant. Returns the status and what was answered."""

    def __init__(self, server: Serving, tenant: str) -> None:
        self.server = server
        self.tenant = tenant
        self.headers = {"authorization": f"Bearer {tenant}'s"} if tenant else {}

    def memory(self, path: str, method: str = "POST", **asked: Any) -> tuple[int, Any]:
        path = f"/v2/systemsharedmemory{path}"
        status, _, body = self.server.ask(method, path, json.dumps(asked).encode() if asked else b"", **self.headers)
        return status, json.loads(body) if body else None

    def register(self, name: str, key: str) -> int:
        return self.memory(f"/region/{name}/register", key=key, offset=0, byte_size=32)[0]

    def names(self) -> list[str]:
        return [each["name"] for each in self.memory("/status", "GET")[1]]

    def unregister(self, name: str = "") -> None:
        self.memory(f"/region/{name}/unregister" if name else "/unregister")

    def infer(self, name: str, *, to: str = "") -> float | None:
        """Send what is in a region through the model; return the first number of the answer, or None if refused."""
        place = {"shared_memory_region": name, "shared_memory_byte_size": 16}
        output: dict[str, Any] = {"name": "OUTPUT0"}
        if to:
            output["parameters"] = {"shared_memory_region": to, "shared_memory_byte_size": 16}
        tensor = {"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "parameters": place}
        asked = {"inputs": [tensor], "outputs": [output]}
        status, _, body = self.server.ask("POST", "/v2/models/same/infer", asked, **self.headers)
        if status != 200:
            return None
        return float("nan") if to else float(json.loads(body)["outputs"][0]["data"][0])


class GrpcClient(Client):
    """Asks over gRPC."""

    def call(self, name: str, *arguments: Any, **more: Any) -> Any:
        with grpcclient.InferenceServerClient(self.server.grpc) as client:
            return getattr(client, name)(*arguments, headers=self.headers, **more)

    def register(self, name: str, key: str) -> int:
        try:
            self.call("register_system_shared_memory", name, key, 32)
        except InferenceServerException:
            return 500
        return 200

    def names(self) -> list[str]:
        return sorted(self.call("get_system_shared_memory_status").regions)

    def unregister(self, name: str = "") -> None:
        self.call("unregister_system_shared_memory", name)

    def infer(self, name: str, *, to: str = "") -> float | None:
        tensor = grpcclient.InferInput("INPUT0", [1, 4], "FP32")
        tensor.set_shared_memory(name, 16)
        output = grpcclient.InferRequestedOutput("OUTPUT0")
        if to:
            output.set_shared_memory(to, 16)
        try:
            answer = self.call("infer", "same", [tensor], outputs=[output])
        except InferenceServerException:
            return None
        return float("nan") if to else float(answer.as_numpy("OUTPUT0")[0][0])


@pytest.mark.parametrize("form", [Client, GrpcClient])
def test_nobody_uses_the_memory_of_another(server: Serving, files: dict[str, Path], form: type[Client]) -> None:
    alice, bob, anybody = (form(server, tenant) for tenant in ("alice", "bob", ""))
    assert alice.register("in", files["alice"].name) == 200
    for thief in (bob, anybody):
        assert thief.names() == []
        assert thief.infer("in") is None
        assert thief.register("mine", files["alice"].name) != 200
        thief.unregister("in")
        thief.unregister()
        assert thief.register("in", files[thief.tenant].name) == 200
        assert thief.infer("in", to="in") is not None
    assert (alice.infer("in"), bob.infer("in"), anybody.infer("in")) == (1, 2, 3)
    assert alice.names() == ["in"]
    assert np.frombuffer(files["alice"].read_bytes(), np.float32).tolist() == [1] * 8
    for client in (alice, bob, anybody):
        client.unregister()
        assert client.names() == []
