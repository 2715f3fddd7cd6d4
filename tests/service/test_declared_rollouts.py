"""A rollout in the cluster file: ``nerite up`` with two servers leads it, seen through the router."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from nerite.cluster.cluster_file import parse_cluster, read_cluster
from nerite.config.rollout_spec import RolloutSpec, WhenLost
from nerite.core.errors import InvalidArgument
from nerite.rollouts.fleet_order import FleetOrder
from nerite.rollouts.rollout import Rollout
from pages import Page, rows
from ports import free_ports
from serving import IN_PROCESS, NERITE, adds, eventually, pbtxt, python_model, serving
from up_clusters import up

TABLE = Page("docs/platform.md").block("pool.rollout")
BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [7]}]}).encode()
CONFIG = pbtxt(parameters=IN_PROCESS)
FAILS = """
def execute(self, requests):
    def sevens(request):
        return pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()[0, 0] == 7
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())],
            pb_utils.TritonError("broken weights") if sevens(request) else None,
        )
        for request in requests
    ]
"""
"""Passes the check, whose data has no 7."""


class Platform:
    """A cluster file as the page has it, with a quick rollout of a small model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "cluster.toml"
        self.ports = free_ports(3)
        self.url, self.metrics = (f"http://127.0.0.1:{port}" for port in (self.ports[0], self.ports[2]))
        self.version(1, adds(1))

    def version(self, number: int, source: str) -> None:
        python_model(self.folder / "models", "resnet", source, CONFIG, number)

    def asks_for(self, before: str, to: str) -> None:
        """Write the file."""
        table = TABLE.replace('from = "1"', f'from = "{before}"').replace('to = "2"', f'to = "{to}"')
        quick = (('hold = "5m"', 'hold = "1s"\nrequests = 5'), ('"errors", "p99=+10%"', '"errors=+50%,5%"'))
        for old, new in (*quick, ("[5, 50, 100]", "[20, 50, 100]")):
            assert old in table
            table = table.replace(old, new)
        http, grpc, metrics = self.ports
        router = f"[router]\nhttp-port = {http}\ngrpc-port = {grpc}\nmetrics-port = {metrics}\n"
        self.file.write_text(f"{router}\n{table}")

    def answer(self) -> str:
        """Return the version that has answered a request, or the status."""
        try:
            with urlopen(f"{self.url}/v2/models/resnet/infer", BODY, timeout=30) as reply:
                return str(json.load(reply)["model_version"])
        except HTTPError as error:
            return f"status {error.code}"

    def rollout(self) -> dict[str, Any]:
        """Return what the router tells."""
        with urlopen(f"{self.metrics}/v2/pools", timeout=30) as reply:
            (found,) = json.load(reply)["rollouts"]
        return dict(found)

    @contextmanager
    def requests(self) -> Iterator[list[str]]:
        """Send requests to the router meanwhile; give the answers."""
        stop, answers = Event(), list[str]()

        def send() -> None:
            while not stop.wait(0.002):
                answers.append(self.answer())

        threads = [Thread(target=send) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            yield answers
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def lose_a_state(self) -> None:
        """Have one of the servers be as one that was never there."""
        _, other = (self.folder / "state" / "nerite" / "rollouts").iterdir()
        shutil.rmtree(other)

    def reaches(self, state: str) -> None:
        eventually(lambda: self.rollout()["state"] == state, what=f"it is not {state}")
        eventually(lambda: set(self.rollout()["replicas"].values()) == {state})


@pytest.fixture
def platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Platform:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Platform(tmp_path)


def test_a_version_is_promoted_and_the_next_rolled_back(platform: Platform) -> None:
    platform.version(2, adds(2))
    platform.asks_for("1", "2")
    with up(platform.file, platform.folder):
        assert platform.answer() == "1", "servers begin with the baseline"
        with platform.requests() as answers:
            platform.reaches("promoted")
        assert platform.rollout()["replicas"] == {"interactive/1": "promoted", "interactive/2": "promoted"}
        assert set(answers) == {"1", "2"}
        assert {platform.answer() for _ in range(10)} == {"2"}
        number = platform.rollout()["id"]

    platform.version(3, FAILS)
    platform.lose_a_state()
    with up(platform.file, platform.folder):  # once more: nothing begins anew, and version 3 is not asked for
        platform.reaches("promoted")
        assert platform.rollout()["id"] == number
        assert {platform.answer() for _ in range(10)} == {"2"}, "a server that knew nothing is brought to it"

    platform.asks_for("2", "3")
    with up(platform.file, platform.folder) as running:
        with platform.requests() as answers:
            platform.reaches("rolled_back")
        assert platform.rollout()["id"] != number
        assert set(answers) == {"2", "status 500"}
        assert {platform.answer() for _ in range(10)} == {"2"}
        assert "rollout of 'resnet' in pool 'interactive': rolled_back, weight 0 %: " in running.text


def test_the_plan_and_what_is_refused(platform: Platform) -> None:
    def planned(status: int = 0) -> str:
        done = subprocess.run(
            [str(NERITE), "up", str(platform.file), "--plan"], capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stderr
        return done.stderr if status else done.stdout

    platform.asks_for("1", "2")
    assert "resnet.to: version 2 is not in" in planned(1)
    platform.version(2, adds(2))
    first, second, _, rollout = planned().splitlines()
    assert rollout == (
        "rollout of resnet in pool interactive: version 1 to 2, 20, 50, 100 % of the requests, each held for 1s and 5 "
        "requests, gates errors=+50%,5%, stay after 2h"
    )
    assert all("--rollout-baseline=resnet=1" in line for line in (first, second))
    state = [word for line in (first, second) for word in line.split() if word.startswith("--rollout-state=")]
    assert len(set(state)) == 2
    assert read_cluster(str(platform.file)).pools[0].rollout is not None


def test_what_a_server_takes_of_a_cluster_file(platform: Platform) -> None:
    """A later file replaces an earlier one; a rollout of an operator, and a file beside the model, hold."""
    for number in (2, 3):
        platform.version(number, adds(number))
    models, follow = platform.folder / "models", "/v2/models/resnet/rollout/follow"
    flags = ("--rollout-baseline=resnet=1", f"--rollout-state={platform.folder}/state", "--front-processes=1")

    def order(to: str, term: int) -> dict[str, Any]:
        spec = RolloutSpec(to, "1", (50.0, 100.0), hold=3600.0, gates=("errors",))
        at = "2026-01-01T00:00:00Z"
        return FleetOrder(f"{to}{term:011}", term, 1, at, Rollout(spec), declared=True).as_json()

    with serving(models, platform.folder / "log", *flags) as server:
        assert server.infer("resnet", [0.0]) == [1.0]
        told = server.json("POST", follow, order("2", 1))
        assert (told["state"], told["declared"]["to"], told["fleet"]["counts"]) == ("checking", "2", [])
        refused = server.json("POST", follow, order("3", 1))["error"]
        assert "a router with a later cluster file leads the rollouts of 'resnet'" in refused
        told = server.json("POST", follow, order("3", 2))
        assert (told["to"], told["declared"]["to"]) == ("3", "3")
        (before,) = server.json("GET", "/v2/rollouts")["past"]
        assert (before["to"], before["state"], before["text"]) == (
            "2", "aborted", "the cluster file asks for something else",
        )  # fmt: skip
        assert server.ask("POST", "/v2/models/resnet/rollout/abort", b"")[0] == 200
        assert server.json("POST", "/v2/models/resnet/rollout", {"to": "2", "gate": ["errors"]})["to"] == "2"
        assert "promote or abort it first" in server.json("POST", follow, order("2", 3))["error"]
        assert server.ask("POST", "/v2/models/resnet/rollout/abort", b"")[0] == 200
        assert "a later rollout of 'resnet' holds" in server.json("POST", follow, order("3", 4))["error"]
        file = models / "resnet" / "rollout.toml"
        server.follow(file, 'to = "1"\n')
        assert f"{file} asks for a rollout, too" in server.json("POST", follow, order("2", 5))["error"]
        assert server.infer("resnet", [0.0]) == [1.0]


def test_the_page_of_fleets() -> None:
    name = "docs/rollout-fleet.md"
    (pool,) = parse_cluster(Page(name).block("[pool.rollout]")).pools
    assert pool.rollout is not None
    assert (pool.rollout.unreachable, pool.rollout.models["assistant"].hold) == (WhenLost.GO_ON, 600.0)
    assert rows(name, "key of `[pool.rollout]`").keys() == {"models.NAME", "unreachable", "key"}
    with pytest.raises(InvalidArgument, match="There are: unreachable, key, models"):
        parse_cluster('[[pool]]\nname = "a"\nmodels = "m"\nrollout = { xyz = 1 }')
