"""What servers, routers and pickers show of the loops beside the requests, one of which has planted faults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from nerite.wire import grpc_service as wire
from nerite.wire.health import HealthCheckRequest, HealthCheckResponse
from planted_work import LOOP, PLANTED, set_units, within
from routing import ROUTER, pool, stand_ins
from serving import NERITE, Serving, eventually, program, serving

PATH = "/v2/background"
POLICY = '[tenants.acme]\nkeys = ["acme-key"]\n'
LABELS = f'{{about="{PLANTED}",loop="{LOOP}"}}'
PROCESSES = ("server", "server with front processes", "router")
POISON = ("poison-a", "poison-b")


@contextmanager
def planted(kind: str, folder: Path, *flags: str, settings: str = "") -> Iterator[Serving]:
    """Run a process that has the loop. ``flags`` of a server, ``settings`` of a router."""
    command = [*within(folder), NERITE]
    if kind.startswith("server"):
        (folder / "models").mkdir()
        more = ("--front-processes=2",) if "front" in kind else ()
        flags = (*more, *flags)
        with serving(folder / "models", folder / "log", *flags, within=within(folder), internal_errors=True) as running:
            yield running
        return
    with ExitStack() as stack:
        (member,) = stack.enter_context(stand_ins(1))
        file = folder / "cluster.toml"
        file.write_text(f"{ROUTER}{settings}\n{pool(member.address)}")
        more_words = ["--port", "0", "--metrics-port", "0"] if kind == "picker" else []
        words = [*command, "pick" if kind == "picker" else "route", file, *more_words]
        yield stack.enter_context(program(words, folder / "log", internal_errors=True))


def loop_of(running: Serving, **headers: str) -> dict[str, Any]:
    """Return what is told of the planted loop."""
    status, _, body = running.ask("GET", PATH, **headers)
    assert status == 200, body
    (found,) = [each for each in json.loads(body)["loops"] if each["about"] == PLANTED]
    return dict(found)


def set_aside(running: Serving) -> float:
    """Return how many units the planted loop has set aside; 0 before it runs."""
    return running.metrics().get(f"nerite_background_set_aside{LABELS}", 0)


def act(running: Serving, what: str, unit: str, **headers: str) -> tuple[int, Any]:
    """Retry or discard a unit."""
    status, _, body = running.ask("POST", f"{PATH}/{LOOP}/{what}", {"unit": unit}, **headers)
    return status, json.loads(body)


def grpc_ready(running: Serving) -> bool:
    """Say whether a server is ready as both gRPC services have it."""
    with grpc.insecure_channel(running.grpc) as channel:
        ready = channel.unary_unary(
            "/inference.GRPCInferenceService/ServerReady",
            wire.ServerReadyRequest.SerializeToString,
            wire.ServerReadyResponse.FromString,
        )(wire.ServerReadyRequest()).ready
        return bool(ready) and _serves(channel, "")


def _serves(channel: grpc.Channel, service: str) -> bool:
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
    )
    return bool(check(HealthCheckRequest(service=service)).status == 1)


@pytest.mark.parametrize("kind", PROCESSES)
def test_poison_is_listed_retried_and_discarded(kind: str, tmp_path: Path) -> None:
    set_units(tmp_path, "good", *POISON)
    with planted(kind, tmp_path) as running:
        eventually(lambda: set_aside(running) == 2)
        found = loop_of(running)
        assert (found["name"], found["state"], found["problem"], found["waiting"]) == (LOOP, "ok", "", 1)
        assert (found["failures"], found["restarts"], found["failing"], found["essential"]) == (4, 0, [], True)
        assert {letter["unit"] for letter in found["dead_letters"]} == {*POISON}
        letter = found["dead_letters"][0]
        assert letter["tenant"] == "alice"
        assert "incident" in letter["text"]
        assert letter["time"].endswith("Z")
        metrics = running.metrics()
        assert metrics[f"nerite_background_set_aside{LABELS}"] == 2
        assert metrics[f"nerite_background_failures_total{LABELS}"] == 4
        for name in ("stalled", "restarts_total"):
            assert metrics[f"nerite_background_{name}{LABELS}"] == 0

        status, told = act(running, "discard", "poison-a")
        assert (status, told["set_aside"]) == (200, 1)
        assert (tmp_path / "discarded").read_text() == "poison-a\n"
        assert act(running, "retry", "poison-b")[0] == 200
        eventually(lambda: loop_of(running)["failures"] == 6 and set_aside(running) == 1)
        assert running.ready()


@pytest.mark.parametrize("kind", PROCESSES)
def test_what_is_refused(kind: str, tmp_path: Path) -> None:
    with planted(kind, tmp_path) as running:
        assert act(running, "retry", "none") == (404, {"error": "no unit 'none' of 'webhooks' was set aside"})
        assert running.ask("POST", f"{PATH}/nothing/discard", {"unit": "none"})[0] == 404
        for body in (b"", b"{}", b"[]", b'{"unit": 1}', b'{"unit": "a", "all": true}', b'{"unit": "' + b"a" * 20_000):
            status, _, said = running.ask("POST", f"{PATH}/{LOOP}/discard", body)
            assert status == 400, (body[:30], said)
        assert running.ask("POST", PATH, b"{}")[0] == 405
        assert running.ask("GET", f"{PATH}/{LOOP}/retry")[0] == 405
        assert running.ask("POST", f"{PATH}/{LOOP}/restart", b"{}")[0] == 404


@pytest.mark.parametrize("kind", PROCESSES)
def test_with_tenants_it_is_for_operators_only(kind: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(POLICY)
    set_units(tmp_path, "poison")
    file = tmp_path / "policy.toml"
    with planted(kind, tmp_path, f"--policy-file={file}", settings='policy-file = "policy.toml"\n') as running:
        for headers in ({}, {"Authorization": "Bearer acme-key"}):
            status, _, said = running.ask("GET", PATH, **headers)
            assert (status, b"until there is a key for operators" in said) == (403, True)
            for what in ("retry", "discard"):
                status, _, said = running.ask("POST", f"{PATH}/{LOOP}/{what}", {"unit": "poison"}, **headers)
                assert (status, b"until there is a key for operators" in said) == (403, True)
        eventually(lambda: set_aside(running) == 1)


@pytest.mark.parametrize("kind", PROCESSES)
def test_the_key_of_operators_opens_it(kind: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(POLICY)
    set_units(tmp_path, "poison")
    flags = (f"--policy-file={tmp_path / 'policy.toml'}", "--http-restricted-api=statistics,model-repository:X-Key=a")
    with planted(kind, tmp_path, *flags, settings='policy-file = "policy.toml"\nadmin-key = "X-Key=a"\n') as running:
        for headers in ({}, {"X_Key": "b"}, {"Authorization": "Bearer acme-key"}):
            status, _, said = running.ask("GET", PATH, **headers)
            assert (status, b"expecting header 'X-Key'" in said) == (403, True)
        eventually(lambda: set_aside(running) == 1)
        assert loop_of(running, X_Key="a")["set_aside"] == 1
        assert running.ask("POST", f"{PATH}/{LOOP}/discard", {"unit": "poison"}, X_Key="b")[0] == 403
        assert act(running, "discard", "poison", X_Key="a")[0] == 200


@pytest.mark.parametrize("kind", PROCESSES)
def test_a_stalled_loop_that_is_essential_makes_the_process_not_ready(kind: str, tmp_path: Path) -> None:
    set_units(tmp_path, "good")
    with planted(kind, tmp_path) as running:
        eventually(running.ready)
        assert grpc_ready(running)
        (tmp_path / "stuck").touch()
        eventually(lambda: not running.ready())
        reason = b"webhooks (planted) is stalled (GET /v2/background)\n"
        assert [running.ask("GET", path)[::2] for path in ("/v2/health/ready", "/health")] == [
            (400, reason), (503, reason),
        ]  # fmt: skip
        assert running.ask("GET", "/v2/health/live")[0] == 200
        assert not grpc_ready(running)
        found = loop_of(running)
        assert (found["state"], found["failing"]) == ("stalled", [{"unit": "disk", "text": "the disk is full"}])
        assert found["problem"].startswith("nothing has advanced for ")
        assert found["problem"].endswith(" while 1 wait: disk: the disk is full")
        assert running.metrics()[f"nerite_background_stalled{LABELS}"] == 1
        (tmp_path / "stuck").unlink()
        eventually(running.ready)
        assert grpc_ready(running)
        assert loop_of(running)["state"] == "ok"
    assert running.text.count("webhooks (planted) is stalled: nothing has advanced") == 1
    assert running.text.count("webhooks (planted) makes progress again") == 1


def test_a_picker_with_a_stalled_loop_is_not_ready(tmp_path: Path) -> None:
    set_units(tmp_path, "good")
    with (
        planted("picker", tmp_path) as picker,
        grpc.insecure_channel(f"127.0.0.1:{picker.ports['ExternalProcessor']}") as channel,
    ):
        eventually(lambda: _serves(channel, "readiness"))
        (tmp_path / "stuck").touch()
        eventually(lambda: not _serves(channel, "readiness"))
        assert _serves(channel, "liveness")
        assert picker.metrics()[f"nerite_background_stalled{LABELS}"] == 1


def test_every_loop_is_listed_and_has_its_zeros(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(POLICY)
    flags = (f"--ledger={tmp_path / 'ledger.db'}", f"--batches={tmp_path / 'batches.db'}")
    with planted("server", tmp_path, *flags) as running:
        names = {"audit", "rollouts", "ledger", "batches", "stalls", LOOP}
        eventually(lambda: names <= {each["name"] for each in running.json("GET", PATH)["loops"]})
        loops = running.json("GET", PATH)["loops"]
        metrics = running.metrics()
        for each in loops:
            labels = f'{{about="{each["about"]}",loop="{each["name"]}"}}'
            for name in ("stalled", "set_aside", "restarts_total", "failures_total"):
                assert metrics[f"nerite_background_{name}{labels}"] == 0
            assert each["state"] == "ok"
        assert len(loops) == len({(each["name"], each["about"]) for each in loops})
