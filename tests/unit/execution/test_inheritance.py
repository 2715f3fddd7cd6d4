"""What a call inherits from the requests that it is made for."""

from __future__ import annotations

from nerite.core import dtype as dtypes
from nerite.core.request import NOBODY, InferenceRequest, RequestHeader
from nerite.core.tensor import TensorSpec
from nerite.execution.inheritance import Inheritance

MS = 1_000_000


def header(priority: int = 0, timeout_us: int = 0) -> RequestHeader:
    spec = TensorSpec("IN", dtypes.FP32, (1,))
    return RequestHeader("called", "2", [spec], priority=priority, timeout_us=timeout_us, sequence_id=4)


def parent(priority: int = 0, timeout_us: int = 0, arrived_ns: int = 0) -> InferenceRequest:
    return InferenceRequest(header(priority, timeout_us), [], NOBODY, arrived_ns)


def test_nothing_to_inherit() -> None:
    own = header()
    assert Inheritance().header(own, [parent(), parent()], MS) is own


def test_the_highest_priority() -> None:
    inheritance, own = Inheritance(), header()
    made = inheritance.header(own, [parent(), parent(priority=3), parent(priority=2)], MS)
    assert made.priority == 2
    assert (made.model_name, made.model_version, made.inputs, made.sequence_id) == ("called", "2", own.inputs, 4)
    assert inheritance.header(own, [parent(priority=2)], 5 * MS) is made


def test_what_is_left_of_the_longest_timeout() -> None:
    parents = [parent(timeout_us=5000, arrived_ns=MS), parent(timeout_us=7000)]
    assert Inheritance().header(header(), parents, 2 * MS).timeout_us == 5000
    assert Inheritance().header(header(), parents[:1], 2 * MS).timeout_us == 4000


def test_no_timeout_if_one_of_them_has_none() -> None:
    own = header()
    assert Inheritance().header(own, [parent(timeout_us=5000), parent()], MS) is own


def test_a_timeout_that_is_over() -> None:
    assert Inheritance().header(header(), [parent(timeout_us=5000)], 100 * MS).timeout_us == 1


def test_what_it_says_itself_counts_more() -> None:
    own = header(priority=5, timeout_us=9)
    assert Inheritance().header(own, [parent(priority=1, timeout_us=1000)], 0) is own
