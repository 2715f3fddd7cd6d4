"""What models ask of the server beside inference: to load and unload models, and whether one is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from nerite.core.errors import NeriteError, Unavailable
from nerite.core.internal_errors import report
from nerite.execution import messages
from nerite.execution.calls import unpacked
from nerite.execution.door import Door
from nerite.execution.readiness import CHECK_PATIENCE


class Asker(NamedTuple):
    """Who asks."""

    model: str
    version: int
    instance: str
    loading: bool
    """Its ``initialize`` runs: nobody can load or unload it meanwhile."""


class Errands:
    """One for the server. Questions may come from any thread; all else belongs to the loop's."""

    def __init__(self, door: Door, loop: asyncio.AbstractEventLoop, loading: asyncio.Semaphore) -> None:
        """``loading`` is held by each model that is being loaded."""
        self._door = door
        self._loop = loop
        self._loading = loading
        self._under_way: set[asyncio.Task[None]] = set()
        self._loads: list[tuple[str, str]] = []
        """Models that are being loaded, each with one that its ``initialize`` wants loaded or unloaded just now."""

    def take(self, question: dict[str, Any], reply: Callable[[bytes], None], asker: Asker) -> None:
        """Do what a worker asks, and pass the message for it to ``reply``, on the loop's thread. For any thread."""
        self._loop.call_soon_threadsafe(self._begin, question, asker, reply)

    def _begin(self, question: dict[str, Any], asker: Asker, reply: Callable[[bytes], None]) -> None:
        number = question["number"]

        def answer(value: object, error: NeriteError | None = None) -> None:
            told: dict[str, Any] = {"number": number}
            if error is None:
                told["value"] = value
            else:
                said = f"Failed to process the request for model '{asker.instance}', message: {error.message}"
                told["error"] = messages.error_json(type(error)(said))
            reply(messages.json_frame(messages.TOLD, told))

        model = question["model"]
        if question["what"] == "ready":
            self._ask_ready(model, question["version"], asker, answer)
        elif question["what"] == "load":
            given = {name: unpacked(value) for name, value in question["parameters"].items()}
            self._run(self._door.load(model, given), model, asker, answer)
        else:
            self._run(self._door.unload(model, question["parameters"]), model, asker, answer)

    def _ask_ready(self, model: str, version: str, asker: Asker, answer: Callable[[object], None]) -> None:
        try:
            running = self._door.find(model, version, "")
        except NeriteError:
            answer(False)
            return
        if (running.name, running.version) == (asker.model, asker.version):
            # It is at work, and cannot be asked while it waits for this.
            answer(True)
        else:
            running.ask_ready(answer, CHECK_PATIENCE)

    def _run(
        self,
        work: Coroutine[Any, Any, None],
        model: str,
        asker: Asker,
        answer: Callable[[object, NeriteError | None], None],
    ) -> None:
        task = self._loop.create_task(self._answered(work, model, asker, answer))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _answered(
        self,
        work: Coroutine[Any, Any, None],
        model: str,
        asker: Asker,
        answer: Callable[[object, NeriteError | None], None],
    ) -> None:
        wait = (asker.model, model)
        if asker.loading:
            if self._leads_back(*wait):
                work.close()
                answer(None, Unavailable(f"model '{model}' is being loaded, and that waits for this to be done"))
                return
            self._loads.append(wait)
            # Otherwise as many as may be loaded at once would wait for others for ever.
            self._loading.release()
        try:
            await work
            answer(None, None)
        except NeriteError as error:
            answer(None, error)
        except Exception as error:
            answer(None, report("bls", error, f"in what '{asker.instance}' asked for"))
        finally:
            if asker.loading:
                self._loads.remove(wait)
                await self._loading.acquire()

    def _leads_back(self, asking: str, wanted: str) -> bool:
        """Return whether ``wanted`` is loaded, or waits for others that are, by the load of ``asking`` itself."""
        reached = {wanted}
        while True:
            further = {there for here, there in self._loads if here in reached} - reached
            if asking in reached or not further:
                return asking in reached
            reached |= further
