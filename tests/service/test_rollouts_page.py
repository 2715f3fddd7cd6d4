"""docs/rollouts.md: its commands do what it says, and its tables have all there is."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_rollouts import load

from nerite.config.rollout_spec import AtDeadline, RolloutSpec, spec_of_file
from nerite.config.sticky_key import sticky_keys
from nerite.judge.gates import parse_gate
from nerite.rollouts.rollout import RolloutCommand, RolloutState
from nerite.tools.rollout.command import COMMANDS
from nerite.tools.rollout.watch import STATUSES
from nerite.transports.http.routes import find_route
from pages import ROOT, Page, rows, run
from serving import IN_PROCESS, NERITE, Serving, adds, eventually, pbtxt, python_model, serving
from tools import require

NAME = "docs/rollouts.md"
PAGE = Page(NAME)
TEXT = (ROOT / NAME).read_text()
CONFIG = pbtxt(parameters=IN_PROCESS)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    python_model(tmp_path / "models", "resnet", adds(1), CONFIG)
    with serving(tmp_path / "models", tmp_path / "log", f"--rollout-state={tmp_path}/state") as running:
        python_model(tmp_path / "models", "resnet", adds(2), CONFIG, version=2)
        yield running


def state(server: Serving) -> str:
    return str(server.json("GET", "/v2/models/resnet/rollout").get("state"))


def told(server: Serving, text: str) -> str:
    """Run commands of the page with the server's port."""
    return run(text.replace("nerite rollout", "nerite rollout --url localhost:8000"), server)


def test_the_commands(server: Serving) -> None:
    assert "RUNNING" in told(server, PAGE.block("--hold 5m"))
    watch, *others = PAGE.block("rollout watch").splitlines()
    assert shlex.split(watch) == ["nerite", "rollout", "watch", "resnet"]
    printed = told(server, "\n".join(others))
    assert "| resnet |" in printed
    assert "version 2 gets 1 % of the requests" in printed
    told(server, PAGE.block("rollout pause"))
    assert state(server) == "promoted"
    eventually(lambda: server.infer("resnet", [0.0]) == [2.0])


def test_abort_and_clear(server: Serving) -> None:
    told(server, "nerite rollout start resnet --to 2")
    told(server, PAGE.block("rollout abort"))
    assert server.ask("GET", "/v2/models/resnet/rollout")[0] == 404


def test_in_a_pipeline(server: Serving) -> None:
    command = PAGE.block("--wait").replace("--hold 10m", "--hold 300ms --steps 50,100 --gate errors=+50%,5%")
    with load(server, model="resnet"):
        assert "promoted" in told(server, command).splitlines()[-1]


def test_over_http(server: Serving) -> None:
    require("curl")
    start, look = PAGE.block("curl -d").splitlines()
    assert json.loads(run(start, server))["state"] == "checking"
    eventually(lambda: state(server) == "running")
    assert json.loads(run(look, server))["weight"] == 10


def test_a_recording_is_judged(server: Serving, tmp_path: Path) -> None:
    with load(server, model="resnet"):
        words = "start resnet --to 2 --steps 50,100 --hold 300ms --gate errors=+50%,5% --record --wait --url"
        run([str(NERITE), "rollout", *words.split(), server.http])
    (recording,) = (tmp_path / "state").glob("*.jsonl")
    shutil.copy(recording, tmp_path / "recording.jsonl")
    environment = {**os.environ, "PATH": f"{NERITE.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        PAGE.block("replay"), shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode in (0, 3), done.stderr
    assert "p99=+5%" in done.stdout


def test_the_file(server: Serving) -> None:
    spec = spec_of_file(PAGE.block('to = "2"'), "rollout.toml")
    assert spec.baseline == "1"
    (server.log.parent / "models" / "resnet" / "rollout.toml").write_text(PAGE.block('to = "2"'))
    eventually(lambda: state(server) == "running")


def test_tables_have_all_there_is() -> None:
    assert rows(NAME, "state").keys() == set(map(str, RolloutState))
    assert rows(NAME, "command").keys() == {*map(str, RolloutCommand), "clear"}
    assert {int(code) for code in rows(NAME, "exit status")} == {0, 2, *STATUSES.values()}
    for cell in rows(NAME, "gate"):
        for gate in cell.split("`, `"):
            parse_gate(gate)
    for request in rows(NAME, "request"):
        path = request.partition(" ")[2].replace("COMMAND", "pause")
        assert find_route(path) is not None, path
    for command in COMMANDS:
        assert f"rollout {command}" in TEXT or f"`{command}`" in TEXT, command


def test_defaults_are_those_of_the_page() -> None:
    spec = RolloutSpec("2")
    assert (spec.requests, spec.deadline, spec.gates) == (20, 7200, ("errors", "p99"))
    assert "`--requests` requests (20)" in TEXT and "`--deadline` (2h)" in TEXT
    assert re.search(r"The default is\s+`errors` and `p99`", TEXT)
    for choice in AtDeadline:
        assert f"`{choice}`" in TEXT
    for source in ("header:x-user", "parameter:NAME", "tenant", "user", "idempotency-key", "prompt:16"):
        assert source.partition(":")[0] in TEXT and sticky_keys(source)
