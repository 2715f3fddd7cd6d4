"""Sequences in a running server: their instances, what ends them, and who is told of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from serving import PATIENCE, Serving, eventually, let_go, pbtxt, python_model, serving

TOTAL = """
def initialize(self, args):
    self.totals = {}

def execute(self, requests):
    responses = []
    for request in requests:
        of = request.correlation_id()
        value, held = (float(each) for each in request.inputs()[0].as_numpy().reshape(-1)) if of else (0, 0)
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.totals[of] = 0
        if held:
            print("is held by", of, flush=True)
        while held and not os.path.exists(os.path.join(os.path.dirname(__file__), "go")):
            time.sleep(0.001)
        # Without START, and without what was before: an error, and nobody should see it.
        self.totals[of] = self.totals[of] + value if of else 0
        answer = np.array([[self.totals[of], os.getpid()]], np.float32)
        responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", answer)]))
    return responses
"""
PENDING = 'nv_inference_pending_request_count{model="total",version="1"}'
START = {"sequence_start": True}
END = {"sequence_end": True}


def config(strategy: str = "direct { }", instances: int = 1, idle_us: int = 600_000_000) -> str:
    batching = f"sequence_batching {{ max_sequence_idle_microseconds: {idle_us} {strategy} }}"
    text = pbtxt(batch=1, dims="2", more=batching)
    return text.replace("KIND_CPU", f"KIND_CPU count: {instances}")


class Client:
    """Asks for sequences, and remembers the answers in the order in which they come."""

    def __init__(self, server: Serving) -> None:
        self.client = grpcclient.InferenceServerClient(server.grpc)

    def send(self, of: int, value: float, held: bool = False, **flags: Any) -> tuple[Any, Queue[Any]]:
        """Return what cancels the request, and where its answer will be. ``held``: not before ``let_go``."""
        answers: Queue[Any] = Queue()
        tensor = grpcclient.InferInput("INPUT0", [1, 2], "FP32")
        tensor.set_data_from_numpy(np.array([[value, held]], np.float32))
        call = self.client.async_infer(
            "total",
            [tensor],
            lambda result, error: answers.put(error or result.as_numpy("OUTPUT0")[0].tolist()),
            sequence_id=of,
            **flags,
        )
        return call, answers

    def ask(self, of: int, value: float, **flags: Any) -> tuple[float, int]:
        """Return the total of a sequence, and the process that has it."""
        answer = self.send(of, value, **flags)[1].get(timeout=PATIENCE)
        if isinstance(answer, InferenceServerException):
            raise answer
        return answer[0], int(answer[1])


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def started(tmp_path: Path, models: Path) -> Iterator[Any]:
    """A function that starts a server for one model with a configuration."""
    running = []

    def start(text: str, *flags: str) -> tuple[Serving, Client]:
        python_model(models, "total", TOTAL, text)
        running.append(serving(models, tmp_path / "log", *flags))
        server = running[-1].__enter__()
        return server, Client(server)

    yield start
    for each in running:
        each.__exit__(None, None, None)


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 2 }"])
def test_each_sequence_stays_with_its_instance(started: Any, strategy: str) -> None:
    server, client = started(config(strategy, instances=2))
    first = [client.ask(1, 1, **START), client.ask(1, 2)]
    second = [client.ask(2, 10, **START), client.ask(2, 20)]
    first.append(client.ask(1, 4, **END))
    second.append(client.ask(2, 40, **END))
    assert [total for total, _ in first] == [1, 3, 7]
    assert [total for total, _ in second] == [10, 30, 70]
    assert len({pid for _, pid in first}) == len({pid for _, pid in second}) == 1
    assert first[0][1] != second[0][1]
    released = "nerite_batch_releases_total"
    eventually(lambda: sum(count for name, count in server.metrics().items() if name.startswith(released)) == 6)


def test_what_waits_too_long_for_a_slot_is_refused(started: Any) -> None:
    server, client = started(config())
    client.ask(1, 1, **START)
    with pytest.raises(InferenceServerException, match="timeout of the corresponding sequence has been expired"):
        client.ask(2, 1, timeout=200_000, **START)
    with pytest.raises(InferenceServerException, match=r"START flag .* timed out waiting for a slot"):
        client.ask(2, 1)
    assert client.ask(1, 1, **END)[0] == 2
    assert server.metrics()['nv_inference_request_failure{model="total",reason="REJECTED",version="1"}'] == 1


def test_as_many_sequences_as_may_be_candidates(started: Any) -> None:
    server, client = started(config("oldest { max_candidate_sequences: 2 }").replace("batch_size: 1", "batch_size: 8"))
    for of in (1, 2):
        client.ask(of, 1, **START)
    _, waiting = client.send(3, 5, **START)
    eventually(lambda: server.metrics()[PENDING] == 1)
    client.ask(1, 1, **END)
    assert waiting.get(timeout=PATIENCE)[0] == 5


def test_an_idle_sequence_makes_room(started: Any) -> None:
    _, client = started(config(idle_us=200_000))
    client.ask(1, 1, **START)
    assert client.ask(2, 5, **START)[0] == 5
    with pytest.raises(InferenceServerException, match="it received no request for 200000 µs"):
        client.ask(1, 1)


def test_who_cancels_a_request_that_waits_ends_the_sequence(started: Any, models: Path) -> None:
    server, client = started(config())
    _, first = client.send(1, 1, held=True, **START)
    eventually(lambda: "is held by 1" in server.text)
    second, _ = client.send(1, 2)
    _, third = client.send(1, 3)
    _, other = client.send(2, 10, **START)
    eventually(lambda: server.metrics()[PENDING] == 3)
    second.cancel()
    assert "CANCELLED" in str(third.get(timeout=PATIENCE))
    let_go(models / "total")
    assert first.get(timeout=PATIENCE)[0] == 1
    assert other.get(timeout=PATIENCE)[0] == 10
    with pytest.raises(InferenceServerException, match=r"START flag .* one of its requests was cancelled"):
        client.ask(1, 4)


def test_a_worker_that_dies_takes_its_own_sequences_with_it(started: Any) -> None:
    server, client = started(config("oldest { max_candidate_sequences: 2 }", instances=2))
    begun = {of: client.ask(of, of, **START)[1] for of in (1, 2, 3, 4)}
    lost = [of for of, pid in begun.items() if pid == begun[1]]
    kept = [of for of in begun if of not in lost]
    assert (len(lost), len(kept)) == (2, 2)
    _, running = client.send(lost[0], 1, held=True)
    eventually(lambda: f"is held by {lost[0]}" in server.text)
    _, waiting = client.send(lost[0], 1)
    eventually(lambda: server.metrics()[PENDING] == 1)
    os.kill(begun[1], signal.SIGKILL)
    assert "is not healthy" in str(running.get(timeout=PATIENCE))
    assert "START flag" in str(waiting.get(timeout=PATIENCE))
    for of in lost:
        with pytest.raises(
            InferenceServerException, match=r"START flag .* the instance that had it, 'total_0_\d', died"
        ):
            client.ask(of, 1)
    assert [client.ask(of, 1)[0] for of in kept] == [of + 1 for of in kept]
    eventually(lambda: server.ready("total"))
    assert [client.ask(of, 7, **START)[0] for of in lost] == [7, 7]
    assert [client.ask(of, 1, **END)[0] for of in kept] == [of + 2 for of in kept]


def test_an_instance_that_is_taken_away_finishes_its_sequences(started: Any, models: Path) -> None:
    server, client = started(config(instances=2), "--model-control-mode=explicit", "--load-model=total")
    begun = {of: client.ask(of, of, **START)[1] for of in (1, 2)}
    (models / "total" / "config.pbtxt").write_text(config(instances=1))
    assert server.ask("POST", "/v2/repository/models/total/load")[0] == 200
    assert [client.ask(of, 1) for of in (1, 2)] == [(2, begun[1]), (3, begun[2])]
    assert len(server.workers()) == 2
    for of in (1, 2):
        client.ask(of, 1, **END)
    eventually(lambda: len(server.workers()) == 1)
    assert client.ask(5, 5, **START)[0] == 5


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 1 }"])
def test_a_model_that_goes_waits_for_no_sequence(started: Any, models: Path, strategy: str) -> None:
    """What waits behind a sequence of which nobody can hear any more does not wait until that is idle for too long."""
    server, client = started(config(strategy), "--model-control-mode=explicit", "--load-model=total")
    client.ask(1, 5, **START)
    waiting = [client.send(of, of, **START)[1] for of in (2, 3)]
    eventually(lambda: server.metrics()[PENDING] == 2)
    (models / "total" / "1" / "model.py").write_text((models / "total" / "1" / "model.py").read_text() + "\n")
    assert server.ask("POST", "/v2/repository/models/total/load")[0] == 200
    assert [answers.get(timeout=PATIENCE)[0] for answers in waiting] == [2, 3]
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        client.ask(1, 5)
    client.ask(1, 7, **START)
    assert server.ask("POST", "/v2/repository/models/total/unload")[0] == 200
    eventually(lambda: server.state("total") == "UNAVAILABLE")
    eventually(lambda: server.workers() == {})
    client.client.close()


def test_a_server_that_stops_lets_nobody_wait_for_sequences_that_may_never_end(started: Any, models: Path) -> None:
    """What runs is finished, and who has a slot in sight gets it; the others are told at once."""
    server, client = started(config())
    client.ask(1, 5, **START)
    _, ends = client.send(1, 1, held=True, **END)
    eventually(lambda: "is held by 1" in server.text)
    _, next_one = client.send(2, 7, **START)
    eventually(lambda: server.metrics()[PENDING] == 1)
    _, last = client.send(3, 9, **START)
    eventually(lambda: server.metrics()[PENDING] == 2)
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: "Waiting for in-flight requests to complete." in server.text)
    let_go(models / "total")
    assert (ends.get(timeout=PATIENCE)[0], next_one.get(timeout=PATIENCE)[0]) == (6, 7)
    refusal = last.get(timeout=PATIENCE)
    assert refusal.status() == "StatusCode.UNAVAILABLE"
    assert refusal.message() == (
        "Server is stopping, scheduler for model has stopped accepting new inference requests\n"
        "    Model 'total' has no free slot for sequence 3: send it to another server."
    )
    assert server.process.wait(PATIENCE) == 0
    client.client.close()
