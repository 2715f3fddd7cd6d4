"""The list of differences is well formed, and the page made from it is up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.compare import same, told
from conformance.differences import brief, by_exchange, page
from conformance.topics import topics

PAGE = Path(__file__).parents[2] / "docs" / "differences.md"


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run tools/build_differences.py"


def test_every_entry_names_an_exchange() -> None:
    known = {f"{topic.name}/{name}" for topic in topics() for name in topic.exchanges}
    assert {exchange.partition("#")[0] for exchange in by_exchange()} <= known


def test_names_of_scenes_differ() -> None:
    scenes = {topic.scene for topic in topics()}
    assert len({scene.name for scene in scenes}) == len(scenes)


def http(status: int, error: str) -> dict[str, object]:
    return {"status": status, "headers": {"content-type": "application/json"}, "json": {"error": error}}


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (http(400, "no such model"), True),
        (http(400, "no such model Load it first."), True),
        (http(400, "no such model\nLoad it first."), True),
        (http(400, "no such models"), False),
        (http(400, "no such"), False),
        (http(404, "no such model"), False),
        ({**http(400, "no such model"), "headers": {}}, False),
        ({**http(400, "no such model"), "json": {"error": "no such model", "code": 1}}, False),
    ],
)
def test_a_remedy_may_follow_the_text_of_an_error(ours: dict[str, object], expected: bool) -> None:
    assert same(http(400, "no such model"), ours) is expected


def test_a_remedy_may_follow_over_grpc() -> None:
    theirs = {"code": "NOT_FOUND", "details": "gone"}
    assert same(theirs, {"code": "NOT_FOUND", "details": "gone. Load it."}) is False
    assert same(theirs, {"code": "NOT_FOUND", "details": "gone Load it."}) is True
    assert same(theirs, {"code": "INTERNAL", "details": "gone"}) is False


def test_told() -> None:
    theirs = {"status": 400, "headers": {}, "json": {"error": "gone", "more": [1, {"a": 2}]}}
    ours = {"status": 500, "headers": {}, "json": {"error": "gone", "more": [1, {"a": 3}]}, "tail": "00"}
    assert told(theirs, ours).splitlines() == [
        "status",
        "  Triton  400",
        "  Nerite  500",
        "json.more[1].a",
        "  Triton  2",
        "  Nerite  3",
        "tail",
        "  Triton  null",
        '  Nerite  "00"',
    ]


def test_told_leaves_out_a_remedy() -> None:
    assert told(http(400, "gone"), http(400, "gone Load it.")) == ""


def test_brief() -> None:
    assert brief(http(400, "wrong")) == "400 wrong"
    assert brief({"status": 200, "headers": {}, "text": ""}) == "200"
    assert brief({"status": 200, "headers": {}, "json": [1]}) == "200 [1]"
    assert brief({"code": "INTERNAL", "details": "x"}) == "INTERNAL x"
    assert brief({"code": "OK", "message": {"live": True}}) == 'OK {"live": true}'
    assert brief({"headers": {}, "families": {"nv_b": {}, "nv_a": {}}}) == "metrics: nv_a, nv_b"
    assert brief({"headers": {}, "families": {}}) == "metrics: none"
    assert brief({"broken": "TimeoutError"}) == "no answer (TimeoutError)"
