"""What follows in a worker: the same question for the same headers, as long as there is room to remember it."""

from __future__ import annotations

import json

import pytest

from nerite.core import tensor as dtypes
from nerite.core.byte_budget import ByteBudget
from nerite.core.request import RequestHeader
from nerite.core.response import ResponseHeader
from nerite.core.signature import Signature, SignatureInput, SignatureOutput
from nerite.core.tensor import TensorSpec
from nerite.scheduling import fused_steps
from nerite.scheduling.fused_steps import FusedLink, TensorSource
from nerite.workers.child import fused
from nerite.workers.child.fused import FusedHop

FIRST = RequestHeader("first", "", [TensorSpec("IN", dtypes.INT32, (1,))])


def hop() -> FusedHop:
    signature = Signature(
        "second", 0, [SignatureInput("IN", dtypes.INT32, (-1,))], [SignatureOutput("OUT", dtypes.INT32, (-1,))]
    )
    link = FusedLink("e", 1, "", "", signature, (TensorSource("IN", "OUT", True),), ("OUT",), False, False)
    described = json.loads(json.dumps(fused_steps.link_to_json(link)))
    return FusedHop({"link": described, "seat": 1, "version": "1", "most": 0})


def answer(size: int, datatype: dtypes.DataType = dtypes.INT32) -> ResponseHeader:
    return ResponseHeader("first", "1", [TensorSpec("OUT", datatype, (size,))])


def test_equal_questions_are_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = ByteBudget("test", 64 * 1024)
    monkeypatch.setattr(fused, "ENSEMBLES", budget)
    follows = hop()
    for number in range(100):
        before = answer(number)
        question = follows.question(FIRST, before)
        assert question is not None and question.header.inputs == (TensorSpec("IN", dtypes.INT32, (number,)),)
        assert follows.question(FIRST, before) is question
    assert 0 < len(follows._questions) < 20
    assert 0 < budget.used <= budget.limit


def test_what_does_not_fit_is_remembered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = ByteBudget("test", 64 * 1024)
    monkeypatch.setattr(fused, "ENSEMBLES", budget)
    follows, before = hop(), answer(1, dtypes.FP32)
    assert follows.question(FIRST, before) is follows.question(FIRST, before) is None
    assert len(follows._questions) == 1


def test_what_a_large_request_leads_to_is_not_remembered() -> None:
    follows, before = hop(), answer(1)
    large = RequestHeader("first", "", FIRST.inputs, parameters={"a": "x" * 200_000})
    one, other = follows.question(large, before), follows.question(large, before)
    assert one is not None and other is not None and one.header.parameters == large.parameters
    assert not follows._questions
