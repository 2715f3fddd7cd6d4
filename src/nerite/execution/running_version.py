"""A model version that is loaded: its signature, its queue, its instances, its counts, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from nerite.config.model_config import ModelConfig
from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.signature import Signature
from nerite.execution.arena import Arena
from nerite.execution.dispatcher import Dispatcher
from nerite.execution.runner import Runner
from nerite.execution.sentry import Sentry
from nerite.observability.statistics import VersionStatistics
from nerite.scheduling.decider import Decider

_TRIM_AFTER = 30.0


class RunningVersion:
    """Takes requests until it is closed. For the loop's thread only."""

    def __init__(
        self,
        name: str,
        version: int,
        config: ModelConfig,
        config_json: dict[str, Any],
        signature: Signature,
        decider: Decider,
        runners: Sequence[Runner],
        arena: Arena,
        loop: asyncio.AbstractEventLoop,
        sentry: Sentry,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """``release`` is called in the end, when every instance is closed: the backend's own clean-up."""
        self.name = name
        self.version = version
        self.label = str(version)
        self.config = config
        self.config_json = config_json
        self.signature = signature
        self.statistics = VersionStatistics()
        self.runners = tuple(runners)
        self.decoupled = bool(config.model_transaction_policy and config.model_transaction_policy.decoupled)
        self.load_seconds = 0.0
        """How long the load took; set by whoever loaded it."""
        self._arena = arena
        self._loop = loop
        self._release = release
        self._closing = False
        batching = config.dynamic_batching
        self._dispatcher = Dispatcher(
            decider,
            self.runners,
            self.statistics,
            loop,
            sentry,
            preserve_ordering=bool(batching and batching.preserve_ordering),
        )
        self._submit = self._dispatcher.submit
        self._trim_timer: asyncio.TimerHandle | None = None

    @property
    def pending(self) -> int:
        """Requests that wait for an instance."""
        return self._dispatcher.pending

    @property
    def in_flight(self) -> int:
        """Requests that wait or run."""
        return self._dispatcher.in_flight

    @property
    def restarts(self) -> int:
        """How often an instance had to be started again."""
        return sum(runner.restarts for runner in self.runners)

    def submit(self, request: InferenceRequest) -> None:
        """Take a request whose header was bound to this version's signature; answer through ``respond``."""
        if [*map(len, request.data)] != request.header.sizes:
            wrong = self.signature.check_data(request)
            if wrong is not None:
                request.respond(InferenceResponse.failed(wrong))
                return
        self._submit(request)

    def receive_buffer(self, size: int) -> memoryview | None:
        """Return writable memory that the instances can read as it is; None if there is none left."""
        if self._trim_timer is None:
            self._trim_timer = self._loop.call_later(_TRIM_AFTER, self._trim)
        return self._arena.allocate(size)

    def ask_ready(self, answered: Callable[[bool], None]) -> None:
        """Ask every instance whether it can serve; all must."""
        waiting = len(self.runners)
        ready = True

        def one(answer: bool) -> None:
            nonlocal waiting, ready
            waiting -= 1
            ready = ready and answer
            if waiting == 0:
                answered(ready)

        if not self.runners:
            answered(True)
        for runner in self.runners:
            runner.is_ready(one)

    def drain(self, drained: Callable[[], None]) -> None:
        """Call ``drained`` once nothing waits or runs any more."""
        self._dispatcher.when_drained(drained)

    def abandon(self, error: NeriteError) -> None:
        """Answer everything that waits with ``error``."""
        self._dispatcher.abandon(error)

    def close(self, closed: Callable[[], None]) -> None:
        """Give everything back; ``closed`` is called when that is done. Nothing may run any more."""
        waiting = len(self.runners)

        def one() -> None:
            nonlocal waiting
            waiting -= 1
            if waiting <= 0:
                if self._trim_timer is not None:
                    self._trim_timer.cancel()
                self._arena.close()
                self._release()
                closed()

        if not self.runners:
            one()
        for runner in self.runners:
            runner.close(one)

    def _trim(self) -> None:
        """Give back memory of large tensors when none was received for a while."""
        self._trim_timer = None
        self._arena.trim()
