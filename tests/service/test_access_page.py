"""docs/access.md is run: each of its commands starts a server that does what the page says."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from serving import IDENTITY, NERITE, Serving, eventually, python_model, serving
from tools import require

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "access.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@contextmanager
def started(folder: Path, beginning: str) -> Iterator[Serving]:
    """Run the server of the command that contains ``beginning``, with its files in ``folder``."""
    program, verb, repository, *flags = shlex.split(block(beginning).replace("\\\n", ""))
    assert (program, verb, repository) == ("nerite", "serve", "models")
    with serving_flags(folder, *flags) as server:
        yield server


@contextmanager
def serving_flags(folder: Path, *flags: str) -> Iterator[Serving]:
    python_model(folder / "models", "identity", IDENTITY)
    here = [
        re.sub(r"(?<=[=@])(?:/run/secrets/)?(?=(metrics-key|keys|\w+\.pem|\w+\.key)$)", f"{folder}/", flag)
        for flag in flags
    ]
    with serving(folder / "models", folder / "log", *here) as server:
        yield server


def block(beginning: str) -> str:
    """Return the one block that contains ``beginning``."""
    (found,) = [text for _, text in BLOCKS if beginning in text]
    return found


def test_every_block_is_known_here() -> None:
    known = (
        "X-Key=caller",
        "curl -H",
        "import tritonclient",
        "@/run",
        "since March",
        "scrape",
        "use-ssl",
        "cors",
        "allowed-host",
        "address=0",
    )
    assert len(BLOCKS) == len(known)
    for beginning in known:
        block(beginning)


def test_keys(tmp_path: Path) -> None:
    require("curl")
    with started(tmp_path, "X-Key=caller") as server:

        def here(text: str) -> str:
            return text.replace("localhost:8000", server.http).replace("localhost:8001", server.grpc)

        command = here(block("curl -H"))
        told = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30, check=True)
        assert [entry["name"] for entry in json.loads(told.stdout)] == ["identity"]
        program = [sys.executable, "-c", here(block("import tritonclient"))]
        told = subprocess.run(program, capture_output=True, text=True, timeout=30, check=True)
        assert 'name: "identity"' in told.stdout
        assert server.ask("POST", "/v2/repository/index", X_Key="caller")[0] == 403
        assert server.ask("POST", "/v2/models/identity/infer", b"{}", X_Admin_Key="admin")[0] == 403
        assert server.ask("GET", "/v2")[0] == 200


def test_keys_in_a_file(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(block("since March"))
    with started(tmp_path, "@/run") as server:

        def opens(key: str) -> bool:
            return server.ask("POST", "/v2/models/identity/infer", b"{}", X_Key=key)[0] != 403

        assert [opens(key) for key in ("first-key", "second-key", "# since March", "")] == [True, True, False, False]
        keys.write_text("second-key\n")
        eventually(lambda: not opens("first-key"))
        assert opens("second-key")


def test_the_metrics_port(tmp_path: Path) -> None:
    (flag,) = re.findall(r"`(--http-restricted-api=metrics:[^`]+)`", PAGE)
    (form,) = re.findall(r"says `(\w+ <key>)`", PAGE)
    (tmp_path / "metrics-key").write_text(form.replace("<key>", "secret"))
    with serving_flags(tmp_path, flag) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.ports["Metrics"], timeout=30)
        for key, status in (("Bearer secret", 200), ("secret", 403)):
            connection.request("GET", "/metrics", headers={"Authorization": key})
            answer = connection.getresponse()
            assert (answer.status, b"nv_inference_count" in answer.read()) == (status, status == 200)
        connection.close()


def test_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    issued.private_key_pem.write_to_path(str(tmp_path / "server.key"))
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "server.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "clients.pem"))
    require("curl")
    with started(tmp_path, "use-ssl") as server:
        port = server.ports["HTTPService"]
        url = f"https://localhost:{port}/v2/docs/openapi.json"
        command = ["curl", "-sS", "--fail", "--cacert", str(tmp_path / "clients.pem"), "--resolve"]
        told = subprocess.run(
            [*command, f"localhost:{port}:127.0.0.1", url], capture_output=True, text=True, timeout=30
        )
        assert f'"url":"https://localhost:{port}"' in told.stdout, told.stderr


@pytest.mark.parametrize(("origin", "allowed"), [("http://localhost:3000", True), ("http://localhost:3001", False)])
def test_origins(tmp_path: Path, origin: str, allowed: bool) -> None:
    with started(tmp_path, "cors") as server:
        assert ("Access-Control-Allow-Origin" in server.ask("GET", "/v2", Origin=origin)[1]) is allowed


def test_names_of_the_server(tmp_path: Path) -> None:
    with started(tmp_path, "allowed-host") as server:
        for host, status in {"models.example.com": 200, "localhost": 200, "models.example.org": 403}.items():
            assert server.ask("GET", "/v2", Host=host)[0] == status


def test_an_address_for_every_port(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "identity", IDENTITY)
    command = shlex.split(block("address=0"))
    ports = [f"--{service}-port=0" for service in ("http", "grpc", "metrics")]
    for words, address in ((command, "0.0.0.0"), (command[:3], "127.0.0.1")):
        log = tmp_path / address
        with log.open("wb") as sink:
            started = [str(NERITE), *words[1:], *ports]
            process = subprocess.Popen(started, cwd=tmp_path, stdout=sink, stderr=subprocess.STDOUT)
        server = Serving(process, log)
        try:
            server.wait()
        finally:
            assert server.stop() == 0
        assert re.findall(r"Started .* at ([\d.]+):", server.text) == [address] * 3
        assert ("Reachable from this machine only" in server.text) is (address == "127.0.0.1")
