"""Objects of the Kubernetes API, followed by list and watch.

``WatchedObjects`` decides without I/O what follows from lists and events; ``ObjectWatch`` asks the API server.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from contextlib import aclosing
from time import monotonic
from typing import Any, Final
from urllib.parse import urlencode

from nerite.core.errors import NeriteError, Unavailable
from nerite.core.work_loop import WorkLoop
from nerite.kubernetes.api_client import ApiClient, KubernetesError
from nerite.observability.log import log
from nerite.scheduling.backoff import ExponentialBackoff, jittered

_PAGE: Final = 500
"""Objects of one page of a list."""
_MAX_OBJECTS: Final = 16_384
_WATCH_SECONDS: Final = 240
"""Time after which the server ends a watch, which then begins again where it was; up to twice as long."""
_SILENCE: Final = 600.0
"""Longest time without an event: longer than any watch."""
_SHORT: Final = 1.0
"""A watch that ends sooner counts as a failure: it would begin again and again without a pause."""
_FIRST_DELAY: Final = 0.5
_LONGEST_DELAY: Final = 30.0


class WatchedObjects:
    """The objects of a list, kept up to date by the events of a watch."""

    def __init__(self) -> None:
        self.objects: dict[str, Mapping[str, Any]] = {}
        """By name."""
        self.version = ""
        """Resource version from which a watch goes on; empty: a list is needed."""
        self._listed: dict[str, Mapping[str, Any]] = {}

    def take_page(self, page: Mapping[str, Any]) -> str:
        """Take a page of a list; return the token of the next one. The objects are replaced with the last page.

        Raises ``Unavailable`` for an answer that is no list.
        """
        items, metadata = page.get("items") or [], page.get("metadata")
        if not isinstance(items, list) or not isinstance(metadata, dict):
            raise Unavailable("the API server did not answer with a list")
        for item in items:
            if name := _name_of(item):
                self._listed[name] = item
        if len(self._listed) > _MAX_OBJECTS:
            self._listed = {}
            raise Unavailable(f"the API server listed more than {_MAX_OBJECTS} objects")
        if token := str(metadata.get("continue") or ""):
            return token
        self.objects, self._listed = self._listed, {}
        self.version = str(metadata.get("resourceVersion") or "")
        return ""

    def take_event(self, event: Mapping[str, Any]) -> bool:
        """Take an event; return whether the objects have changed."""
        kind, item = event.get("type"), event.get("object")
        if kind == "ERROR" or not isinstance(item, dict):
            self.expire()  # 410: what has happened since the version is not known any more
            return False
        metadata = item.get("metadata")
        if isinstance(metadata, dict) and metadata.get("resourceVersion"):
            self.version = str(metadata["resourceVersion"])
        name = _name_of(item)
        if not name or kind == "BOOKMARK":
            return False
        if kind == "DELETED":
            return self.objects.pop(name, None) is not None
        if len(self.objects) >= _MAX_OBJECTS and name not in self.objects:
            return False
        self.objects[name] = item
        return True

    def expire(self) -> None:
        """Ask for a list. The objects stay until it is there."""
        self.version = ""
        self._listed = {}


def _name_of(item: object) -> str:
    metadata = item.get("metadata") if isinstance(item, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else ""


class ObjectWatch:
    """Follows the objects of one path of the API. While the API server is away, the last objects stay."""

    def __init__(
        self,
        client: ApiClient,
        path: str,
        selector: str,
        changed: Callable[[Mapping[str, Mapping[str, Any]]], None],
        other_path: str = "",
    ) -> None:
        """``changed`` gets all objects, by name, after each list and each change. ``selector``: of labels.

        ``other_path`` is where servers that do not know ``path`` have the same objects.
        """
        self._client = client
        self._path = path
        self._other_path = other_path
        self._selector = selector
        self._changed = changed
        self._watched = WatchedObjects()
        self._backoff = ExponentialBackoff(_FIRST_DELAY, _LONGEST_DELAY, at_once=False)

    async def list(self) -> None:
        """List the objects. Raises ``NeriteError`` if that fails; the last objects stay."""
        try:
            await self._list()
        except KubernetesError as error:
            if error.status != 404 or not self._other_path:
                raise
            self._path, self._other_path = self._other_path, self._path
            await self._list()

    async def _list(self) -> None:
        token = ""
        while True:
            query = {"labelSelector": self._selector, "limit": str(_PAGE)} | ({"continue": token} if token else {})
            try:
                page = await self._client.get(f"{self._path}?{urlencode(query)}")
            except NeriteError:
                self._watched.expire()
                raise
            if not (token := self._watched.take_page(page)):
                break
        self._changed(self._watched.objects)

    async def run(self, loop: WorkLoop) -> None:
        """Follow the objects until it is cancelled."""
        while True:
            with loop.step(self._path):
                await self._follow()
                continue
            self._watched.expire()  # so that what could not be taken comes again with a list
            await asyncio.sleep(self._delay())

    async def _follow(self) -> None:
        """List the objects if that is needed, and watch them until the server ends that."""
        try:
            if not self._watched.version:
                await self.list()
            began = monotonic()
            await self._watch()
            if monotonic() - began < _SHORT:
                await asyncio.sleep(self._delay())
            else:
                self._backoff.succeeded()
        except NeriteError as error:
            if isinstance(error, KubernetesError) and error.status in (404, 410):
                self._watched.expire()
            else:
                log.warning(f"{error.message}. What was known last stays")
            await asyncio.sleep(self._delay())

    async def _watch(self) -> None:
        seconds = random.randint(_WATCH_SECONDS, 2 * _WATCH_SECONDS)
        query = {
            "labelSelector": self._selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._watched.version,
            "timeoutSeconds": str(seconds),
        }
        async with aclosing(self._client.watch(f"{self._path}?{urlencode(query)}", _SILENCE)) as events:
            async for event in events:
                if self._watched.take_event(event):
                    self._changed(self._watched.objects)
                if not self._watched.version:
                    return

    def _delay(self) -> float:
        """Note a failure; return the seconds until the next attempt, which are not the same for all replicas."""
        return jittered(self._backoff.failed(monotonic()))
