"""A server inside the test's process: models are loaded as ``nerite serve`` does it, but no port is open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nerite.admission.tenants import TenantAdmission
from nerite.config.options import RepositoryOptions, ServerOptions
from nerite.core import tensor as dtypes
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.tensor import TensorSpec
from nerite.dispatch.interface import ServerEntry
from nerite.instances.placement import HostPolicies
from nerite.models.launcher import Launcher
from nerite.observability import gpus
from nerite.repository.manager import ModelManager
from nerite.repository.repositories import LocalRepository
from nerite.repository.version_maker import GpuPlacement, VersionMaker
from nerite.routes.table import RouteTable
from nerite.server import InferenceServer
from nerite.workers.helper_pool import HelperPool
from nerite.workers.host.fork_server import ForkServer
from nerite.workers.host.server_context import ServerContext
from nerite.workers.ipc.shared_memory import ForeignSegments
from serving import PATIENCE


class Embedded:
    """A server and its manager."""

    def __init__(self, server: InferenceServer) -> None:
        self.server = server
        self.manager = server.manager

    async def infer(self, model: str, value: float, version: str = "") -> float:
        """Send one number to a model of INPUT0 and OUTPUT0; return the number that comes back. Raises on errors."""
        header = RequestHeader(model, version, [TensorSpec("INPUT0", dtypes.FP32, (1, 1))])
        answer: asyncio.Future[InferenceResponse] = asyncio.get_running_loop().create_future()
        self.server.infer(InferenceRequest(header, [np.float32(value).tobytes()], _Sink(answer), 0))
        response = await answer
        if response.error is not None:
            raise response.error
        return float(np.frombuffer(response.data[0], np.float32)[0])

    async def index(self) -> list[dict[str, str]]:
        """Return version, state and reason of every version, by the repository index."""
        entries = await self.server.repository_index(False)
        return [{key: each[key] for key in ("version", "state", "reason") if key in each} for each in entries]

    async def states(self) -> dict[str, str]:
        """Return the state of each version."""
        return {each["version"]: each["state"] for each in await self.index()}

    async def reach(self, states: dict[str, str]) -> None:
        """Return when the versions have these states."""
        async with asyncio.timeout(PATIENCE):
            while True:
                if await self.states() == states:
                    return
                await asyncio.sleep(0.01)

    def ready(self) -> bool:
        """Say whether the server is ready."""
        answers: list[bool] = []
        self.server.ask_ready(answers.append)
        (answer,) = answers
        return answer


class _Sink:
    def __init__(self, answer: asyncio.Future[InferenceResponse]) -> None:
        self.answer = answer

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        if not self.answer.done():
            self.answer.set_result(response)


@asynccontextmanager
async def embedded(repository: Path, **options: Any) -> AsyncIterator[Embedded]:
    """Run a server with the models of a repository, none of which is loaded yet."""
    loop = asyncio.get_running_loop()
    loader = ThreadPoolExecutor(4, "load")
    fork_server = ForkServer(loop, lambda *_: None)
    foreign_segments = ForeignSegments()
    helpers = HelperPool(fork_server, loop, foreign_segments)
    repository_options = RepositoryOptions(paths=(str(repository),), **options)
    server_options = replace(ServerOptions(), repository=repository_options)
    loading = asyncio.Semaphore(4)
    routes = RouteTable()

    def manager(server: ServerEntry, on_change: Callable[[], None]) -> ModelManager:
        context = ServerContext(
            loop,
            loader,
            loading,
            fork_server,
            foreign_segments,
            server,
            lambda *_: None,
            0.0,
            server_options.queue,
            HostPolicies({}),
            None,
            lambda model, line: json.loads(line),
            TenantAdmission(None, loop),
            None,
            server_options.metrics,
        )
        placement = GpuPlacement(gpus.open_library(), [], 0.0)
        maker = VersionMaker(repository_options, lambda _: {}, Launcher(context), loader, loading, placement)
        return ModelManager(repository_options, [LocalRepository(str(repository))], maker, loader, on_change, routes)

    server = InferenceServer(server_options, manager, helpers=helpers, routes=routes)
    server.started()
    try:
        yield Embedded(server)
    finally:
        await server.manager.close()
        helpers.close()
        fork_server.close()
        loader.shutdown()
