"""What is told of loops beside the requests, and to whom."""

from __future__ import annotations

import orjson
import pytest

from nerite.core.errors import Unavailable
from nerite.core.work_loop import WorkLoop, WorkLoops
from nerite.observability.exposition import Page
from nerite.transports.access import AccessKeys, Lock, operator_refusal
from nerite.transports.http import reply
from nerite.transports.http.background import document_of, not_ready, write_background_metrics
from nerite.transports.http.head import parse_head


def fail(loop: WorkLoop, unit: str, error: Exception, times: int = 2) -> None:
    for _ in range(times):
        with loop.unit(unit, "alice"):
            raise error


def test_a_document_is_bounded() -> None:
    loop = WorkLoop("batches")
    for number in range(1200):
        fail(loop, f"dead-{number}", ValueError())
        fail(loop, f"failing-{number}", Unavailable("the disk is full"), 1)
    told = document_of(loop)
    assert (told["set_aside"], len(told["dead_letters"])) == (1200, 1000)
    assert (told["failing_units"], len(told["failing"])) == (1200, 1000)
    assert told["dead_letters"][0]["unit"] == "dead-0"
    assert told["state"] == "failing"


def test_names_that_are_no_text_can_be_told() -> None:
    loop = WorkLoop("files", "/etc/\udcff" + "a" * 5000, stall_seconds=0.0)
    with loop.step("/etc/\udcff"):
        raise Unavailable("it cannot be read")
    fail(loop, "\udcfe", ValueError())
    loop.watch()
    assert b"cannot be read" in orjson.dumps(document_of(loop))
    loops = WorkLoops()
    loops.add(loop)
    page = Page()
    write_background_metrics(loops, page)
    assert b'nerite_background_stalled{about="/etc/?aaa' in b"".join(page.pieces())


def test_the_reason_is_told_if_a_loop_is_the_obstacle() -> None:
    assert not_ready("", reply.BAD_REQUEST) == reply.BAD_REQUEST
    told = not_ready("health is stalled", reply.BAD_REQUEST)
    assert (told.status, told.body) == (400, b"health is stalled (GET /v2/background)\n")


@pytest.mark.parametrize(
    ("locked", "remedy", "key", "opens"),
    [
        (False, "", "", True),  # no tenants, and no key
        (False, "set one", "", False),
        (False, "set one", "a", False),
        (True, "", "", False),
        (True, "set one", "b", False),
        (True, "set one", "a", True),
    ],
)
def test_who_may_ask(locked: bool, remedy: str, key: str, opens: bool) -> None:
    locks = {"statistics": Lock("X-Key", AccessKeys((b"a",)))} if locked else {}
    head = parse_head(f"GET /v2/background HTTP/1.1\r\nHost: a\r\nX-Key: {key}\r\n\r\n".encode())
    refusal = operator_refusal(locks, "statistics", head, remedy)
    assert (refusal is None) == opens
    if refusal is not None:
        assert refusal.status == 403
        assert (b"X-Key" if locked else b"set one") in refusal.body
