"""The rollout of a fleet: one decision for all replicas, also if the command or a replica is killed in the middle."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from replicas import Cluster, FleetModel, clients, cluster
from serving import adds, eventually

FAILS = """
def execute(self, requests):
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() + 2)],
            pb_utils.TritonError("broken weights")
            if pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()[0, 0] == 7 and time.time_ns() // 1000 % 3
            else None,
        )
        for request in requests
    ]
"""
GATE = ("--gate", "errors=+50%,5%")
QUICK = ("--steps", "25,50,100", "--hold", "1s", *GATE)
STEADY = ("--steps", "25,50,100", "--hold", "2s", *GATE)
SLOW = ("--steps", "20,50,100", "--hold", "1h", *GATE)
Make = Callable[[str, str], FleetModel]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("fleet")) as made:
        yield made


@pytest.fixture
def model(three: Cluster) -> Iterator[Make]:
    made = []

    def make(name: str, candidate: str) -> FleetModel:
        made.append(FleetModel(three, name, candidate))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_good_version_is_promoted_on_all(model: Make) -> None:
    good = model("good", adds(2))
    with clients(good) as traffic:
        command = good.start(*QUICK)
        assert command.wait() == 0, command.text
        eventually(lambda: good.served() == [2.0] * 3)
    assert not [answer for answer in traffic.answers if answer.startswith("status")]
    assert "promoted on 3 replicas" in command.text
    assert {status["state"] for status in good.statuses()} == {"promoted"}
    assert len({status["id"] for status in good.statuses()}) == 1


def test_a_bad_version_is_rolled_back_on_all(model: Make) -> None:
    bad = model("bad", FAILS)
    with clients(bad):
        command = bad.start(*SLOW)
        assert command.wait() == 1, command.text
        eventually(lambda: bad.served() == [1.0] * 3)
    assert {status["state"] for status in bad.statuses()} == {"rolled_back"}
    (decision,) = [line for line in command.text.splitlines() if "rolled_back, weight 0 %" in line]
    assert "localhost" not in decision  # the sum of all decided, and none of them


def test_the_command_is_killed_and_started_again(model: Make) -> None:
    good = model("again", adds(2))
    with clients(good):
        command = good.start(*STEADY)
        good.eventually("running", weight=25)
        command.kill()
        (number,) = {status["id"] for status in good.statuses()}
        again = good.start(*STEADY)
        assert again.wait() == 0, again.text
        assert f"the rollout {number} of 'again' from version 1 to 2 goes on" in again.text
        eventually(lambda: good.served() == [2.0] * 3)
    assert {status["id"] for status in good.statuses()} == {number}


def test_a_replica_is_killed_and_restarted(model: Make) -> None:
    good = model("restarted", adds(2))
    lost, other = good.replicas[1], good.replicas[0]
    with clients(good):
        command = good.start(*STEADY)
        good.eventually("running", weight=25)
        lost.kill()
        eventually(lambda: f"{lost.url}: " in command.text)
        # Two of three stay at their step while the third is lost.
        eventually(lambda: other.status(good.name)["in_step"] > 3)
        assert other.status(good.name)["state"] == "running"
        lost.start()
        assert command.wait() == 0, command.text
        eventually(lambda: good.served() == [2.0] * 3)
    assert f"{lost.url}: well again" in command.text


def test_a_replica_that_has_lost_everything_is_brought_to_the_present_step(model: Make) -> None:
    good = model("anew", adds(2))
    lost = good.replicas[2]
    with clients(good):
        command = good.start(*SLOW)
        good.eventually("running", weight=20)
        lost.kill()
        for file in (lost.folder / "state").iterdir():
            file.unlink()
        lost.start()
        good.eventually("running", weight=20)
        assert good.replicas[0].server.ask("POST", "/v2/models/anew/rollout/promote", {"force": True})[0] == 200
        assert command.wait() == 0, command.text
        eventually(lambda: good.served() == [2.0] * 3)


def test_an_operator_asks_one_replica(model: Make) -> None:
    good = model("asked", adds(2))
    command = good.start(*SLOW)
    good.eventually("running", weight=20)
    one, other = good.replicas[0].server, good.replicas[2].server
    assert one.ask("POST", "/v2/models/asked/rollout/pause", b"")[0] == 200
    good.eventually("paused")
    assert other.ask("POST", "/v2/models/asked/rollout/promote", b"")[0] == 200
    eventually(lambda: "refused: promote" in command.text)
    assert other.ask("POST", "/v2/models/asked/rollout/abort", b"")[0] == 200
    good.eventually("aborted")
    assert command.wait() == 1


def test_without_the_command_replicas_stay_and_watch_by_themselves(model: Make) -> None:
    bad = model("alone", FAILS)
    command = bad.start(*SLOW, "--lease", "2s")
    bad.eventually("running", weight=20)
    command.kill()
    one = bad.replicas[0]
    eventually(lambda: one.status("alone")["fleet"]["leads"] is False)
    assert one.server.ask("POST", "/v2/models/alone/rollout/promote", {"force": True})[0] == 409
    with clients(bad):
        eventually(lambda: one.status("alone")["state"] == "rolled_back")
        again = bad.start(*SLOW, "--lease", "2s")
        assert again.wait() == 1, again.text
    assert {status["state"] for status in bad.statuses()} == {"rolled_back"}


def test_a_second_command_takes_over(model: Make) -> None:
    good = model("twice", adds(2))
    first = good.start(*SLOW)
    good.eventually("running", weight=20)
    good.start(*SLOW)
    assert first.wait() == 1
    assert "another fleet command leads the rollout of 'twice'" in first.text
    good.eventually("running", weight=20)
