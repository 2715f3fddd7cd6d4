"""Rollouts on a real server under load: good versions are promoted, bad ones rolled back, and no request is lost."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_top import Terminal

from pages import run
from serving import IN_PROCESS, NERITE, PATIENCE, Serving, adds, eventually, pbtxt, python_model, serving

MODEL = "/v2/models/adder"
CONFIG = pbtxt(parameters=IN_PROCESS)
BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [0]}]}).encode()
QUICK = {"to": 2, "steps": [20, 50, 100], "hold": "200ms", "requests": 5, "gate": ["errors=+50%,5%"]}
SLOW = {**QUICK, "hold": "1h"}
FAILS = """
def execute(self, requests):
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() + 2)],
            pb_utils.TritonError("broken weights") if time.time_ns() // 1000 % 3 else None,
        )
        for request in requests
    ]
"""


class Load:
    """Clients that send one request after the other, each on a connection of its own. Counts what comes back."""

    def __init__(self, server: Serving, clients: int, model: str) -> None:
        self._server = server
        self._path = f"/v2/models/{model}/infer"
        self._stop = threading.Event()
        self.sent = 0
        self.answers: Counter[str] = Counter()
        """By the sum that came back, or the status."""
        self.lost: list[str] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        connection = http.client.HTTPConnection(self._server.http, timeout=PATIENCE)
        while not self._stop.is_set():
            with self._lock:
                self.sent += 1
            try:
                connection.request("POST", self._path, BODY)
                reply = connection.getresponse()
                body = json.loads(reply.read())
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.lost.append(repr(error))
                connection.close()
                continue
            found = str(body["outputs"][0]["data"][0]) if reply.status == 200 else f"status {reply.status}"
            if reply.status == 200:
                assert {"1.0": "1", "2.0": "2"}[found] == body["model_version"]
            with self._lock:
                self.answers[found] += 1
        connection.close()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)


@contextmanager
def load(server: Serving, clients: int = 4, model: str = "adder") -> Iterator[Load]:
    """Send requests meanwhile; every one must have been answered once."""
    made = Load(server, clients, model)
    try:
        yield made
    finally:
        made.stop()
    assert made.lost == []
    assert sum(made.answers.values()) == made.sent


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A model that serves version 1, which adds 1."""
    python_model(tmp_path / "models", "adder", adds(1), CONFIG)
    return tmp_path / "models"


@contextmanager
def house(models: Path, *flags: str, fronts: int = 1, log: str = "log") -> Iterator[Serving]:
    state = models.parent / "state"
    flags = (f"--rollout-state={state}", f"--front-processes={fronts}", *flags)
    with serving(models, models.parent / log, *flags) as server:
        yield server


def status(server: Serving) -> dict[str, Any]:
    found: dict[str, Any] = server.json("GET", f"{MODEL}/rollout")
    return found


def start(server: Serving, spec: dict[str, Any]) -> None:
    code, _, body = server.ask("POST", f"{MODEL}/rollout", spec)
    assert code == 200, body
    eventually(lambda: status(server)["state"] != "checking", what="the check does not end")


def reaches(server: Serving, state: str) -> dict[str, Any]:
    """Wait for a state; return the status."""
    eventually(lambda: status(server)["state"] == state, what=f"not {state}: {status(server)}")
    return status(server)


def served(server: Serving) -> float:
    return float(server.infer("adder", [0.0])[0])


