"""Members out of EndpointSlices: who serves, who drains, and at which ports."""

from __future__ import annotations

from typing import Any

import pytest

from kubernetes_objects import endpoint, endpoint_slice
from nerite.balancing.member import Member, ServerKind
from nerite.cluster.kubernetes_names import ServiceReference
from nerite.kubernetes.endpoint_slices import FoundMembers, members_of_slices

SERVICE = ServiceReference("default", "models", "http")


def found(*slices: dict[str, Any], port: str = "http", grpc_port: int = 0, metrics_port: int = 0) -> FoundMembers:
    return members_of_slices(slices, SERVICE._replace(port=port), ServerKind.NERITE, grpc_port, metrics_port)


def test_pods_that_serve_are_members_and_those_that_terminate_drain() -> None:
    members, problem = found(
        endpoint_slice(
            endpoint("10.0.0.1", "a"),
            endpoint("10.0.0.2", "b", ready=False, serving=True, terminating=True),
            endpoint("10.0.0.3", "starting", ready=False, serving=False),
            endpoint("10.0.0.4", "ended", ready=False, serving=False, terminating=True),
            endpoint("10.0.0.5", "unknown", ready=None),
            endpoint("10.0.0.6", "old", ready=False),
        )
    )
    assert problem == ""
    assert members == (
        Member("default/a", "10.0.0.1:8000", "10.0.0.1:8001"),
        Member("default/b", "10.0.0.2:8000", "10.0.0.2:8001", drain=True),
        Member("default/unknown", "10.0.0.5:8000", "10.0.0.5:8001"),
    )


@pytest.mark.parametrize(
    ("port", "grpc_port", "http", "grpc"),
    [
        ("http", 0, "10.0.0.1:8000", "10.0.0.1:8001"),
        ("8002", 0, "10.0.0.1:8002", "10.0.0.1:8001"),
        ("metrics", 9, "10.0.0.1:8002", "10.0.0.1:9"),
    ],
)
def test_ports_by_name_and_by_number(port: str, grpc_port: int, http: str, grpc: str) -> None:
    (member,) = found(endpoint_slice(endpoint("10.0.0.1", "a")), port=port, grpc_port=grpc_port).members
    assert (member.http, member.grpc) == (http, grpc)


def test_metrics_are_at_the_port_of_the_pool() -> None:
    (member,) = found(endpoint_slice(endpoint("10.0.0.1", "a")), metrics_port=8002).members
    assert member.metrics == "10.0.0.1:8002"


def test_a_service_without_a_port_for_grpc_has_members_without_one() -> None:
    (member,) = found(endpoint_slice(endpoint("10.0.0.1"), ports={"http": 80})).members
    assert member == Member("10.0.0.1:80".rpartition(":")[0], "10.0.0.1:80")


def test_a_wrong_port_is_told_with_those_that_there_are() -> None:
    members, problem = found(endpoint_slice(endpoint("10.0.0.1", "a"), ports={"web": 80}))
    assert members == ()
    assert problem == "has no port 'http', but web (80): correct the port in the cluster file"


def test_a_pod_of_two_slices_is_one_member() -> None:
    four = endpoint_slice(endpoint("10.0.0.1", "a"), name="x")
    six = endpoint_slice(endpoint("fd00::1", "a"), endpoint("fd00::2", "b"), name="a", family="IPv6")
    names = endpoint_slice(endpoint("a.example", "c"), name="0", family="FQDN")
    members = found(six, four, names).members
    assert [member.http for member in members] == ["10.0.0.1:8000", "[fd00::2]:8000"]
    assert members == found(four, six).members


def test_the_capacity_stands_in_an_annotation_of_the_slice() -> None:
    large = endpoint_slice(endpoint("10.0.0.1", "a"), name="large", annotations={"nerite/capacity": "2.5"})
    wrong = endpoint_slice(endpoint("10.0.0.2", "b"), name="wrong", annotations={"nerite/capacity": "many"})
    members, problem = found(large, wrong)
    assert [(member.name, member.capacity) for member in members] == [("default/a", 2.5)]
    assert problem == (
        "has an endpoint 'default/b' that capacity must be a number greater than 0, as in capacity = 2.0"
    )


@pytest.mark.parametrize(
    "change", [{"endpoints": None}, {"ports": None}, {"endpoints": [None, {}, {"addresses": []}, {"addresses": [3]}]}]
)
def test_what_is_missing_is_passed_over(change: dict[str, Any]) -> None:
    assert found(endpoint_slice(endpoint("10.0.0.1")) | change).members == ()
