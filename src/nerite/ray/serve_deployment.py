"""A deployment of Ray Serve whose replicas run Nerite, which answers behind the ingress of Serve."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import quote

from nerite.cluster.settings import MemberSource, PoolSettings
from nerite.core.errors import InvalidArgument
from nerite.ray.actors import GRACE, ProcessActor
from nerite.ray.ray_cluster import ray_module
from nerite.tools.up.command import FreePorts, nerite_program
from nerite.tools.up.local_plan import server_process

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_HOP: Final = frozenset({b"connection", b"host", b"keep-alive", b"proxy-connection", b"te", b"transfer-encoding",
                         b"upgrade"})  # fmt: skip
"""Headers that concern one connection only."""
_POLL: Final = 0.1
_CONNECT_SECONDS: Final = 5.0


def deployment(
    repository: str,
    *,
    flags: Sequence[str] = (),
    start_seconds: float = 600.0,
    drain_seconds: float = 30.0,
    name: str = "nerite",
    max_ongoing_requests: int = 100,
    **options: Any,
) -> Any:
    """Return a deployment of Ray Serve that serves a model repository.

    Each replica runs ``nerite serve REPOSITORY FLAGS`` beside it and passes requests on, bodies and streams as they
    come. ``options`` are those of ``serve.deployment``, such as ``num_replicas`` and ``ray_actor_options``. Serve sends
    a replica ``max_ongoing_requests`` at most. Raises ``NotInstalled`` without Ray Serve.

    ::

        serve.run(nerite.ray.deployment("/models", num_replicas=2).bind())
    """
    if not repository:
        raise InvalidArgument("the repository is empty: give the directory with the models")
    if wrong := [flag for flag in flags if not flag.startswith("--")]:
        raise InvalidArgument(f"flags must be flags of nerite serve, as in ['--log-verbose=1'], not '{wrong[0]}'")
    serve = ray_module("ray.serve")
    place = repository if "://" in repository else os.path.abspath(repository)
    options.setdefault("graceful_shutdown_timeout_s", drain_seconds + 2 * GRACE)

    class Nerite(ServeReplica):
        """The class of the deployment, whose arguments are known already."""

        def __init__(self) -> None:
            super().__init__(place, tuple(flags), start_seconds, drain_seconds)

    made = serve.deployment(name=name, max_ongoing_requests=max_ongoing_requests, **options)
    return made(serve.ingress(_passthrough)(Nerite))


class ServeReplica:
    """A replica: a server of its own, and connections to it."""

    def __init__(self, repository: str, flags: tuple[str, ...], start_seconds: float, drain_seconds: float) -> None:
        """Return when the server is ready; raises ``RuntimeError`` if it is not in time."""
        pool = PoolSettings("replica", MemberSource(models=repository, flags=flags))
        with FreePorts() as ports:
            process = server_process(pool, "nerite", ports.next, nerite_program())
        self._server = ProcessActor(process, drain_seconds + GRACE)
        self._base = f"http://{process.address}"
        self._session: Any = None
        deadline = time.monotonic() + start_seconds
        while not self._server.ready:
            if time.monotonic() > deadline:
                self._server.drain()
                raise RuntimeError(
                    f"{' '.join(process.command)} is not ready after {start_seconds:g} s: see its log above"
                )
            time.sleep(_POLL)

    def check_health(self) -> None:
        """Tell Serve whether the replica can serve. Raises ``RuntimeError`` if not."""
        if not self._server.ready:
            raise RuntimeError("the server of this replica has ended, and is not ready yet")

    async def close(self) -> None:
        """Have the server end after its requests."""
        if self._session is not None:
            await self._session.close()
        await asyncio.to_thread(self._server.drain)

    def _connections(self) -> Any:
        """Return the connections to the server. Serve bounds their number, and the client how long it waits."""
        if self._session is None:
            aiohttp = ray_module("aiohttp")
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_SECONDS),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return self._session

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and its answer back."""
        names = {name for name, _ in scope["headers"]}
        body = _body_of(receive) if names & {b"content-length", b"transfer-encoding"} else None
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
                   if name not in _HOP]  # fmt: skip
        url = ray_module("yarl").URL(self._base + _target_of(scope), encoded=True)
        try:
            response = await self._connections().request(
                scope["method"], url, headers=headers, data=body, allow_redirects=False
            )
        except (ray_module("aiohttp").ClientError, TimeoutError) as error:
            await _refuse(send, 503, f"the server of this replica does not answer: {error}")
            return
        try:
            kept = [(name.lower(), value) for name, value in response.raw_headers if name.lower() not in _HOP]
            await send({"type": "http.response.start", "status": response.status, "headers": kept})
            async for part in response.content.iter_any():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            response.release()
        finally:
            response.close()  # of a response that was not read to its end, the server cancels the request


async def _body_of(receive: Receive) -> AsyncIterator[bytes]:
    """Yield the parts of a body as they come."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the client has disconnected")
        if part := message.get("body", b""):
            yield part
        if not message.get("more_body", False):
            return


def _target_of(scope: Scope) -> str:
    """Return path and query without the prefix of the application's route."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    if root and path.startswith(root):
        path = path[len(root) :]
    query = scope.get("query_string", b"").decode("latin-1")
    return quote(path or "/", safe="/:@!$&'()*+,;=-._~") + (f"?{query}" if query else "")


async def _refuse(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": text}).encode()})


class _Passthrough:
    """The ASGI application of the deployment: hands what Serve has received to the replica of this process."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._replica().answer(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            ending = message["type"] == "lifespan.shutdown"
            if ending:
                await self._replica().close()
            await send({"type": f"{message['type']}.complete"})
            if ending:
                return

    def _replica(self) -> Any:
        return ray_module("ray.serve").get_replica_context().servable_object


_passthrough: Final = _Passthrough()
