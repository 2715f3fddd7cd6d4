"""Who asks, by the headers that come."""

from __future__ import annotations

import re

import pytest

from nerite.admission.policy import parse_policy
from nerite.core.errors import InvalidArgument, Restricted
from nerite.core.request import Caller
from nerite.transports.access import AccessKeys, Callers, forwarded, header_text, identity, texts

POLICY = parse_policy(
    """
header = "X-Tenant"
[tenants.acme]
keys = ["secret"]
header_values = ["acme"]
[tenants.other]
header_values = ["other"]
"""
)


def caller(timeout: float | None = None, **headers: str) -> Caller:
    found = {name.replace("_", "-"): value for name, value in headers.items()}
    return Callers(lambda: POLICY).of(found.get, timeout)


def test_tenants() -> None:
    assert caller() == Caller("default")
    for key in ("Bearer secret", "bearer  secret", "secret"):
        assert caller(authorization=key).tenant == "acme"
    assert caller(x_api_key="secret").tenant == "acme"
    assert caller(x_tenant="other").tenant == "other"
    assert caller(authorization="Bearer secret", x_tenant="other").tenant == "acme", "a key says more"
    assert caller(authorization="Bearer wrong", x_tenant="other").tenant == "other"
    assert caller(authorization="Bearer acme").tenant == "default"


def test_classes_and_retries() -> None:
    assert caller(x_nerite_class="batch").wanted_class == "batch"
    for name in ("x_stainless_retry_count", "grpc_previous_rpc_attempts"):
        assert caller(**{name: "1"}).retry
        for none in ("0", "", "x", "-1"):
            assert not caller(**{name: none}).retry
    assert caller(x_stainless_retry_count="9" * 5_000).retry
    assert caller(x_envoy_attempt_count="2").retry
    assert not caller(x_envoy_attempt_count="1").retry, "that is the first"


@pytest.mark.parametrize(
    ("timeout", "headers", "patience"),
    [
        (5.0, {}, 5_000_000_000),
        (4.9991234, {}, 5_000_000_000),
        (4.91, {}, 5_000_000_000),
        (0.0123456, {}, 13_000_000),
        (3e-9, {}, 3),
        (0.0, {}, 1),
        (None, {"x_nerite_timeout_ms": "250"}, 250_000_000),
        (None, {"x_envoy_expected_rq_timeout_ms": "15000"}, 15_000_000_000),
        (9.0, {"x_nerite_timeout_ms": "0.5"}, 500_000),
        (None, {"x_nerite_timeout_ms": "1e305"}, 10**18),
        (None, {}, 0),
    ],
)
def test_patience(timeout: float | None, headers: dict[str, str], patience: int) -> None:
    """Two digits count, and nobody is thought to be less patient than they say."""
    assert caller(timeout, **headers).patience_ns == patience


@pytest.mark.parametrize("value", ["soon", "0", "-5", "nan", "inf", ""])
def test_no_patience(value: str) -> None:
    with pytest.raises(InvalidArgument, match=r"x-nerite-timeout-ms.*positive number of milliseconds"):
        caller(x_nerite_timeout_ms=value)


def test_headers_that_are_used_are_text() -> None:
    headers = {"x-tenant": "gr\udcfcn", "idempotency-key": "k" * 2_000}
    get = texts(headers.get)
    assert get("none") is None
    assert get("idempotency-key") == "k" * 2_000
    with pytest.raises(InvalidArgument, match="header 'x-tenant' is not valid UTF-8 at character 2"):
        get("x-tenant")
    with pytest.raises(InvalidArgument, match="the name of a header is 2000 characters long"):
        header_text("n" * 2_000, "")


def test_headers_that_are_forwarded() -> None:
    fields = [("X-User", "ann"), ("Other", "x"), ("x-user", "bob"), ("X-User", "eve")]
    assert forwarded(fields, None) == {}
    assert forwarded(fields, re.compile("(?i)x-")) == {"X-User": "eve", "x-user": "bob"}


@pytest.mark.parametrize(
    "name",
    [
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "priority",
        "timeout",
        "headers",
        "binary_data_output",
        "triton_x",
    ],
)
def test_headers_under_a_reserved_name(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^Header '{name}' is reserved for Triton usage and cannot be forwarded"):
        forwarded([("a", "b"), (name, "c")], re.compile(""))
    assert forwarded([(name, "c")], re.compile("other")) == {}
    assert forwarded([(name.upper(), "c")], re.compile("")) == {name.upper(): "c"}


def test_what_routers_say_is_believed_of_them_alone() -> None:
    believes = Callers(lambda: POLICY, AccessKeys([b"a-secret"]))
    for paid in (False, True):
        told = dict(identity("a-secret", Caller("acme", paid=paid)))
        assert believes.of(told.get) == Caller("acme", trusted=True, paid=paid)
        assert Callers(lambda: POLICY).of(told.get) == Caller("default"), "a server without keys of routers"
    assert identity("", Caller("acme", paid=True)) == []
    for forged in ({"x-nerite-paid": "1"}, {"x-nerite-paid": "1", "x-nerite-router-key": "guess"}):
        with pytest.raises(Restricted, match="--router-key-file"):
            believes.of(forged.get)
    assert not believes.of({"authorization": "secret"}.get).trusted
