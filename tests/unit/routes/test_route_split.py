"""Which arm a request goes to: weights, keys, sequences, readiness, and what a header says afterwards."""

from __future__ import annotations

import gc
import weakref
from random import Random
from typing import Any

import pytest
from arms import Entry, head, refusal

from doubles import Caller as Sink
from nerite.core.errors import InvalidArgument, NotLoaded, Unavailable
from nerite.core.model_calls import CallRequest
from nerite.core.request import Assignment, Caller, IdempotencyKey, InferenceRequest, RequestHeader
from nerite.routes.split import RouteSplit
from nerite.routes.table import RouteState
from nerite.scheduling.weighted_route import RouteArm, WeightedRoute


def users(key: str, count: int = 40) -> list[dict[str, Any]]:
    """Fields of headers with different values of a sticky key."""
    fields = {
        "header": lambda n: {"sticky_fields": {"x-user": f"u{n}"}},
        "parameter": lambda n: {"parameters": {"who": n}},
        "user": lambda n: {"parameters": {"user": f"u{n}"}},
        "tenant": lambda n: {"caller": Caller(f"t{n}")},
        "idempotency-key": lambda n: {"idempotency_key": IdempotencyKey(f"k{n}")},
        "sequence": lambda n: {"sequence_id": n + 1},
    }[key]
    return [fields(n) for n in range(count)]


def test_requests_are_divided_by_weight_and_get_the_header_of_their_arm() -> None:
    entry, header = Entry(), head()
    entry.route(75, 25)
    got = entry.arms(header, 4000)
    assert abs(got["2"] / 4000 - 0.25) < 0.05
    request = entry.versions["m", "2"].requests[0]
    assert request.header.model_version == "2"
    assert request.header.assignment == Assignment("m", "m:2", True, 0.25)
    assert entry.went_to(request) is entry.versions["m", "2"]
    assert request.header.batch_size == 1
    assert header.model_version == ""
    assert {arm: each.requests for arm, each in entry.routes.counters("m").items()} == {
        "m:1": got["1"],
        "m:2": got["2"],
    }


def test_a_header_that_repeats_is_one_header_for_each_arm() -> None:
    entry = Entry()
    entry.route(1, 1)
    entry.arms(header := head(), 100)
    assert len({id(each.header) for version in entry.versions.values() for each in version.requests}) == 2
    entry.arms(header, 100)
    assert len({id(each.header) for version in entry.versions.values() for each in version.requests}) == 2


def test_a_request_is_answered_whatever_fails_while_its_version_is_found() -> None:
    class Broken(Entry):
        def _running(self, model: str, version: str, namespace: str) -> Any:
            raise ZeroDivisionError

    assert "internal error" in str(refusal(Broken().ask(head())))


def test_a_request_that_names_a_version_gets_that_version() -> None:
    entry = Entry()
    entry.route(0, 1)
    assert entry.arms(head(version="1"), 10) == {"1": 10, "2": 0}
    assert entry.versions["m", "1"].requests[0].header.assignment is None


def test_a_model_without_a_route_is_left_alone() -> None:
    entry = Entry("m", "other")
    entry.route(1, 1)
    header = head("other")
    entry.ask(header)
    assert entry.versions["other", "2"].requests[0].header is header


@pytest.mark.parametrize("key", ["header", "parameter", "user", "tenant", "idempotency-key", "sequence"])
def test_a_key_stays_on_its_arm_and_all_replicas_agree(key: str) -> None:
    replicas = [Entry() for _ in range(3)]
    text = {"header": "header:x-user", "parameter": "parameter:who"}.get(key, key)
    for entry in replicas:
        entry.route(50, 50, sticky=() if key == "sequence" else (text,))
    found = []
    for fields in users(key):
        arms = {entry.arm(head(**fields)) for entry in replicas for _ in range(3)}
        assert len(arms) == 1
        found += arms
    assert set(found) == {"1", "2"}


@pytest.mark.parametrize("key", ["header", "idempotency-key"])
def test_a_change_of_weights_moves_keys_to_the_arm_that_gains_only(key: str) -> None:
    entry = Entry()
    entry.route(90, 10, sticky=("header:x-user",))
    before = [entry.arm(head(**fields)) for fields in users(key, 400)]
    entry.route(75, 25, sticky=("header:x-user",))
    after = [entry.arm(head(**fields)) for fields in users(key, 400)]
    assert {(old, new) for old, new in zip(before, after, strict=True) if old != new} == {("1", "2")}


