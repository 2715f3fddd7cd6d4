"""What the router makes of heads: which requests are passed on, and with which bytes."""

from __future__ import annotations

import pytest

from nerite.core.request import Caller
from nerite.router.http_targets import BodyKind, HttpTargets, RouteTarget
from nerite.transports.http.head import RequestHead, parse_head
from nerite.transports.http.item_exchange import item_head
from nerite.transports.http.origins import BrowserGuard

ADDED = "/v1/images/edits"
TARGETS = HttpTargets(BrowserGuard((), None), (), 1 << 20, paths=[ADDED])


def target(path: str, method: str = "POST", *lines: str) -> RouteTarget:
    raw = "\r\n".join((f"{method} {path} HTTP/1.1", "Host: a", *lines, "", ""))
    return TARGETS.of(parse_head(raw.encode("latin-1")))


def status(found: RouteTarget) -> int:
    return 200 if found.refusal is None else found.refusal.status


@pytest.mark.parametrize(
    "path",
    ["/v1//load_lora_adapter", "/v1/../v2/repository/models/x/load", "/v1/x/../../v2", "/v1/.%2e/v2", "/v1/a%2f..%2fb",
     "/v1/completions/", "/v1/%5c..", "/v1/completions%00", "/v1/completions%0d%0aX:%201", "/v2/models/a%2Fb/infer",
     "/v2/models/../infer", "/v2/./models/m/infer", "//v1/completions"],
)  # fmt: skip
def test_a_path_that_members_may_read_otherwise_is_refused(path: str) -> None:
    assert status(target(path)) == 400
    assert status(target(path, "GET")) == 400


@pytest.mark.parametrize("path", ["/v1/anything", "/v1/load_lora_adapter", "/v1/models/m/load", "/v1/images/editsx"])
def test_other_paths_under_v1_are_not_passed_on(path: str) -> None:
    assert target(path).refusal is not None


def test_a_path_that_the_cluster_file_adds() -> None:
    found = target(ADDED + "?n=1")
    assert found.kind is BodyKind.OPENAI and found.start == b"POST /v1/images/edits?n=1 HTTP/1.1\r\n"
    assert status(target(ADDED, "GET")) == 404


@pytest.mark.parametrize(
    ("path", "method", "model"),
    [
        ("/v2/models/a%20b/infer", "POST", "a%20b"),
        ("/v2/models/m.1/versions/3/infer", "POST", "m.1"),
        ("/v1/models/org%2Fname", "GET", "org/name"),
        ("/v1/models/caf%C3%A9", "GET", "café"),
    ],
)
def test_names_with_encoded_characters(path: str, method: str, model: str) -> None:
    found = target(path, method)
    assert found.refusal is None and found.model == model
    assert found.start == f"{method} {path} HTTP/1.1\r\n".encode()


@pytest.mark.parametrize("path", ["/v1/models/..%2f..%2fv2", "/v1/models/a%2f%2fb", "/v1/models/%2fa"])
def test_encoded_slashes_lead_nowhere(path: str) -> None:
    assert status(target(path, "GET")) == 400


@pytest.mark.parametrize(
    "url",
    ["/v2/models/zz ABC\r\nX-Nerite-Tenant: bob\r\n\r\n/infer", "/v2/models/a b/infer", "/v2/models/a#/infer",
     "/v1/completions HTTP/1.1"],
)  # fmt: skip
def test_the_url_of_an_item_adds_no_header(url: str) -> None:
    head = item_head(url, 10)
    head.caller = Caller("alice", "", trusted=True)
    assert status(TARGETS.of(head)) == 400


def test_a_query_adds_no_header() -> None:
    head = RequestHead()
    head.method, head.path, head.query = "POST", "/v1/completions", "a=b HTTP/1.1\r\nX: 1"
    assert status(TARGETS.of(head)) == 400


def test_a_header_adds_no_other() -> None:
    head = RequestHead()
    head.method, head.path = "POST", "/v1/completions"
    head.fields = [("X-One", "1\r\nX-Two: 2")]
    assert status(TARGETS.of(head)) == 400
