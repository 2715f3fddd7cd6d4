"""``nerite rollout``: its command line, its views, and its exit statuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from nerite.client import ClientError
from nerite.client.connection import Unreachable
from nerite.config.rollout_spec import RolloutSpec
from nerite.tools.rollout import command, view, watch

STATUS: dict[str, Any] = {
    "model": "resnet",
    "id": "1a2b",
    "state": "running",
    "reason": "held",
    "text": "no harm was shown: version 2 gets 25 % of the requests",
    "from": "1",
    "to": "2",
    "steps": [1.0, 5.0, 25.0, 50.0, 100.0],
    "step": 2,
    "weight": 25.0,
    "elapsed": 723.4,
    "in_step": 130.0,
    "step_requests": 1204,
    "spec": RolloutSpec("2", "1").as_json(),
    "arms": {
        "baseline": {"version": "1", "weight": 75.0, "requests": 93412, "errors": 93, "p50_ms": 1.2, "p99_ms": 12.1,
                     "first_p95_ms": 10.1},
        "candidate": {"version": "2", "weight": 25.0, "requests": 0, "errors": 0, "p50_ms": None, "p99_ms": None,
                      "first_p95_ms": None},
    },
    "gates": [
        {"gate": "errors", "worse": 0.9, "worse_boundary": 1.8, "not_worse": -0.4, "not_worse_boundary": 1.3},
        {"gate": "kv_headroom>=10%", "worse": 0.0, "worse_boundary": None, "not_worse": 0.0,
         "not_worse_boundary": None},
    ],
    "differences": [
        {"severity": "warns", "subject": "output 'scores'", "baseline": "FP32", "candidate": "FP16",
         "consequence": "Clients must read it."}
    ],
}  # fmt: skip


def status(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(STATUS), **changes}


def test_the_live_view_has_both_arms_and_each_gate_within_80_columns() -> None:
    lines = view.frame(status(), 80)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "resnet: version 1 -> 2   RUNNING   step 3 of 5, weight 25 %" in text
    assert "steps: 1% > 5% > [25%] > 50% > 100%" in text
    assert "under way 12m3s of 2h   step 2m10s of 5m, 1204 of 20 requests" in text
    (baseline,) = [line.split() for line in lines if line.startswith("baseline")]
    assert baseline == ["baseline", "1", "75", "%", "93,412", "0.10%", "1.20", "12.10", "10.10"]
    (candidate,) = [line.split() for line in lines if line.startswith("candidate")]
    assert candidate == ["candidate", "2", "25", "%", "0", "-", "-", "-", "-"]
    (errors,) = [line for line in lines if line.startswith("errors ")]
    assert errors.split() == ["errors", f"[{'#' * 8}{'.' * 8}]", "50%", f"[{'.' * 16}]", "0%"]
    (limit,) = [line for line in lines if line.startswith("kv_headroom")]
    assert "a hard limit" in limit
    assert any(line.startswith("warns: output 'scores': FP32 -> FP16: Clients") for line in lines)


@pytest.mark.parametrize("state", ["checking", "paused", "inconclusive", "promoted", "rolled_back", "aborted"])
def test_every_state_has_a_view(state: str) -> None:
    assert state.upper() in view.frame(status(state=state, gates=[], text=""))[0]


def test_the_view_of_a_shadow() -> None:
    shadow = {
        "compared": {"equal": 900, "different": 100},
        "dropped": {"late": 3}, "agreement": 0.9,
        "label_agreement": 0.5, "distance_p99": 0.01, "shared_text_mean": None,
    }  # fmt: skip
    spec = {**status()["spec"], "shadow": "10%"}
    lines = view.frame(status(shadowing=True, weight=0, spec=spec, shadow=shadow), width=200)
    assert lines[0].endswith("answers no client, is sent 10%")
    assert lines[1] == "steps: [shadow 10%] > 1% > 5% > 25% > 50% > 100%"
    assert (
        "shadow: 1,000 answers compared, 90.00% agree, 900 equal, 100 different, labels 50.00%, "
        "distance p99 <= 0.01, 3 not compared"
    ) in lines


@pytest.mark.parametrize(
    ("evidence", "boundary", "part"), [(0.65, 1.3, 0.5), (-3, 1.3, 0), (5, 1.3, 1), (None, 1.3, 0), (1, None, 0)]
)
def test_progress(evidence: float | None, boundary: float | None, part: float) -> None:
    assert view.progress(evidence, boundary) == part


def test_a_bar_is_full_only_at_the_boundary() -> None:
    assert view.bar(0.999, 4) == "[###.]"
    assert view.bar(1, 4) == "[####]"


def test_the_line_for_a_log() -> None:
    assert view.line(status()) == (
        "resnet running step 3 of 5, weight 25 %   baseline 93412 requests 93 errors   "
        "errors harm 50% proof 0%, kv_headroom>=10% harm 0% proof 0%"
    )


def test_the_command_line_gives_a_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "m --to 2 --from 1 --steps 1,25,100 --shadow 10% --hold 5m --gate errors --gate p99=+10% "
        "--sticky header:x-user --deadline 2h --at-deadline rollback --webhook https://h.example/a --requests 7 --force"
    )
    assert started(monkeypatch, *words.split()) == {
        "to": "2",
        "from": "1",
        "steps": [1.0, 25.0, 100.0],
        "shadow": "10%",
        "hold": "5m",
        "requests": 7,
        "deadline": "2h",
        "at-deadline": "rollback",
        "gate": ["errors", "p99=+10%"],
        "sticky": "header:x-user",
        "webhook": "https://h.example/a",
        "record": False,
        "force": True,
    }
    assert started(monkeypatch, "m", "--to", "2") == RolloutSpec("2").as_json()


class Recorder:
    """A client that answers each question with the next of some statuses."""

    def __init__(self, *answers: dict[str, Any] | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []

    def rollout(self, model: str) -> dict[str, Any]:
        self.asked.append(model)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def start_rollout(self, model: str, spec: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(spec)
        return status(state="checking")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


def started(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    client = Recorder(status())
    monkeypatch.setattr("nerite.tools.rollout.command.connected", lambda options: client)
    assert command.run(["start", *words, "--interval", "0.001"]) == 0
    return client.asked[0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["start", "m"], "--to"),
        (["start", "m", "--to", "2", "--hold", "soon"], "--hold: must be a duration"),
        (["start", "m", "--to", "2", "--steps", "5,50"], "--steps: must end with 100"),
        (["start", "m", "--to", "2", "--gate", "speed"], "unknown; gates are errors"),
        (["start", "m", "--to", "2", "--sticky", "cookie"], "Use header:NAME"),
        (["start", "m", "--to", "2", "--stesp", "1,100"], "Did you mean '--steps'?"),
        (["strat", "m"], "Did you mean 'start'?"),
        (["promote", "m", "--forced"], "--force"),
        (["--url", "localhost:1"], "a command is required"),
    ],
)
def test_mistakes_are_told_with_status_2(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(words) == 2
    assert told in capsys.readouterr().err


def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run([]) == 0
    overview = capsys.readouterr().out
    for name in command.COMMANDS:
        assert f"  {name}" in overview
        assert command.run([name, "--help"]) == 0
        assert f"nerite rollout {name}" in capsys.readouterr().out.partition("Example")[2]


@pytest.mark.parametrize(
    ("state", "expected"), [("promoted", 0), ("rolled_back", 1), ("aborted", 1), ("inconclusive", 3)]
)
def test_the_exit_status_is_for_a_pipeline(
    state: str, expected: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = Recorder(status(state="checking", step=0), status(), status(), status(state=state, text="because of this"))
    monkeypatch.setattr("nerite.tools.rollout.command.connected", lambda options: client)
    assert command.run(["start", "m", "--to", "2", "--wait", "--interval", "0.001"]) == expected
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3, "a line for each change"
    assert state in lines[-1] and "because of this" in lines[-1]


def test_a_server_that_restarts_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    gone = Unreachable("cannot reach localhost:8000: Connection refused")
    client: Any = Recorder(status(), gone, ClientError("not loaded yet", 503), status(state="promoted"))
    assert watch.follow_lines(client, "m", 0.001) == 0
    assert "the server does not answer: cannot reach" in capsys.readouterr().out


def test_a_server_that_stays_away_is_an_error() -> None:
    now = iter([0.0, 100.0, 121.0])
    client: Any = Recorder(Unreachable("cannot reach it"))
    follower = watch.RolloutFollower(client, "m", lambda: next(now))
    assert follower.look() is None
    assert follower.look() is None
    with pytest.raises(Unreachable):
        follower.look()
    client.answers = [ClientError("model 'm' has no rollout", 404)]
    with pytest.raises(ClientError):
        follower.look()
