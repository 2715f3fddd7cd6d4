"""What a call inherits from the requests that it is made for."""

from __future__ import annotations

import pytest

from nerite.core import tensor as dtypes
from nerite.core.byte_budget import ByteBudget
from nerite.core.request import MIXED, NOBODY, Caller, InferenceRequest, RequestHeader
from nerite.core.tensor import TensorSpec
from nerite.workers.host import bls as module
from nerite.workers.host.bls import CallContext

MS = 1_000_000


def header(priority: int = 0, timeout_us: int = 0, caller: Caller | None = None) -> RequestHeader:
    spec = TensorSpec("IN", dtypes.FP32, (1,))
    return RequestHeader("called", "2", [spec], priority=priority, timeout_us=timeout_us, sequence_id=4, caller=caller)


def parent(
    priority: int = 0, timeout_us: int = 0, arrived_ns: int = 0, caller: Caller | None = None
) -> InferenceRequest:
    return InferenceRequest(header(priority, timeout_us, caller), [], NOBODY, arrived_ns)


def test_nothing_to_inherit() -> None:
    own = header()
    assert CallContext().header(own, [parent(), parent()], MS) is own


def test_the_highest_priority() -> None:
    inheritance, own = CallContext(), header()
    made = inheritance.header(own, [parent(), parent(priority=3), parent(priority=2)], MS)
    assert made.priority == 2
    assert (made.model_name, made.model_version, made.inputs, made.sequence_id) == ("called", "2", own.inputs, 4)
    assert inheritance.header(own, [parent(priority=2)], 5 * MS) is made


def test_what_is_remembered_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = ByteBudget("test", 64 * 1024)
    monkeypatch.setattr(module, "MODEL_CALLS", budget)
    inheritance = CallContext()
    for number in range(100):
        own = header()
        made = inheritance.header(own, [parent(priority=1 + number)], MS)
        assert made.priority == 1 + number
        assert inheritance.header(own, [parent(priority=1 + number)], MS) is made
    assert 0 < budget.used <= budget.limit
    before = budget.used
    assert inheritance.header(header(), [parent(timeout_us=5000)], MS).timeout_us == 4000
    assert budget.used == before, "what is left of a timeout does not come again"


def test_what_is_left_of_the_longest_timeout() -> None:
    parents = [parent(timeout_us=5000, arrived_ns=MS), parent(timeout_us=7000)]
    assert CallContext().header(header(), parents, 2 * MS).timeout_us == 5000
    assert CallContext().header(header(), parents[:1], 2 * MS).timeout_us == 4000


def test_no_timeout_if_one_of_them_has_none() -> None:
    own = header()
    assert CallContext().header(own, [parent(timeout_us=5000), parent()], MS) is own


def test_a_timeout_that_is_over() -> None:
    assert CallContext().header(header(), [parent(timeout_us=5000)], 100 * MS).timeout_us == 1


def test_what_it_says_itself_counts_more() -> None:
    own = header(priority=5, timeout_us=9)
    assert CallContext().header(own, [parent(priority=1, timeout_us=1000)], 0) is own


ACME, RETRYING, OTHER = Caller("acme", "batch", 5), Caller("acme", retry=True), Caller("other")


@pytest.mark.parametrize(
    ("parents", "expected"),
    [
        ([ACME], Caller("acme")),
        ([ACME, RETRYING], Caller("acme")),
        ([None, ACME], Caller("acme")),
        ([ACME, OTHER], MIXED),
        ([OTHER, MIXED], MIXED),
        ([MIXED], MIXED),
        ([], MIXED),
        ([None], None),
    ],
)
def test_the_tenant_that_all_have_in_common(parents: list[Caller | None], expected: Caller | None) -> None:
    """Requests without one are the server's own, such as those that warm a model up."""
    inheritance, own = CallContext(tenants=True), header()
    made = inheritance.header(own, [parent(caller=caller) for caller in parents], 0)
    assert made.caller == expected
    assert (made is own) is (expected is None)
    assert inheritance.header(own, [parent(caller=caller) for caller in parents], 0) is made


def test_nothing_tells_tenants_apart_without_a_policy() -> None:
    own = header()
    assert CallContext().header(own, [], 0) is own