def test_a_prompt_that_begins_alike_stays_on_its_arm() -> None:
    entry, header = Entry(), head()
    entry.route(50, 50, sticky=("prompt:8",))
    found = {prompt: {entry.arm(header, prompt + bytes([n])) for n in range(5)} for prompt in
             (b"prompt %d" % n for n in range(10, 40))}  # fmt: skip
    assert all(len(arms) == 1 for arms in found.values())
    assert set.union(*found.values()) == {"1", "2"}


def test_the_first_key_that_a_request_has_counts() -> None:
    entry = Entry()
    entry.route(50, 50, sticky=("header:x-user", "parameter:who"))
    fields = {"sticky_fields": {"x-user": "bob"}}
    assert len({entry.arm(head(parameters={"who": n}, **fields)) for n in range(30)}) == 1
    assert len({entry.arm(head(parameters={"who": n})) for n in range(30)}) == 2


def test_a_sequence_stays_on_its_arm_when_weights_change_until_it_ends() -> None:
    entry = Entry()
    entry.route(1, 0)
    begun = [entry.arm(head(sequence_id=n, sequence_start=True)) for n in range(1, 30)]
    entry.route(0, 1)
    assert [entry.arm(head(sequence_id=n)) for n in range(1, 30)] == begun == ["1"] * 29
    assert entry.arm(head(sequence_id=7, sequence_end=True)) == "1"
    assert entry.arm(head(sequence_id=7, sequence_start=True)) == "2"
    assert entry.arm(head(sequence_id=8, sequence_start=True)) == "2"


def test_the_sequence_of_one_tenant_does_not_move_that_of_another() -> None:
    entry = Entry()
    entry.route(1, 0)
    alice, bob = Caller("alice"), Caller("bob")
    assert entry.arm(head(sequence_id=7, sequence_start=True, caller=alice)) == "1"
    entry.route(0, 1)
    assert entry.arm(head(sequence_id=7, sequence_start=True, caller=bob)) == "2"
    assert entry.arm(head(sequence_id=7, sequence_end=True)) == "2"
    assert entry.arm(head(sequence_id=7, caller=alice)) == "1"


def test_a_sequence_whose_arm_is_gone_goes_where_it_is_told_that_it_has_not_begun() -> None:
    entry = Entry()
    entry.route(1, 0)
    entry.ask(head(sequence_id=1, sequence_start=True))
    entry.route(1, 1)
    entry.unload("m", "1")
    assert entry.arm(head(sequence_id=1)) == "2"


def test_an_arm_that_is_not_ready_gets_nothing() -> None:
    entry, header = Entry(), head()
    entry.route(90, 10)
    entry.versions["m", "1"].usable = False
    entry.renew_routes()
    assert entry.arms(header, 50) == {"1": 0, "2": 50}
    assert entry.versions["m", "2"].requests[0].header.assignment == Assignment("m", "m:2", True, 1.0)
    entry.versions["m", "1"].usable = True
    entry.renew_routes()
    assert entry.arms(header, 200)["1"] > 100


def test_without_any_instance_requests_wait_on_the_arms_that_run() -> None:
    entry = Entry()
    entry.route(90, 10)
    for version in entry.versions.values():
        version.usable = False
    entry.unload("m", "1")
    assert entry.arms(head(), 10) == {"2": 10}


def test_without_any_arm_a_request_is_refused_with_the_reasons() -> None:
    entry = Entry()
    entry.route(1, 1)
    for number in "12":
        entry.unload("m", number)
    error = refusal(entry.ask(head()))
    assert isinstance(error, Unavailable)
    assert error.message == "route 'm' has no arm that is ready: m:1 (no m:1); m:2 (no m:2)"


def test_what_an_arm_does_not_take_is_refused_by_that_arm_alone() -> None:
    entry = Entry()
    entry.route(1, 1, sticky=("header:x-user",))
    entry.versions["m", "2"].signature.inputs.clear()
    for fields in users("header"):
        request = entry.ask(head(**fields))
        assignment = request.header.assignment
        assert assignment is not None
        if assignment.candidate:
            assert isinstance(refusal(request), InvalidArgument)
        else:
            assert request in entry.versions["m", "1"].requests


