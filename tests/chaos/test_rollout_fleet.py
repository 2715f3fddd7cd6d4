"""The rollout of a fleet: one decision for all replicas, also if the command or a replica is killed in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from replicas import Cluster, clients, cluster
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
SLOWLY = ("--steps", "20,50,100", "--hold", "1h", "--gate", "errors=+50%,5%")


@pytest.fixture
def found(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        yield made


def test_a_good_version_is_promoted_on_all(found: Cluster) -> None:
    found.add_version(adds(2))
    with clients(found) as traffic:
        command = found.start()
        assert command.wait() == 0, command.text
        eventually(lambda: [replica.served() for replica in found.replicas] == [2.0] * 3)
    assert not [answer for answer in traffic.answers if answer.startswith("status")]
    statuses = [replica.status() for replica in found.replicas]
    assert len({status["id"] for status in statuses}) == 1
    assert {status["state"] for status in statuses} == {"promoted"}
    # The evidence of one replica alone is not what decided.
    assert "promoted on 3 replicas" in command.text


def test_a_bad_version_is_rolled_back_on_all(found: Cluster) -> None:
    found.add_version(FAILS)
    with clients(found):
        command = found.start(*SLOWLY)
        assert command.wait() == 1, command.text
        eventually(lambda: [replica.served() for replica in found.replicas] == [1.0] * 3)
    assert {replica.status()["state"] for replica in found.replicas} == {"rolled_back"}
    assert "errors=+50%,5%" in command.text


def test_the_command_is_killed_and_started_again(found: Cluster) -> None:
    found.add_version(adds(2))
    steady = ("--steps", "25,50,100", "--hold", "2s", "--requests", "20", "--gate", "errors=+50%,5%")
    with clients(found):
        command = found.start(*steady)
        found.eventually("running", weight=25)
        command.kill()
        (number,) = {replica.status()["id"] for replica in found.replicas}
        again = found.start(*steady)
        assert again.wait() == 0, again.text
        assert f"the rollout {number} of 'resnet' from version 1 to 2 goes on" in again.text
        eventually(lambda: [replica.served() for replica in found.replicas] == [2.0] * 3)
    assert {replica.status()["id"] for replica in found.replicas} == {number}


def test_a_replica_is_killed_and_restarted(found: Cluster) -> None:
    found.add_version(adds(2))
    steady = ("--steps", "25,50,100", "--hold", "2s", "--requests", "20", "--gate", "errors=+50%,5%")
    lost = found.replicas[1]
    with clients(found):
        command = found.start(*steady)
        found.eventually("running", weight=25)
        lost.kill()
        eventually(lambda: f"{lost.url}: " in command.text)
        # Two of three are not promoted while the third is lost.
        eventually(lambda: found.replicas[0].status()["in_step"] > 3)
        assert found.replicas[0].status()["state"] == "running"
        lost.start()
        assert command.wait() == 0, command.text
        eventually(lambda: [replica.served() for replica in found.replicas] == [2.0] * 3)
    assert f"{lost.url}: well again" in command.text


def test_an_operator_asks_one_replica(found: Cluster) -> None:
    found.add_version(adds(2))
    command = found.start(*SLOWLY)
    found.eventually("running", weight=20)
    one, other = found.replicas[0].server, found.replicas[2].server
    assert one.ask("POST", "/v2/models/resnet/rollout/pause", b"")[0] == 200
    found.eventually("paused")
    assert other.ask("POST", "/v2/models/resnet/rollout/promote", b"")[0] == 200
    eventually(lambda: "refused: promote" in command.text)
    assert other.ask("POST", "/v2/models/resnet/rollout/abort", b"")[0] == 200
    found.eventually("aborted")
    assert command.wait() == 1


def test_without_the_command_replicas_stay_and_watch_by_themselves(found: Cluster) -> None:
    found.add_version(FAILS)
    command = found.start(*SLOWLY, "--lease", "2s")
    found.eventually("running", weight=20)
    command.kill()
    one = found.replicas[0]
    eventually(lambda: one.status()["fleet"]["leads"] is False)
    assert one.server.ask("POST", "/v2/models/resnet/rollout/promote", {"force": True})[0] == 409
    with clients(found):
        eventually(lambda: one.status()["state"] == "rolled_back")
        again = found.start(*SLOWLY, "--lease", "2s")
        assert again.wait() == 1, again.text
    assert {replica.status()["state"] for replica in found.replicas} == {"rolled_back"}
