"""Requests for stored responses go to the member that keeps them, by the tag in their ids."""

from __future__ import annotations

import pytest
from pools import drain, load_of, members, picked, pool

from nerite.balancing.member import RoutedRequest
from nerite.balancing.response_ids import checked_tag, member_tag, new_response_id, tag_in
from nerite.core.errors import InvalidArgument


def kept_by(name: str, model: str = "") -> RoutedRequest:
    return RoutedRequest(model, stored_at=tag_in(new_response_id(member_tag(name))))


def test_ids() -> None:
    tag = member_tag("127.0.0.1:8000")
    assert tag == checked_tag(tag) == tag_in(new_response_id(tag))
    assert tag != member_tag("127.0.0.1:8001")
    assert len(new_response_id(tag)) == len(new_response_id())
    assert new_response_id(tag) != new_response_id(tag)


@pytest.mark.parametrize("name", ["", "resp_", "resp_12345", "chatcmpl-0123456789abcdef", "resp_0123456G"])
def test_ids_of_others(name: str) -> None:
    assert tag_in(name) == ""


@pytest.mark.parametrize("tag", ["x", "0123456", "012345678", "0123456G", "0123456\n"])
def test_a_tag_that_is_none(tag: str) -> None:
    with pytest.raises(InvalidArgument, match="8 hexadecimal digits"):
        checked_tag(tag)


def test_a_busy_or_draining_member_still_answers_for_what_it_keeps() -> None:
    balancer = pool(3)
    for _ in range(5):
        balancer.begin(RoutedRequest("m", answer_tokens=100.0), load_of(balancer, "m1").member, 0)
    drain(balancer, "m1")
    found = picked(balancer, kept_by("m1", "m"))
    assert (found.member.name, found.reason) == ("m1", "stored")
    assert balancer.keeps(kept_by("m1"))


def test_another_member_is_asked_if_that_one_cannot_answer() -> None:
    balancer = pool(3)
    request = kept_by("m1", "m")
    assert picked(balancer, request, tried=("m1",)).member.name != "m1"
    assert picked(balancer, request, subset=("m2",)).member.name == "m2"
    balancer.set_ready("m1", True, ("other",))
    assert picked(balancer, request).member.name != "m1", "it does not serve the model any more"
    balancer.set_ready("m1", False)
    assert not balancer.keeps(kept_by("m1"))
    balancer.set_members(members(1))
    assert picked(balancer, request).member.name == "m0"
