"""An engine whose framework wants a loop of its own: a thread has it, and all that the framework does happens there.

What such engines have in common is here: how they begin and end, what they refuse before the framework hears of it, and
how it is with them.
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
    """The part of an engine that the others share."""

    name: ClassVar[str]
    sampling: ClassVar[frozenset[str]]
    """The sampling parameters that it hands on, or refuses in words of its own."""

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._able: Capabilities
        self._stepped: Stepped
        self._given_up: GivenUp
        self._loop: asyncio.AbstractEventLoop
        self._wake: asyncio.Event
        """There is something to do, or the end has come."""
        self._stopping = False
        self._blocks = (0, 0)
        """How many there are, and the tokens in one."""
        self._prompt_tokens = self._generated_tokens = 0
        self._totals: dict[str, int] = {}
        """What else it counts, by its names in ``EngineStats``."""
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, stepped: Stepped, given_up: GivenUp) -> None:
        """Load the model. Raises ``NeriteError``."""
        self._stepped, self._given_up = stepped, given_up
        self._prepare()
        self._thread.start()
        try:
            self._ready.result()
        except Exception as error:  # Whatever the framework raises says why the model cannot be loaded.
            raise self._translated(error, "loading model") from error

    def add(self, request: GenerationRequest, listener: RequestListener) -> None:
        """Take a request up. Raises ``NeriteError``; what only the framework sees to is told to the listener."""
        if not self.is_healthy():
            raise Unavailable("the engine does not run")
        refuse_what_is_lacking(request, self._able)
        refuse_what_is_unknown(request.sampling, self.sampling, self.name)
        self._take(request, self._tokens(request), listener)

    def stats(self) -> EngineStats:
        """Return how it is now."""
        total, size = self._blocks
        running, waiting, used = self._usage()
        return EngineStats(
            running,
            waiting,
            total,
            total - used,
            size,
            self._able.context_length,
            self._able.most_sequences,
            self._prompt_tokens,
            self._generated_tokens,
            0,
            **self._totals,
        )

    def capabilities(self) -> Capabilities:
        """Return what it can do."""
        return self._able

    def is_healthy(self) -> bool:
        """Return whether it takes requests."""
        return self._thread.is_alive() and not self._stopping

    def is_ready(self) -> bool:
        """Return whether it can begin with a request at once."""
        return self.is_healthy()

    def stop(self) -> None:
        """Abort what runs, and let go of the model."""
        self._stopping = True
        if self._thread.is_alive():
            self._nudge()
            self._thread.join()

    def _nudge(self) -> None:
        self._loop.call_soon_threadsafe(self._wake.set)

    def _tokens(self, request: GenerationRequest) -> list[int]:
        """Return the tokens of a prompt. Raises ``InvalidArgument`` for none, and for too many."""
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
                f"the prompt has {len(tokens)} tokens, and the model a context of {most}: leave out at least "
                f"{len(tokens) - most + 1}, so that there is room for an answer"
            )
        return tokens

    # Its thread

    def _run(self) -> None:
        asyncio.run(self._live())

    async def _live(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        try:
            await self._load()
        except BaseException as error:
            self._ready.set_exception(error)
            self._let_go()
            return
        self._stepped(self.stats())
        self._ready.set_result(None)
        await self._work()
        self._let_go()

    # What differs

    @abstractmethod
    def _prepare(self) -> None:
        """See that the framework can be imported. Raises ``NeriteError``."""

    @abstractmethod
    async def _load(self) -> None:
        """Load the model, and note what it can do. Raises what the framework raises."""

    @abstractmethod
    async def _work(self) -> None:
        """Generate until it is to stop, and end then what runs."""

    @abstractmethod
    def _let_go(self) -> None:
        """Give everything back, if anything was taken."""

    @abstractmethod
    def _take(self, request: GenerationRequest, tokens: list[int], listener: RequestListener) -> None:
        """Take up a request that nothing is wrong with, on any thread. Raises ``NeriteError``."""

    @abstractmethod
    def _usage(self) -> tuple[int, int, int]:
        """Return how many sequences run, how many wait, and how many blocks are in use."""

    @abstractmethod
    def _translated(self, error: Exception, doing: str) -> NeriteError:
        """Return an error of the framework's as one of ours."""
