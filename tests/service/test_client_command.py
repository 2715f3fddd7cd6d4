"""``nerite client`` as people and scripts run it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from client_models import CONFIG, COUNTS, TRIPLES
from serving import IDENTITY, NERITE, PATIENCE, Serving, eventually, pbtxt, python_model, serving

FAILS = """
def execute(self, requests):
    raise ValueError("gave up")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("client_command")
    models = folder / "models"
    python_model(models, "numbers", IDENTITY)
    python_model(models, "chat", IDENTITY, pbtxt(datatype="TYPE_STRING", dims="1"))
    python_model(models, "counts", COUNTS, pbtxt(batch=0, more="model_transaction_policy { decoupled: true }"))
    python_model(models, "fails", FAILS)
    python_model(models, "spare", IDENTITY)
    loaded = [f"--load-model={name}" for name in ("numbers", "chat", "counts", "fails")]
    with serving(models, folder / "log", "--model-control-mode=explicit", *loaded) as running:
        yield running


def run(server: Serving, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(NERITE), "client", "--url", server.http, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=cwd)


def said(server: Serving, *words: str, cwd: Path | None = None) -> str:
    done = run(server, *words, cwd=cwd)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def refused(server: Serving, *words: str, status: int = 1) -> str:
    done = run(server, *words)
    assert (done.returncode, done.stdout) == (status, "")
    return done.stderr


def test_ls(server: Serving) -> None:
    rows = [line.split() for line in said(server, "ls").splitlines()]
    assert ["|", "numbers", "|", "1", "|", "READY", "|", "|"] in rows
    assert ["|", "spare", "|", "|", "not", "loaded", "|", "|"] in rows
    entries = {entry["name"]: entry for entry in json.loads(said(server, "ls", "--json"))}
    assert (entries["numbers"]["version"], entries["numbers"]["state"]) == ("1", "READY")


def test_infer(server: Serving, tmp_path: Path) -> None:
    assert "| OUTPUT0 | FP32     | [1, 2] | [[1. , 2.5]] |" in said(server, "infer", "numbers", "INPUT0=[1, 2.5]")
    assert "How are you?" in said(server, "infer", "chat", "INPUT0=How are you?")
    np.save(tmp_path / "a.npy", np.array([[7.0], [8.0]]))
    answer = json.loads(said(server, "infer", "numbers", "--json", "INPUT0=@a.npy", "--version=1", cwd=tmp_path))
    assert answer == {"OUTPUT0": {"datatype": "FP32", "shape": [2, 1], "data": [[7.0], [8.0]]}}
    parameters = ("--parameter", "priority=1", "--output", "OUTPUT0")
    random = said(server, "infer", "numbers", "--random", *parameters)
    assert "[1, 128]" in random
    assert "Variable dimensions were given the sizes --shape INPUT0:128; specify others likewise." in random
    assert "[1, 2]" in said(server, "infer", "numbers", "--random", "--shape", "INPUT0:2", *parameters)
    assert "--shape INPUT0:1,2 does not fit" in refused(server, "infer", "numbers", "--random", "--shape", "INPUT0:1,2")


def test_a_missing_input_is_described_with_a_command_that_works(server: Serving) -> None:
    text = refused(server, "infer", "chat")
    assert "expected 1 inputs but got 0 inputs for model 'chat'" in text
    assert "Missing inputs:\n  INPUT0 (BYTES [-1, 1])\n" in text
    for beginning in ("Example:", "Try random data:"):
        (command,) = re.findall(rf"^{re.escape(beginning)} (.*)$", text, re.MULTILINE)
        program, client, *words = shlex.split(command)
        assert (program, client) == ("nerite", "client")
        assert "OUTPUT0" in said(server, *words)


def test_infer_is_refused(server: Serving) -> None:
    assert "unknown model: 'nobody' is not found" in refused(server, "infer", "nobody")
    assert "ValueError: gave up" in refused(server, "infer", "fails", "--random")
    assert "Did you mean 'INPUT0'?" in refused(server, "infer", "numbers", "INPUT=1", status=2)
    assert "'one' is not JSON" in refused(server, "infer", "numbers", "INPUT0=one", status=2)