def test_models_behind_a_name_of_its_own() -> None:
    entry = Entry("v1", "v2")
    entry.routes.put(WeightedRoute("scorer", (RouteArm("v1", "", 1), RouteArm("v2", "", 1))))
    for _ in range(100):
        entry.ask(head("scorer"))
    names = {name: len(version.requests) for (name, _), version in entry.versions.items()}
    assert set(names.values()) != {0}
    assert {each.header.model_name for each in entry.versions["v1", "2"].requests} == {"v1"}


def test_a_removed_route_is_forgotten() -> None:
    entry, header = Entry(), head()
    entry.route(1, 0)
    assert entry.arms(header, 5) == {"1": 5, "2": 0}
    entry.routes.remove("m")
    assert entry.arms(header, 5) == {"1": 0, "2": 5}
    assert entry.routes.get("m") is None
    assert entry.changes == 2


def test_a_call_of_a_model_has_the_key_of_the_client() -> None:
    entry = Entry()
    entry.route(50, 50, sticky=("header:x-user",))
    header = head()
    for fields in users("header"):
        parent = entry.ask(head(**fields))
        (version,) = {parent.header.model_version}
        for _ in range(3):
            call = CallRequest(parent, header, parent.data, Sink(), 0)
            entry.infer(call, "")
            assert call.header.model_version == version


def test_a_front_assigns_and_the_core_keeps_to_it() -> None:
    front, core = Entry(owns=False), Entry()
    for entry in (front, core):
        entry.route(50, 50)
    for _ in range(30):
        sent = front.ask(head())
        arrived = InferenceRequest(sent.header.readdressed("m", sent.header.model_version, sent.header.assignment),
                                   sent.data, Sink(), 0)  # fmt: skip
        core.infer_assigned([arrived])
        assert arrived.header.model_version == sent.header.model_version
        assert arrived in core.versions["m", sent.header.model_version].requests


def test_the_core_keeps_a_sequence_where_it_began_whatever_a_front_says() -> None:
    core = Entry()
    core.route(1, 1)
    core.infer_assigned([assigned("m:1", sequence_id=5, sequence_start=True)])
    core.route(0, 1)
    core.infer_assigned([request := assigned("m:2", sequence_id=5)])
    assert request in core.versions["m", "1"].requests
    assert request.header.assignment is not None
    assert not request.header.assignment.candidate


def test_the_core_does_not_keep_to_an_arm_that_is_gone() -> None:
    core = Entry()
    core.route(1, 1)
    core.unload("m", "2")
    core.infer_assigned([request := assigned("m:2")])
    assert request in core.versions["m", "1"].requests
    assert request.header.assignment == Assignment("m", "m:2", True, 0.5)


def assigned(arm: str, **fields: Any) -> InferenceRequest:
    """A request that a front has assigned."""
    header = head(version=arm[-1], assignment=Assignment("m", arm, arm == "m:2", 0.5), **fields)
    return InferenceRequest(header, [b"\5\0\0\0hello"], Sink(), 0)


def test_a_call_is_assigned_before_its_requests_are_made() -> None:
    entry = Entry()
    entry.route(50, 50, sticky=("user", "prompt:4"))
    for n in range(20):
        probe = InferenceRequest(RequestHeader("m", "", head().inputs, parameters={"user": n}), [b""], Sink(), 0)
        version, model, number, assignment = entry.assign(probe)
        assert entry.assign(probe) == (version, model, number, assignment)
        assert assignment.cluster
        request = InferenceRequest(head(model, number, assignment=assignment), [b"\1\0\0\0a"], Sink(), 0)
        entry.infer(request)
        assert request in entry.versions["m", version.label].requests


def test_the_error_of_a_route_without_a_loaded_arm_is_freed_when_it_was_told() -> None:
    def find(model: str, version: str) -> Any:
        raise NotLoaded.of(model)

    route = WeightedRoute("m", (RouteArm("m", "1", 1), RouteArm("m", "2", 1)))
    gc.disable()
    try:
        with pytest.raises(NotLoaded) as caught:
            RouteSplit(RouteState(route), find, object(), Random(), owns=True)
        error = weakref.ref(caught.value)
        del caught
        assert error() is None, "it is kept by its own traceback"
    finally:
        gc.enable()