@pytest.mark.parametrize("fronts", [1, 2])
def test_a_good_version_is_promoted(models: Path, fronts: int) -> None:
    python_model(models, "adder", adds(2), CONFIG + "\nversion_policy { specific { versions: [ 1 ] } }", version=2)
    with house(models, fronts=fronts) as server, load(server) as traffic:
        start(server, QUICK)
        found = reaches(server, "promoted")
        assert (found["from"], found["to"], found["weight"], found["reason"]) == ("1", "2", 100, "not_worse")
        eventually(lambda: served(server) == 2.0)
        history = server.json("GET", f"{MODEL}/rollout/history")["history"]
        assert [(each["reason"], each["weight"]) for each in history] == [
            ("checked", 20), ("held", 50), ("not_worse", 100),
        ]  # fmt: skip
        arms = history[-1]["evidence"]["arms"]
        assert arms["candidate"]["requests"] >= 100 and arms["candidate"]["errors"] == 0
        assert history[-1]["evidence"]["gates"][0]["decision"] == "not_worse"
    assert traffic.answers["1.0"] > 0 < traffic.answers["2.0"]
    assert set(traffic.answers) == {"1.0", "2.0"}


def test_a_shadow_comes_first(models: Path) -> None:
    with house(models) as server, load(server) as traffic:
        python_model(models, "adder", adds(2), CONFIG, version=2)
        start(server, {**QUICK, "shadow": "100%"})
        found = reaches(server, "promoted")
        history = server.json("GET", f"{MODEL}/rollout/history")["history"]
        assert [(each["reason"], each["weight"]) for each in history] == [
            ("checked", 0), ("held", 20), ("held", 50), ("not_worse", 100),
        ]  # fmt: skip
        assert found["shadow"]["compared"]["different"] >= 5
        assert found["shadow"]["largest"] == 1.0
        assert (
            "0 of " in history[1]["text"]
            and "answers agreed: version 2 gets 20 % of the requests" in history[1]["text"]
        )
    assert set(traffic.answers) == {"1.0", "2.0"}


def test_a_shadow_that_fails_is_rolled_back_before_a_caller_meets_it(models: Path) -> None:
    with house(models) as server, load(server) as traffic:
        python_model(models, "adder", FAILS.replace("% 3", "% 1 == 0"), CONFIG, version=2)
        start(server, {**QUICK, "shadow": "50%", "force": True})
        found = reaches(server, "rolled_back")
        assert (found["reason"], found["arms"]["candidate"]["requests"]) == ("worse", 0)
        assert "requests that version 1 answered" in found["text"]
    assert set(traffic.answers) == {"1.0"}


@pytest.mark.parametrize("fronts", [1, 2])
def test_a_version_with_errors_is_rolled_back(models: Path, fronts: int) -> None:
    with house(models, fronts=fronts) as server, load(server) as traffic:
        python_model(models, "adder", FAILS, CONFIG, version=2)
        start(server, {**QUICK, "hold": "1h", "force": True})
        began = time.monotonic()
        found = reaches(server, "rolled_back")
        print(f"found after {time.monotonic() - began:.2f} s and {found['arms']['candidate']['requests']} requests")
        assert found["reason"] == "worse"
        assert "errors" in found["text"] or "failed" in found["text"]
        assert (found["weight"], found["pinned"]) == (0, "1")
        assert 'nerite_rollout_state{model="adder",state="rolled_back"}' in server.metrics()
        eventually(lambda: server.state("adder", "2") != "READY", what="the candidate stays loaded")
        before = traffic.answers.copy()
        eventually(lambda: traffic.answers["1.0"] > before["1.0"] + 100)
        assert traffic.answers["status 500"] == before["status 500"], "errors after the rollback"


HANGS = (
    "def execute(self, requests):\n    while not os.path.exists('{go}'): time.sleep(0.01)\n"
    + adds(2).partition("\n")[2].partition("\n")[2]
)


