"""``nerite.testing``: models of sequences, with controls, states and turns, in a plain test."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from nerite.core.errors import InvalidArgument, NeriteError, Unavailable
from nerite.testing import Request, load_model

STATE = {"input_name": "BEFORE", "output_name": "AFTER", "data_type": "TYPE_INT32", "dims": [1]}
CONTROLS = [
    {"name": "START", "control": [{"kind": "CONTROL_SEQUENCE_START", "bool_false_true": [False, True]}]},
    {"name": "END", "control": [{"kind": "CONTROL_SEQUENCE_END", "bool_false_true": [False, True]}]},
    {"name": "READY", "control": [{"kind": "CONTROL_SEQUENCE_READY", "bool_false_true": [False, True]}]},
    {"name": "ID", "control": [{"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_INT32"}]},
]


def config(*, slots: int = 4, decoupled: bool = False, **batching: Any) -> dict[str, Any]:
    return {
        "max_batch_size": slots,
        "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": [1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": [1]}],
        "sequence_batching": {"control_input": CONTROLS, "state": [STATE], **batching},
        "model_transaction_policy": {"decoupled": decoupled},
    }


class Model:
    """Keeps what it was given, by request."""

    def initialize(self, args: dict[str, str]) -> None:
        self.batches: list[list[dict[str, Any]]] = []

    def given(self, requests: list[Any]) -> list[dict[str, Any]]:
        self.batches.append([{each.name(): each.as_numpy().item() for each in one.inputs()} for one in requests])
        return self.batches[-1]


def tensor(name: str, value: int) -> pb_utils.Tensor:
    return pb_utils.Tensor(name, np.array([[value]], np.int32))


class Sum(Model):
    """Adds what comes in a sequence up."""

    def execute(self, requests: list[Any]) -> list[pb_utils.InferenceResponse]:
        totals = [one["IN"] + one["BEFORE"] for one in self.given(requests)]
        if 13 in totals:
            raise LookupError("unlucky")
        return [pb_utils.InferenceResponse([tensor("AFTER", each), tensor("OUT", each)]) for each in totals]


class Turns(Model):
    """Counts up to what came in, one each turn."""

    def execute(self, requests: list[Any]) -> list[pb_utils.InferenceResponse]:
        responses = []
        for request, one in zip(requests, self.given(requests), strict=True):
            turn = one["BEFORE"] + 1
            tensors = [tensor("AFTER", turn)]
            if turn < one["IN"]:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            else:
                tensors.append(tensor("OUT", turn))
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses


class Streams(Model):
    """As ``Turns``, with a response each turn."""

    def execute(self, requests: list[Any]) -> None:
        for request, one in zip(requests, self.given(requests), strict=True):
            turn = one["BEFORE"] + 1
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([tensor("AFTER", turn), tensor("OUT", turn)]))
            if turn < one["IN"]:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            else:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


class Threaded(Model):
    """Answers from a thread, with two responses, each of which leaves a state."""

    def execute(self, requests: list[Any]) -> None:
        given = self.given(requests)
        for request, one in zip(requests, given, strict=True):
            if one["READY"]:
                threading.Thread(target=self.answer, args=(request.get_response_sender(), one)).start()
            else:
                request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def answer(self, sender: Any, one: dict[str, Any]) -> None:
        for value in (one["IN"], one["IN"] + 1):
            sender.send(pb_utils.InferenceResponse([tensor("AFTER", value), tensor("OUT", value + one["BEFORE"])]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def test_a_sequence() -> None:
    with load_model(Sum, config()) as model:
        sequence = model.sequence(7)
        answers = [sequence.infer({"IN": [[value]]}, end=value == 3) for value in (1, 2, 3)]
        assert [answer["OUT"].tolist() for answer in answers] == [[[1]], [[3]], [[6]]]
        assert answers[0].keys() == {"OUT"}
        begins = {"IN": 1, "START": True, "END": False, "READY": True, "ID": 7, "BEFORE": 0}
        ends = {"IN": 3, "START": False, "END": True, "READY": True, "ID": 7, "BEFORE": 3}
        assert [model.model.batches[0], model.model.batches[2]] == [[begins], [ends]]
        assert sequence.infer({"IN": [[5]]})["OUT"] == 5, "after the last comes a first"


def test_sequences_side_by_side() -> None:
    with load_model(Sum, config()) as model:
        one, two = model.sequence(1), model.sequence(2)
        one.infer({"IN": [[10]]})
        two.infer({"IN": [[20]]})
        answers = model.execute([Request({"IN": [[value]]}, sequence_id=value) for value in (1, 2)])
        assert [answer["OUT"].item() for answer in answers if isinstance(answer, dict)] == [11, 22]
        assert [one["ID"] for one in model.model.batches[-1]] == [1, 2]
        one.infer({"IN": [[0]]}, end=True)
        two.infer({"IN": [[0]]})
        assert [one["READY"] for one in model.model.batches[-1]] == [False, True], "each has its slot"


def test_oldest() -> None:
    with load_model(Sum, config(oldest={"max_candidate_sequences": 9, "max_queue_delay_microseconds": 10**9})) as model:
        model.sequence(1).infer({"IN": [[10]]})
        requests = [Request({"IN": [[value]]}, sequence_id=value, sequence_start=True) for value in (2, 3, 4)]
        assert len(model.execute(requests)) == 3
        assert [len(batch) for batch in model.model.batches] == [1, 3]


def test_requests_are_checked_as_in_the_server() -> None:
    with load_model(Sum, config()) as model:
        with pytest.raises(InvalidArgument, match="must specify the START flag on the first request of the sequence"):
            model.infer({"IN": [[1]]}, sequence_id=1)
        with pytest.raises(InvalidArgument, match="must specify a non-zero or non-empty correlation ID"):
            model.infer({"IN": [[1]]}, sequence_start=True)
        with pytest.raises(InvalidArgument, match="data-type is 'BYTES', but model 'testing' expects 'INT32'"):
            model.sequence("seven").infer({"IN": [[1]]})
        with pytest.raises(InvalidArgument, match="must specify batch-size 1"):
            model.sequence(1).infer({"IN": [[1], [1]]})


def test_a_sequence_without_a_slot() -> None:
    with load_model(Sum, config(slots=1)) as model:
        one = model.sequence(1)
        one.infer({"IN": [[1]]})
        with pytest.raises(Unavailable, match="sequence 2 waits for a slot: max_batch_size or max_candidate_sequences"):
            model.sequence(2).infer({"IN": [[1]]})
        one.infer({"IN": [[1]]}, end=True)
        assert model.sequence(2).infer({"IN": [[4]]})["OUT"] == 4


def test_what_the_model_raises_leaves_the_state_as_it_was() -> None:
    with load_model(Sum, config()) as model:
        sequence = model.sequence(1)
        sequence.infer({"IN": [[10]]})
        with pytest.raises(LookupError, match=r"^unlucky$") as raised:
            sequence.infer({"IN": [[3]]})
        assert raised.traceback[-1].path.name == "test_sequences_under_test.py"
        assert sequence.infer({"IN": [[4]]})["OUT"] == 14


def test_an_iterative_model_runs_until_it_is_done() -> None:
    with load_model(Turns, config(iterative_sequence=True)) as model:
        assert model.infer({"IN": [[3]]})["OUT"] == 3
        assert [[one["START"], one["BEFORE"]] for (one,) in model.model.batches] == [[True, 0], [False, 1], [False, 2]]
        both = model.execute([{"IN": [[1]]}, {"IN": [[2]]}])
        assert [answer["OUT"].item() for answer in both if isinstance(answer, dict)] == [1, 2]


def test_an_iterative_model_with_a_response_each_turn() -> None:
    with load_model(Streams, config(iterative_sequence=True, decoupled=True)) as model:
        answers = model.stream({"IN": [[3]]})
    assert [answer["OUT"].item() for answer in answers if isinstance(answer, dict)] == [1, 2, 3]


def test_a_model_that_is_not_iterative_may_have_nothing_once_more() -> None:
    with load_model(Turns, config()) as model:
        with pytest.raises(NeriteError, match="iterative_sequence: true"):
            model.sequence().infer({"IN": [[3]]})
        assert model.sequence().infer({"IN": [[1]]})["OUT"] == 1


@pytest.mark.parametrize("end", [False, True])
def test_responses_from_a_thread(end: bool) -> None:
    with load_model(Threaded, config(decoupled=True)) as model:
        sequence = model.sequence()
        answers = [sequence.stream({"IN": [[1]]}), sequence.stream({"IN": [[5]]}, end=end)]
        told = [[one["OUT"].item() for one in answer if isinstance(one, dict)] for answer in answers]
        assert told == [[1, 2], [5 + 2, 6 + 2]]
