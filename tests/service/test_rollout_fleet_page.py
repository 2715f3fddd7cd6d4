"""docs/rollout-fleet.md: its commands do what it says, and its manifests have the form that their readers expect."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from nerite.config.rollout_spec import RolloutSpec, WhenLost
from nerite.rollouts.analysis import QUESTIONS
from nerite.rollouts.fleet_order import FleetOrder
from nerite.rollouts.rollout import Rollout
from nerite.tools.rollout.command import COMMANDS, spec_document
from nerite.tools.rollout.gateway import add_gateway_arguments, gateway_route
from nerite.transports.http.routes import find_route
from pages import ROOT, Page, rows, run
from replicas import Cluster, FleetModel, cluster
from serving import adds, eventually
from tools import require

NAME = "docs/rollout-fleet.md"
PAGE = Page(NAME)
MANIFESTS = ROOT / "deploy" / "rollouts"
ID = "0123456789ab"
ANALYSIS = "/v2/models/{}/rollout/analysis"


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("fleet")) as made:
        yield made


def told(three: Cluster, text: str) -> str:
    """Return commands of the page with these replicas and this Prometheus."""
    for number, replica in enumerate(three.replicas, 1):
        text = text.replace(f"gpu-{number}:8000", replica.url)
    return text.replace("http://prometheus:9090", three.prometheus.url).replace("localhost:8000", three.replicas[0].url)


def test_the_commands(three: Cluster) -> None:
    resnet = FleetModel(three, "resnet", adds(2))
    words = _words(told(three, PAGE.block("--hold 10m")))
    assert words[:3] == ["nerite", "rollout", "start"]
    command = resnet.command(words[2:])
    try:
        resnet.eventually("running", weight=1)
        status, pause, resume, abort = told(three, PAGE.block("rollout pause")).splitlines()
        assert "RUNNING" in run(status)
        assert "is asked to pause it" in run(pause)
        resnet.eventually("paused")
        here = f"nerite rollout --url {three.replicas[0].url} "
        route = yaml.safe_load(run(PAGE.block("--gateway-route").replace("nerite rollout ", here)))
        assert route["spec"]["rules"][0]["backendRefs"][1]["weight"] == 1000
        run(resume)
        resnet.eventually("running")
        run(abort)
        assert command.wait() == 1
        assert {each["state"] for each in resnet.statuses()} == {"aborted"}
    finally:
        resnet.close()


def test_orders_over_http(three: Cluster) -> None:
    FleetModel(three, "ordered", adds(2))
    server = three.replicas[0].server
    spec = RolloutSpec("2", "1")
    order = FleetOrder(ID, 3, 1, "2026-01-01T00:00:00Z", Rollout(spec))
    path = "/v2/models/ordered/rollout/follow"
    assert server.json("POST", path, order.as_json())["state"] == "checking"
    eventually(lambda: server.json("POST", path, order.as_json())["fleet"]["checked"])
    order.rollout.begin(0)
    found = server.json("POST", path, order._replace(sequence=2).as_json())
    assert (found["id"], found["state"], found["weight"]) == (ID, "running", 1)
    code, _, body = server.ask("POST", path, order._replace(term=2).as_json())
    assert (code, "another fleet command leads" in body.decode()) == (409, True)
    code, _, body = server.ask("POST", path, {**order.as_json(), "term": "first"})
    assert (code, "term: must be a number" in body.decode()) == (400, True)
    code, _, body = server.ask("POST", path, order._replace(id="f" * 12).as_json())
    assert (code, "promote or abort it first" in body.decode()) == (409, True)
    assert server.ask("POST", "/v2/models/nobody/rollout/follow", order.as_json())[0] == 404


def test_argo_and_flagger(three: Cluster) -> None:
    require("curl")
    FleetModel(three, "asked", adds(2))
    server = three.replicas[0].server
    path = ANALYSIS.format("asked")
    assert server.ask("GET", path)[0] == 404
    assert server.ask("POST", "/v2/models/asked/rollout", {"to": 2, "hold": "1h", "steps": [5, 100]})[0] == 200
    block = told(three, PAGE.block("curl")).replace("/resnet/", "/asked/")
    document, answer = (json.loads(text) for text in _documents(run(block)))
    assert (document["decision"], answer["answer"]) == ("continue", True)
    assert server.ask("POST", path, {"metadata": {"ask": "not-worse"}})[0] == 409
    assert server.ask("POST", path, {"metadata": {"ask": "harmful"}})[0] == 409
    assert server.ask("POST", path, {"metadata": {"ask": "anything"}})[0] == 400
    assert server.ask("POST", "/v2/models/asked/rollout/abort", b"")[0] == 200
    assert server.json("GET", path)["decision"] == "roll_back"
    assert server.ask("POST", path, {"metadata": {"ask": "harmful"}})[0] == 200
    assert server.ask("POST", path, {"metadata": {"ask": "harmless"}})[0] == 409


def _words(block: str) -> list[str]:
    return shlex.split(block.replace("\\\n", ""))


def _documents(text: str) -> list[str]:
    return text.replace("}{", "}\n{").splitlines()


def manifests() -> list[dict[str, Any]]:
    return [each for file in sorted(MANIFESTS.glob("*.yaml")) for each in yaml.safe_load_all(file.read_text())]


def valid(manifest: dict[str, Any]) -> None:
    """Fail unless a manifest fits the schema of its kind."""
    schema = json.loads((ROOT / "tests" / "schemas" / f"{manifest['kind']}.json").read_text())
    jsonschema.validate(manifest, schema, jsonschema.Draft202012Validator)


@pytest.mark.parametrize("manifest", manifests(), ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_the_manifests_fit_their_schemas(manifest: dict[str, Any]) -> None:
    valid(manifest)
    with pytest.raises(jsonschema.ValidationError):
        valid({**manifest, "spec": {**manifest["spec"], "unheardOf": 1}})


def test_the_manifests_ask_what_there_is() -> None:
    text = "".join(file.read_text() for file in MANIFESTS.glob("*.yaml"))
    urls = re.findall(r"http://nerite:8000(\S+)", text)
    assert len(urls) == 5
    for path in urls:
        route = find_route(path)
        assert route is not None and route.endpoint.name == "rollout_analysis"
    assert set(re.findall(r"ask: ([\w-]+)", text)) == set(QUESTIONS)
    decisions = set(re.findall(r'result [!=]= "(\w+)"', text))
    assert decisions | {"continue"} == {cell.strip("`") for cell in rows(NAME, "`decision`")}
    defined = {each["metadata"]["name"] for each in manifests() if each["kind"] == "AnalysisTemplate"}
    assert set(re.findall(r"templateName: (\S+)", text)) == defined


def test_the_job_is_a_command_line() -> None:
    (job,) = [each for each in manifests() if each["kind"] == "Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][:3] == ["nerite", "rollout", "start"]
    parser = argparse.ArgumentParser()
    COMMANDS["start"].add_arguments(parser)
    options = parser.parse_args([*container["command"][3:], *container["args"]])
    assert options.fleet and options.replicas.startswith("dns:")
    assert spec_document(options)["from"] == "1"
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]


def test_the_route_fits_its_schema() -> None:
    parser = argparse.ArgumentParser()
    add_gateway_arguments(parser)
    words = _words(PAGE.block("--gateway-route"))
    options = parser.parse_args(words[words.index("--gateway-route") :])
    status = {"id": ID, "state": "running", "arms": {"baseline": {"weight": 99.5}, "candidate": {"weight": 0.5}}}
    route = yaml.safe_load(gateway_route(status, options))
    valid(route)
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [
        {"name": "resnet-1", "port": 8000, "weight": 99500},
        {"name": "resnet-2", "port": 8000, "weight": 500},
    ]


def test_defaults_are_those_of_the_page() -> None:
    parser = argparse.ArgumentParser()
    COMMANDS["start"].add_arguments(parser)
    options = parser.parse_args(["m", "--to", "2"])
    text = (ROOT / NAME).read_text()
    assert f"`--unreachable {options.unreachable}` (default)" in text
    assert f"`--lease` ({options.lease})" in text
    for each in WhenLost:
        assert f"`{each}`" in text or f" {each}`" in text


def test_the_files_are_there() -> None:
    for link in re.findall(r"\]\(\.\./(deploy/[\w/.]+)\)", (ROOT / NAME).read_text()):
        assert Path(ROOT / link).is_file()