def test_a_version_that_hangs_is_rolled_back_before_it_answers(models: Path) -> None:
    python_model(models, "adder", adds(1), pbtxt())
    go = models.parent / "go"
    go.touch()
    with house(models) as server, load(server, clients=24) as traffic:
        python_model(models, "adder", HANGS.format(go=go), pbtxt(), version=2)
        start(server, {**SLOW, "gate": ["errors", "p99"], "force": True})
        eventually(lambda: status(server)["arms"]["baseline"]["requests"] > 2000, what="there is no threshold yet")
        go.unlink()
        late: list[threading.Thread] = []

        def found_out() -> bool:
            # Clients that do not wait for others. The queue of the candidate may refuse the last of them.
            for _ in range(10):  # as many as it takes, though the status is asked less and less often
                late.append(threading.Thread(target=server.ask, args=("POST", f"{MODEL}/infer", BODY)))
                late[-1].start()
                time.sleep(0.02)
            return status(server)["state"] == "rolled_back"

        try:
            eventually(found_out)
            found = status(server)
            ends = found["reason"], found["arms"]["candidate"]["errors"]
            assert ends == ("worse", 0), f"{found}\n{traffic.answers}\n{server.text[-5000:]}"
        finally:
            go.touch()
            for each in late:
                each.join(PATIENCE)
    assert traffic.answers["2.0"] > 20


def test_a_check_that_blocks(models: Path) -> None:
    with house(models) as server:
        python_model(models, "adder", "def initialize(self, args):\n    raise ValueError('no weights')\n", CONFIG, 2)
        start(server, QUICK)
        found = status(server)
        assert (found["state"], found["reason"], found["weight"]) == ("aborted", "blocked", 0)
        assert "no weights" in found["text"]
        assert served(server) == 1.0
        assert server.ready()


def test_a_model_to_which_a_route_leads_has_no_rollout(models: Path) -> None:
    (models / "front").mkdir()
    (models / "front" / "route.toml").write_text('[[arm]]\nmodel = "adder"\nweight = 1\n')
    with house(models) as server:
        python_model(models, "adder", adds(2), CONFIG, 2)
        start(server, QUICK)
        found = reaches(server, "aborted")
        assert "'front' leads to 'adder', which is a route itself" in found["text"]
        assert served(server) == 1.0


def test_a_rollout_goes_on_after_a_restart(models: Path) -> None:
    with house(models) as server, load(server):
        python_model(models, "adder", adds(2), CONFIG, version=2)
        start(server, {**SLOW, "steps": [50, 100]})
        eventually(lambda: status(server)["arms"]["candidate"]["requests"] > 200)
        before = status(server)
    assert any(each.is_file() for each in (models.parent / "state").rglob("*"))
    with house(models, log="again") as server:
        after = status(server)
        assert (after["id"], after["state"], after["weight"]) == (before["id"], "running", 50)
        assert after["arms"]["candidate"]["requests"] >= before["arms"]["candidate"]["requests"] > 200
        assert "goes on" in server.text
        with load(server) as traffic:
            eventually(lambda: traffic.answers["1.0"] > 0 < traffic.answers["2.0"])
            assert server.ask("POST", f"{MODEL}/rollout/promote", b"")[0] in (200, 409)
            if status(server)["state"] == "running":
                assert server.ask("POST", f"{MODEL}/rollout/promote", {"force": True})[0] == 200
        eventually(lambda: served(server) == 2.0)


def test_a_rollback_outlives_restarts_and_reloads(models: Path) -> None:
    python_model(models, "adder", adds(1), CONFIG)
    with house(models) as server:
        python_model(models, "adder", adds(2), CONFIG, version=2)
        start(server, SLOW)
        assert server.ask("POST", f"{MODEL}/rollout/abort", b"")[0] == 200
        eventually(lambda: served(server) == 1.0)
        eventually(lambda: server.state("adder", "2") != "READY")
    with house(models, "--model-control-mode=explicit", "--load-model=adder", log="again") as server:
        assert served(server) == 1.0
        assert server.ask("POST", "/v2/repository/models/adder/load")[0] == 200
        assert served(server) == 1.0
        answer = server.json("POST", f"{MODEL}/rollout/clear")
        assert answer["state"] == "cleared"
        assert server.ask("GET", f"{MODEL}/rollout")[0] == 404
        assert server.ask("POST", "/v2/repository/models/adder/load")[0] == 200
        assert served(server) == 2.0


