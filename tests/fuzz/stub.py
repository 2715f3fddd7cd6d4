"""A small server in the fuzzer's own process, in place of the one that is fuzzed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from fuzz.lanes import Address, Kept
from fuzz.symptoms import Symptom


class StubSubject(ABC):
    """What stubs have in common: a listener, connections to it, and nothing that could grow."""

    def __init__(self, patience: float, lanes: int) -> None:
        self._patience = patience
        self._count = lanes

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.lanes = [Kept(Address(port), self._patience) for _ in range(self._count)]

    @abstractmethod
    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection."""

    async def rest(self) -> list[Symptom]:
        return []

    def over(self) -> list[Symptom]:
        return []

    def kill(self) -> None:
        self._server.close()

    async def stop(self) -> list[Symptom]:
        for lane in self.lanes:
            await lane.close()
        self._server.close()
        return []
