"""Lists and watches of the Kubernetes API, without one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from nerite.core.errors import Unavailable
from nerite.core.work_loop import WorkLoop
from nerite.kubernetes.api_client import ApiClient
from nerite.kubernetes.object_watch import ObjectWatch, WatchedObjects


def item(name: str, version: int = 1) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


def page(*items: dict[str, Any], version: int = 10, token: str = "") -> dict[str, Any]:
    return {"items": list(items), "metadata": {"resourceVersion": str(version), "continue": token}}


def event(kind: str, *given: Any) -> dict[str, Any]:
    return {"type": kind, "object": item(*given)}


def listed(*names: str) -> WatchedObjects:
    watched = WatchedObjects()
    assert watched.take_page(page(*map(item, names))) == ""
    return watched


def test_a_list_in_pages_counts_when_it_is_whole() -> None:
    watched = listed("old")
    assert watched.take_page(page(item("a"), token="more")) == "more"
    assert list(watched.objects) == ["old"]
    assert watched.take_page(page(item("b"), version=12)) == ""
    assert (list(watched.objects), watched.version) == (["a", "b"], "12")


def test_events_change_the_objects() -> None:
    watched = listed("a", "b")
    assert watched.take_event(event("ADDED", "c", 11))
    assert watched.take_event(event("MODIFIED", "a", 12))
    assert watched.take_event(event("DELETED", "b", 13))
    assert not watched.take_event(event("DELETED", "b", 14))
    assert watched.objects == {"a": item("a", 12), "c": item("c", 11)}
    assert watched.version == "14"


def test_a_bookmark_moves_the_version_only() -> None:
    watched = listed("a")
    assert not watched.take_event({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "99"}}})
    assert (list(watched.objects), watched.version) == (["a"], "99")


@pytest.mark.parametrize("given", [{"type": "ERROR", "object": {"code": 410}}, {"type": "ADDED"}, {}])
def test_after_an_error_a_list_is_needed_and_the_objects_stay(given: dict[str, Any]) -> None:
    watched = listed("a")
    assert not watched.take_event(given)
    assert (list(watched.objects), watched.version) == (["a"], "")


@pytest.mark.parametrize("given", [{}, {"items": 3, "metadata": {}}, {"items": []}])
def test_what_is_no_list_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(Unavailable, match="did not answer with a list"):
        WatchedObjects().take_page(given)


def test_the_number_of_objects_is_bounded() -> None:
    watched = WatchedObjects()
    with pytest.raises(Unavailable, match="more than 16384 objects"):
        watched.take_page(page(*(item(str(number)) for number in range(16_385))))
    assert watched.take_page(page(*(item(str(number)) for number in range(16_384)))) == ""
    assert not watched.take_event(event("ADDED", "another"))
    assert watched.take_event(event("MODIFIED", "0", 5))


class ClosingClient(ApiClient):
    """Of a server that ends each watch at once."""

    def __init__(self) -> None:
        self.watches = 0

    async def get(self, path: str, seconds: float = 15.0) -> dict[str, Any]:
        return page(item("a"))

    async def watch(self, path: str, silence: float) -> AsyncGenerator[dict[str, Any], None]:
        self.watches += 1
        for event in ():
            yield event


def test_watches_that_end_at_once_begin_again_later_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []

    async def sleep(seconds: float) -> None:
        delays.append(seconds)
        if len(delays) == 8:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    client = ClosingClient()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(ObjectWatch(client, "/api/v1/pods", "", lambda objects: None).run(WorkLoop("discovery")))
    assert client.watches == 8
    assert all(each >= 0.25 for each in delays)
    assert delays[-1] >= 15.0