@pytest.mark.parametrize("fronts", [1, 2])
def test_over_http(models: Path, fronts: int) -> None:
    def command(name: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        code, _, answer = server.ask("POST", f"{MODEL}/rollout/{name}", body or b"")
        document = json.loads(answer)
        return code, document.get("error", document.get("state"))

    with house(models, fronts=fronts) as server:
        assert server.json("GET", "/v2/rollouts") == {"rollouts": [], "past": []}
        code, _, body = server.ask("GET", f"{MODEL}/rollout")
        assert (code, "nerite rollout start adder --to VERSION" in body.decode()) == (404, True)
        assert server.ask("GET", "/v2/models/nobody/rollout")[0] == 404
        code, _, body = server.ask("POST", f"{MODEL}/rollout", {"to": 2, "hold": "soon", "steps": [5, 50]})
        assert code == 400
        told = json.loads(body)["error"]
        assert "hold: must be a duration" in told and "steps: must end with 100" in told
        assert server.ask("POST", f"{MODEL}/rollout", {"to": 1})[0] == 400
        python_model(models, "adder", adds(2), CONFIG, version=2)
        start(server, SLOW)
        code, _, body = server.ask("POST", f"{MODEL}/rollout", SLOW)
        assert (code, "promote or abort it first" in body.decode()) == (409, True)
        code, _, body = server.ask("POST", f"{MODEL}/route", {"arms": []})
        assert (code, "sets its weights: end it first" in body.decode()) == (409, True)
        assert command("pause") == (200, "paused")
        assert command("pause")[0] == 409
        assert command("resume") == (200, "running")
        assert command("promote")[0] == 409
        assert command("dance")[0] == 404
        assert command("abort", {"now": True})[0] == 400
        assert command("clear")[0] == 409
        assert command("abort") == (200, "aborted")
        (entry,) = server.json("GET", "/v2/rollouts")["rollouts"]
        assert (entry["model"], entry["state"]) == ("adder", "aborted")
        history = server.json("GET", f"{MODEL}/rollout/history")["history"]
        assert [each["state"] for each in history] == ["running", "paused", "running", "aborted"]
        assert server.ask("GET", "/v2/models/nobody/rollout/history")[0] == 404


def test_the_endpoints_are_restricted_like_the_repository(models: Path) -> None:
    with house(models, "--http-restricted-api=model-repository:key=secret") as server:
        for method, path in (("GET", "/v2/rollouts"), ("POST", f"{MODEL}/rollout"), ("POST", f"{MODEL}/rollout/abort")):
            assert server.ask(method, path)[0] == 403
        assert server.ask("GET", "/v2/rollouts", key="secret")[0] == 200


def test_a_state_that_cannot_be_saved_is_refused_at_the_start(models: Path) -> None:
    python_model(models, "adder", adds(2), CONFIG + "\nversion_policy { specific { versions: [ 1 ] } }", version=2)
    (models.parent / "state").write_text("a file")
    with house(models) as server:
        code, _, body = server.ask("POST", f"{MODEL}/rollout", SLOW)
        assert (code, "--rollout-state" in body.decode()) == (503, True)
        assert server.ask("GET", f"{MODEL}/rollout")[0] == 404


TOML = 'to = "2"\nfrom = "1"\nsteps = [50, 100]\nhold = "200ms"\nrequests = 5\ngate = ["errors=+50%,5%"]\n'


def test_a_rollout_that_is_declared_in_a_file(models: Path) -> None:
    """Also with the version in the repository before the server starts: the new one gets no request too early."""
    python_model(models, "adder", adds(2), CONFIG, version=2)
    file = models / "adder" / "rollout.toml"
    file.write_text(TOML.replace("200ms", "1h"))
    with house(models) as server, load(server) as traffic:
        reaches(server, "running")
        eventually(lambda: traffic.answers["2.0"] > 0)
        assert server.ask("POST", f"{MODEL}/rollout/abort", b"")[0] == 200
        first = status(server)["id"]
        server.follow(file, f"# a comment\n{file.read_text()}")
        assert (status(server)["id"], status(server)["state"]) == (first, "aborted"), "the operator's command holds"
        server.follow(file, "to = ")
        assert "rollout.toml" in server.text and "until it is corrected" in server.text
        server.follow(file, TOML)
        found = reaches(server, "promoted")
        assert found["id"] != first
        eventually(lambda: served(server) == 2.0)
        python_model(models, "adder", adds(3), CONFIG, version=3)
        server.follow(file, TOML.replace('"2"', '"1"').replace('from = "1"\n', "").replace("200ms", "1h"))
        eventually(lambda: status(server)["to"] == "1", what=server.text[-2000:])
        server.follow(file, 'to = "2"')
        reaches(server, "aborted")
        eventually(lambda: "serves version 2, as its rollout file asks for" in server.text)
        traffic.stop()
        assert served(server) == 2.0
    with house(models, log="again") as server:
        assert served(server) == 2.0, "version 3 is there, but was not asked for"


class Hook(HTTPServer):
    """A webhook."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.got: list[dict[str, Any]] = []


class Receiver(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        self.server.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_decisions_are_posted_and_logged(models: Path) -> None:
    python_model(models, "adder", adds(2), CONFIG + "\nversion_policy { specific { versions: [ 1 ] } }", version=2)
    with Hook() as hook:
        thread = threading.Thread(target=hook.serve_forever)
        thread.start()
        with house(models, "--webhook-allowed-host=127.0.0.1") as server:
            start(server, {**SLOW, "webhook": f"http://127.0.0.1:{hook.server_port}/"})
            server.ask("POST", f"{MODEL}/rollout/abort", b"")
            eventually(lambda: len(hook.got) == 2)
            log = server.text
        hook.shutdown()
        thread.join()
    assert [(each["model"], each["state"]) for each in hook.got] == [("adder", "running"), ("adder", "aborted")]
    assert hook.got[0]["evidence"]["arms"]["candidate"]["version"] == "2"
    assert "rollout of 'adder' from version 1 to 2: running: version 2 gets 20 % of the requests" in log
    assert "rollout of 'adder' from version 1 to 2: aborted: an operator aborted the rollout" in log


def test_webhooks_that_are_refused(models: Path) -> None:
    refusals = {
        "http://a..b/x": "'a..b' is no host",
        "http://169.254.169.254/latest/meta-data": "169.254.169.254, which is not public",
        "http://localhost:8000/v2/repository/models/adder/unload": "allow it with --webhook-allowed-host localhost",
    }
    with house(models) as server:
        for url, why in refusals.items():
            code, _, body = server.ask("POST", f"{MODEL}/rollout", {**SLOW, "webhook": url})
            assert code == 400 and why in json.loads(body)["error"]
        assert server.ask("GET", f"{MODEL}/rollout", b"")[0] == 404


def test_receivers_do_not_disturb_each_other(models: Path) -> None:
    """One is silent, one sends what is not HTTP, one breaks connections; the fourth gets its documents."""
    names = ("adder", "silent", "odd", "closed")
    for name in names:
        for version in (1, 2):
            config = CONFIG + "\nversion_policy { specific { versions: [ 1 ] } }"
            python_model(models, name, adds(version), config, version=version)

    def serve(listening: socket.socket, answer: bytes) -> None:
        with suppress(OSError):  # the test has ended
            while True:
                connection, _ = listening.accept()
                connection.sendall(answer)
                connection.close()

    silent, odd, closed = sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    for listening, answer in ((odd, b"\0" * 100_000), (closed, b"")):
        threading.Thread(target=serve, args=(listening, answer), daemon=True).start()
    with Hook() as hook, house(models, "--webhook-allowed-host=127.0.0.1") as server:
        thread = threading.Thread(target=hook.serve_forever)
        thread.start()
        ports = [silent.getsockname()[1], odd.getsockname()[1], closed.getsockname()[1], hook.server_port]
        for name, port in zip((*names[1:], names[0]), ports, strict=True):
            spec = {**SLOW, "webhook": f"http://127.0.0.1:{port}/"}
            assert server.ask("POST", f"/v2/models/{name}/rollout", spec)[0] == 200
        eventually(lambda: bool(hook.got))
        server.ask("POST", f"{MODEL}/rollout/abort", b"")
        eventually(lambda: len(hook.got) == 2)
        assert "was not posted" not in server.text, "the others are tried again meanwhile"
        hook.shutdown()
        thread.join()
    for each in sockets:
        each.close()


def test_the_command_waits_for_the_end_and_a_recording_is_judged_anew(models: Path) -> None:
    python_model(models, "adder", adds(2), CONFIG + "\nversion_policy { specific { versions: [ 1 ] } }", version=2)
    with house(models) as server, load(server):
        words = "start adder --to 2 --steps 50,100 --hold 1s --requests 5 --gate errors=+50%,5% --record --wait"
        printed = run([str(NERITE), "rollout", "--url", server.http, *words.split()], server)
        lines = printed.splitlines()
        assert "promoted" in lines[-1] and "not worse" in lines[-1]
        recording = status(server)["recording"]
    printed = run([str(NERITE), "rollout", "replay", recording, "--gate", "errors=+50%,5%", "--every", "200ms"])
    assert re.search(r"^not worse: ", printed, re.MULTILINE)


def screens(terminal: Terminal) -> list[list[str]]:
    """Return the lines of each screen that was drawn so far."""
    return [
        [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip("\r") for line in screen.split("\r\n")]
        for screen in terminal.look().split("\x1b[H")[1:]
    ]


def test_the_live_view_at_80_columns(models: Path) -> None:
    python_model(models, "adder", adds(2), CONFIG + "\nversion_policy { specific { versions: [ 1 ] } }", version=2)
    with house(models) as server, load(server):
        start(server, {**SLOW, "steps": [50, 100], "gate": ["errors=+50%,5%", "p99"]})
        words = [str(NERITE), "rollout", "watch", "adder", "--interval", "0.1", "--url", server.http]
        terminal = Terminal(words, (24, 80))
        try:
            eventually(
                lambda: any("[################] 100%" in line for screen in screens(terminal) for line in screen)
            )
            for screen in screens(terminal):
                assert max(map(len, screen)) <= 80
            server.ask("POST", f"{MODEL}/rollout/abort", b"")
            assert terminal.process.wait(PATIENCE) == 1
            last = terminal.look().rpartition("\x1b[?1049l")[2]
        finally:
            terminal.close()
        assert "adder: version 1 -> 2   ABORTED   weight 0 %" in last
        assert "an operator aborted the rollout" in last
        again = Terminal([*words[:2], "watch", "adder", "--url", server.http], (24, 80))
        try:
            assert again.process.wait(PATIENCE) == 1, "it has ended"
        finally:
            again.close()


def test_a_killed_server_goes_on_at_its_step(models: Path) -> None:
    python_model(models, "adder", adds(2), CONFIG + "\nversion_policy { specific { versions: [ 1 ] } }", version=2)
    flags = (f"--rollout-state={models.parent / 'state'}",)
    with serving(models, models.parent / "log", *flags, clean=False) as server:
        start(server, SLOW)
        server.ask("POST", f"{MODEL}/rollout/pause", b"")
        eventually(lambda: any("paused" in file.read_text() for file in (models.parent / "state").glob("*.json")))
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(PATIENCE)
    with house(models, log="again") as server:
        assert (status(server)["state"], status(server)["weight"]) == ("paused", 20)
