"""What follows in a worker: the same question for the same headers, as long as there is room to remember it."""

from __future__ import annotations

import json

import pytest

from nerite.core import tensor as dtypes
from nerite.core.byte_budget import ByteBudget
from nerite.core.errors import InvalidArgument
from nerite.core.request import Caller, RequestHeader
from nerite.core.response import ResponseHeader
from nerite.core.signature import Signature, SignatureInput, SignatureOutput
from nerite.core.tensor import TensorSpec
from nerite.scheduling import ensemble
from nerite.scheduling.ensemble import GraphStep
from nerite.workers.child import fused
from nerite.workers.child.fused import FusedChain, FusedStep, chain_to_json

FIRST = RequestHeader("first", "", [TensorSpec("IN", dtypes.INT32, (1,))])


def step(number: int, model: str, taken: str, given: str) -> GraphStep:
    signature = Signature(
        model, 0, [SignatureInput("IN", dtypes.INT32, (-1,))], [SignatureOutput("OUT", dtypes.INT32, (-1,))]
    )
    return GraphStep(number, model, "", "", (("IN", taken),), (("OUT", given),), False, signature)


def chain() -> FusedChain:
    described = chain_to_json("e", step(0, "first", "x", "y"), [FusedStep(step(1, "second", "y", "z"), 1, "1", 0)])
    return FusedChain(json.loads(json.dumps(described)))


def answer(size: int, datatype: dtypes.DataType = dtypes.INT32) -> ResponseHeader:
    return ResponseHeader("first", "1", [TensorSpec("OUT", datatype, (size,))])


def test_equal_questions_are_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = ByteBudget("test", 64 * 1024)
    monkeypatch.setattr(fused, "ENSEMBLES", budget)
    follows = chain()
    for number in range(100):
        before = answer(number)
        progress = follows.begin(FIRST, before)
        (start,) = progress.starts
        assert start.header.inputs == (TensorSpec("IN", dtypes.INT32, (number,)),)
        assert follows.begin(FIRST, before) is progress
    assert budget.evictions > 60
    assert 0 < budget.used <= budget.limit


@pytest.mark.parametrize(("datatype", "shape"), [(dtypes.FP32, (1,)), (dtypes.INT32, (2, 1)), (dtypes.INT32, ())])
def test_what_does_not_fit_the_next_model_is_not_asked(datatype: dtypes.DataType, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument):
        chain().begin(FIRST, ResponseHeader("first", "1", [TensorSpec("OUT", datatype, shape)]))


def test_each_step_is_asked_for_the_caller_of_the_ensemble() -> None:
    acme = Caller("acme", "batch", 5)
    (start,) = chain().begin(FIRST.changed(caller=acme), answer(1)).starts
    assert start.header.caller == acme


def test_what_a_large_request_leads_to_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = ByteBudget("test", 1024 * 1024)
    monkeypatch.setattr(fused, "ENSEMBLES", budget)
    monkeypatch.setattr(ensemble, "ENSEMBLES", budget)
    follows, before = chain(), answer(1)
    large = RequestHeader("first", "", FIRST.inputs, parameters={"a": "x" * 200_000})
    progress = follows.begin(large, before)
    assert progress.starts[0].header.parameters == large.parameters
    progress.after(progress.starts[0].step, answer(1))
    assert budget.used == 0
