"""Base class of engines whose framework needs an event loop.

A thread runs the loop, and the framework is called only in that thread. The base class starts and stops it, rejects
unsupported requests before they reach the framework, and keeps the statistics.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Any, ClassVar

from nerite.core.errors import InvalidArgument, NeriteError, Unavailable
from nerite.llm.engine import (
    Capabilities,
    EngineStats,
    GenerationRequest,
    GivenUp,
    RequestListener,
    Stepped,
    kept_of_prompt,
    refuse_what_is_lacking,
    refuse_what_is_unknown,
    tokenizable,
)


class LoopEngine(ABC):
    """Engine that runs its framework in the event loop of a thread."""

    name: ClassVar[str]
    sampling: ClassVar[frozenset[str]]
    """Sampling parameters that the subclass passes to the framework or rejects with its own message."""

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._able: Capabilities
        self._stepped: Stepped
        self._given_up: GivenUp
        self._loop: asyncio.AbstractEventLoop
        self._wake: asyncio.Event
        """Set when there is work, or when the engine is to stop."""
        self._stopping = False
        self._blocks = (0, 0)
        """Number of blocks of the KV cache, and tokens per block."""
        self._prompt_tokens = self._generated_tokens = 0
        self._totals: dict[str, int] = {}
        """Further counters, by their names in ``EngineStats``."""
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, stepped: Stepped, given_up: GivenUp) -> None:
        """Load the model and start the thread. Raises ``NeriteError``."""
        self._stepped, self._given_up = stepped, given_up
        self._prepare()
        self._thread.start()
        try:
            self._ready.result()
        except Exception as error:  # any error of the framework explains why the model cannot be loaded
            raise self._translated(error, "loading model") from error

    def add(self, request: GenerationRequest, listener: RequestListener) -> None:
        """Add a request. Raises ``NeriteError``; errors that only the framework detects go to the listener."""
        if not self.is_healthy():
            raise Unavailable("the engine is not running")
        refuse_what_is_lacking(request, self._able)
        refuse_what_is_unknown(request.sampling, self.sampling, self.name)
        self._take(request, self._tokenize(request), listener)

    def stats(self) -> EngineStats:
        """Return the current state."""
        total, size = self._blocks
        running, waiting, used = self._usage()
        return EngineStats(
            running,
            waiting,
            total,
            total - used,
            size,
            self._able.context_length,
            self._able.max_sequences,
            self._prompt_tokens,
            self._generated_tokens,
            0,
            **self._totals,
        )

    def capabilities(self) -> Capabilities:
        """Return the features of the engine."""
        return self._able

    def is_healthy(self) -> bool:
        """Return whether the engine accepts requests."""
        return self._thread.is_alive() and not self._stopping

    def is_ready(self) -> bool:
        """Return whether the engine can start a request immediately."""
        return self.is_healthy()

    def stop(self) -> None:
        """Abort all requests and release the model."""
        self._stopping = True
        if self._thread.is_alive():
            self._nudge()
            self._thread.join()

    def _nudge(self) -> None:
        self._loop.call_soon_threadsafe(self._wake.set)

    def _tokenize(self, request: GenerationRequest) -> list[int]:
        """Return the tokens of a prompt. Raises ``InvalidArgument`` if it has none or too many."""
        prompt = request.prompt
        most = self._able.context_length
        kept = kept_of_prompt(request.sampling, most)
        tokens: list[int]
        if isinstance(prompt, str):
            text = tokenizable(prompt, kept, most)
            tokens = self._tokenizer.encode(text, add_special_tokens=request.special_tokens)
        else:
            tokens = list(prompt)
        if kept is not None:
            tokens = tokens[-kept:]
        if not tokens:
            raise InvalidArgument("the prompt is empty")
        if len(tokens) >= most:
            raise InvalidArgument(
                f"the prompt has {len(tokens)} tokens, but the model's context is {most}: remove at least "
                f"{len(tokens) - most + 1} to leave room for an answer"
            )
        return tokens

    # In the engine's thread

    def _run(self) -> None:
        asyncio.run(self._run_loop())

    async def _run_loop(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        try:
            await self._load()
        except BaseException as error:
            self._ready.set_exception(error)
            self._release()
            return
        self._stepped(self.stats())
        self._ready.set_result(None)
        await self._work()
        self._release()

    # To be implemented by subclasses

    @abstractmethod
    def _prepare(self) -> None:
        """Check that the framework can be imported. Raises ``NeriteError``."""

    @abstractmethod
    async def _load(self) -> None:
        """Load the model and set ``_able``. Raises what the framework raises."""

    @abstractmethod
    async def _work(self) -> None:
        """Generate until ``_stopping`` is set, then abort all requests."""

    @abstractmethod
    def _release(self) -> None:
        """Release all resources, if any were acquired."""

    @abstractmethod
    def _take(self, request: GenerationRequest, tokens: list[int], listener: RequestListener) -> None:
        """Add a validated request, on any thread. Raises ``NeriteError``."""

    @abstractmethod
    def _usage(self) -> tuple[int, int, int]:
        """Return the numbers of running sequences, waiting sequences and blocks in use."""

    @abstractmethod
    def _translated(self, error: Exception, doing: str) -> NeriteError:
        """Convert an error of the framework to a ``NeriteError``."""