def test_a_stream(server: Serving) -> None:
    assert "Run it with --stream." in refused(server, "infer", "counts", "INPUT0=2")
    lines = said(server, "infer", "counts", "INPUT0=2", "--stream").splitlines()
    assert [json.loads(line)["OUTPUT0"] for line in lines] == [0.0, 1.0]


def test_load_and_unload(server: Serving, tmp_path: Path) -> None:
    assert said(server, "load", "spare") == "spare is loaded.\n"
    assert server.ready("spare")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "new.py").write_bytes(TRIPLES)
    said(server, "load", "spare", "--config", "@config.json", "--file", "1/model.py=new.py", cwd=tmp_path)
    assert "[[6]]" in said(server, "infer", "spare", "INPUT0=2")
    assert said(server, "unload", "spare") == "spare is being unloaded.\n"
    eventually(lambda: not server.ready("spare"))
    assert "failed to load 'nobody'" in refused(server, "load", "nobody")
    assert "is not of the form PATH=FILE" in refused(server, "load", "spare", "--file", "model.py", status=2)
    assert "No such file or directory" in refused(server, "load", "spare", "--config", "@none", status=2)


def test_stats(server: Serving) -> None:
    said(server, "infer", "numbers", "INPUT0=[[1], [2]]")
    table = said(server, "stats", "numbers")
    assert table.splitlines()[1] == "| Model   | Version | Requests | Failures | Queue ms | Compute ms | Mean batch |"
    (counted,) = json.loads(said(server, "stats", "numbers", "--json"))
    assert counted["success"]["count"] > 0
    assert {"chat", "fails"} <= set(re.findall(r"^\| (\w+)", said(server, "stats"), re.MULTILINE))
    assert "'nobody'" in refused(server, "stats", "nobody")


def test_watch(server: Serving) -> None:
    command = [str(NERITE), "client", "watch", "numbers", "--interval=0.1", "--url", server.http]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert re.fullmatch(r"\d\d:\d\d:\d\d no requests\n", watching.stdout.readline())
        server.infer("numbers", [1.0])
        line = next(line for line in watching.stdout if "requests/s" in line)
        assert re.search(r"numbers 1: [\d.]+ requests/s, 0.0 failures/s, queue [\d.]+ ms, compute [\d.]+ ms", line)
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=20)
    assert watching.returncode == 0
    assert said(server, "watch", "--interval=0.01", "--count=2").count("\n") >= 2


def test_watch_stays_in_its_place_at_a_terminal(server: Serving) -> None:
    ours, its = pty.openpty()
    command = [str(NERITE), "client", "watch", "numbers", "--interval=0.01", "--count=2", "--url", server.http]
    with open(ours, "rb", buffering=0) as terminal, subprocess.Popen(command, stdout=its) as watching:
        os.close(its)
        shown = b""
        # A terminal that nobody is at any more reads as an error.
        with contextlib.suppress(OSError):
            while part := terminal.read(65536):
                shown += part
        assert watching.wait(20) == 0
    first, second = shown.decode().split("\x1b[5F\x1b[J")
    assert first.count("Requests/s") == second.count("Requests/s") == 1


def test_a_server_that_is_not_there() -> None:
    done = subprocess.run(
        [str(NERITE), "client", "ls", "--url", "127.0.0.1:1"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "nerite client: cannot reach http://127.0.0.1:1: Connection refused\n"
        "    Is a server running there? Specify another with --url HOST:PORT (its HTTP port).\n"
    )


def test_help_and_wrong_command_lines(server: Serving) -> None:
    for words in ((), ("--help",)):
        done = subprocess.run([str(NERITE), "client", *words], capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0
        assert "Examples:" in done.stdout
    for command in ("ls", "infer", "load", "unload", "stats", "watch"):
        assert "Examples:" in said(server, command, "--help")
    assert "Did you mean 'ls'?" in refused(server, "lss", status=2)
    assert "a command is required" in refused(server, status=2)
    assert "'abc' is not a header: write NAME: VALUE" in refused(server, "ls", "--header", "abc", status=2)
    assert "'grpc://x' is not an address" in refused(server, "ls", "--url", "grpc://x")
