"""A server that anybody may command says so when it starts, and the doctor finds it."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from nerite.tools.doctor import access_findings
from nerite.tools.doctor_machine import DoctorFinding
from serving import IDENTITY, Serving, python_model, serving

EXPLICIT = ("--model-control-mode=explicit", "--load-model=identity")
PUBLIC = ("--http-address=0.0.0.0",)
KEY = "X-Key=secret"


def examined(server: Serving) -> list[DoctorFinding]:
    """What the doctor finds about access where the server listens."""
    mine = f"the server with pid {server.process.pid}:"
    return [each for each in access_findings(server.ports.values()) if each.text.startswith(mine)]


@pytest.mark.parametrize(
    ("flags", "rights"),
    [
        ((*EXPLICIT, *PUBLIC), "may load and unload models, and so run code as the user of the server; change what is"),
        ((*EXPLICIT, *PUBLIC, f"--http-restricted-api=model-repository:{KEY}"), "may change what is traced; change"),
        ((*EXPLICIT, *PUBLIC, f"--http-restricted-api=model-repository,trace,logging:{KEY}"), ""),
        (EXPLICIT, ""),
    ],
)
def test_a_server_says_what_anybody_may_do(tmp_path: Path, flags: tuple[str, ...], rights: str) -> None:
    python_model(tmp_path / "models", "identity", IDENTITY)
    # The doctor knows a server by its command line, which a forked one does not have.
    with serving(tmp_path / "models", tmp_path / "log", *flags, within=["env"]) as server:
        (found,) = examined(server)
        warnings = [line for line in server.text.splitlines() if line.startswith("W") and "anyone" in line]
        if rights:
            (warning,) = warnings
            assert f"anyone who can connect to HTTP (0.0.0.0) {rights}" in warning
            assert "--http-restricted-api=" in warning
            assert (found.level, rights in found.text) == ("warning", True)
            assert found.remedy.startswith("Require a key (--http-restricted-api=")
        else:
            assert warnings == []
            assert found.level == "ok"


CONFIG = json.dumps({"backend": "python", "max_batch_size": 0, "input": [], "output": []})
PROGRAM = "class TritonPythonModel:\n    def execute(self, requests): return []\n"
LOADER = f"""
def execute(self, requests):
    pb_utils.load_model("brought", {CONFIG!r}, {{"file:1/model.py": {PROGRAM.encode()!r}}})
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.zeros((1, 1), np.float32))]) for _ in requests]
"""


@pytest.mark.parametrize(
    ("flags", "taken"),
    [
        (PUBLIC, False),
        (("--grpc-address=0.0.0.0",), False),
        ((*PUBLIC, "--model-load-files=any"), True),
        ((), True),
        (("--model-load-files=none",), False),
        ((*PUBLIC, "--http-restricted-api=model-repository:User-Agent=@KEYS"), True),
    ],
)
def test_files_of_clients(tmp_path: Path, flags: tuple[str, ...], taken: bool) -> None:
    python_model(tmp_path / "models", "identity", IDENTITY)
    python_model(tmp_path / "models", "loader", LOADER)
    (tmp_path / "keys").write_text("known\n")
    given = [flag.replace("KEYS", str(tmp_path / "keys")) for flag in flags]
    with serving(tmp_path / "models", tmp_path / "log", *EXPLICIT, "--load-model=loader", *given) as server:
        key = {"User-Agent": "known"}
        body = {"parameters": {"config": CONFIG, "file:1/model.py": base64.b64encode(PROGRAM.encode()).decode()}}
        status, _, answer = server.ask("POST", "/v2/repository/models/sent/load", body, **key)
        assert status == (200 if taken else 403), answer
        client = grpcclient.InferenceServerClient(server.grpc)
        if taken:
            client.load_model("sent", config=CONFIG, files={"file:1/model.py": PROGRAM.encode()})
        else:
            assert b"load parameter 'file:1/model.py' is refused" in answer and b"--model-load-files" in answer
            with pytest.raises(InferenceServerException, match=r"PERMISSION_DENIED.*is refused"):
                client.load_model("sent", config=CONFIG, files={"file:1/model.py": PROGRAM.encode()})
        client.close()
        assert server.ready("sent") is taken
        # What lies in the repository is for anybody to load, and a model is a program already.
        assert server.ask("POST", "/v2/repository/models/identity/load", {}, **key)[0] == 200
        server.infer("loader", [1.0])
        assert server.ready("brought")
