"""The engine: a thread with a loop, in which vLLM's frontend lives. Its scheduler is in a process of its own.

Nobody waits for a request. What a step has brought is taken from all requests at once, when vLLM tells its statistics:
that it does after each step, in the same loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any, Final

from nerite.backends.llm.engine import (
    Capabilities,
    EngineStats,
    GenerationRequest,
    GivenUp,
    Listener,
    Stepped,
    kept_of_prompt,
    refuse_what_is_lacking,
    refuse_what_is_unknown,
)
from nerite.backends.llm.sampling import SamplingParameters
from nerite.backends.llm.vllm import framework
from nerite.backends.llm.vllm.arguments import Arguments
from nerite.backends.llm.vllm.running import Running
from nerite.core.errors import InvalidArgument, NeriteError, TooLate, Unavailable, Unsupported

_log = logging.getLogger("nerite.backends.llm")

NAME: Final = "vllm"


class VllmEngine:
    """vLLM's asynchronous engine."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._engine: Any = None
        self._tokenizer: Any = None
        self._adapters: dict[str, Any] = {}
        self._able: Capabilities
        self._stepped: Stepped
        self._given_up: GivenUp
        self._loop: asyncio.AbstractEventLoop
        self._wake: asyncio.Event
        self._ready: Future[None] = Future()
        self._coming: deque[Running] = deque()
        self._aborts: deque[str] = deque()
        self._stopping = False
        self._running: dict[str, Running] = {}
        self._blocks = (0, 0)
        """How many there are, and the tokens in one."""
        self._busy = (0, 0, 0.0)
        """Requests that run and wait, and the share of the cache that is in use, after the last step."""
        self._totals = dict.fromkeys(("prefix_queries", "prefix_hits", "preemptions", "drafted", "accepted"), 0)
        self._prompt_tokens = self._generated_tokens = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, stepped: Stepped, given_up: GivenUp) -> None:
        """Load the model, and generate a token with it. Raises ``NeriteError``."""
        self._stepped = stepped
        self._given_up = given_up
        framework.begin(self._arguments)
        self._thread.start()
        try:
            self._ready.result()
        except Exception as error:  # Whatever the framework raises says why the model cannot be loaded.
            raise framework.translated(error, "loading model") from error

    def add(self, request: GenerationRequest, listener: Listener) -> None:
        """Take a request up. Raises ``NeriteError``; what only vLLM's frontend sees to is told to the listener."""
        if not self.is_healthy():
            raise Unavailable("the engine does not run")
        refuse_what_is_lacking(request, self._able)
        refuse_what_is_unknown(request.sampling, framework.SAMPLING, NAME)
        prompt = request.prompt
        if isinstance(prompt, str):
            tokens = self._tokenizer.encode(prompt, add_special_tokens=request.special_tokens)
        else:
            tokens = list(prompt)
        most = self._able.context_length
        kept = kept_of_prompt(request.sampling, most)
        if kept is not None:
            tokens = tokens[-kept:]
        if not tokens:
            raise InvalidArgument("the prompt is empty")
        if len(tokens) >= most:
            raise InvalidArgument(
                f"the prompt has {len(tokens)} tokens, and the model a context of {most}: leave out at least "
                f"{len(tokens) - most + 1}, so that there is room for an answer"
            )
        try:
            sampling = framework.sampling(request)
        except Exception as error:  # It says what is wrong with the parameters.
            raise framework.translated(error, "reading sampling parameters") from error
        self._coming.append(Running(request, listener, tokens, sampling))
        self._nudge()

    def abort(self, id: str) -> None:
        """End a request, if it runs or waits."""
        self._aborts.append(id)
        self._nudge()

    def stats(self) -> EngineStats:
        """Return how it is now. vLLM's own numbers stand still when it does."""
        total, size = self._blocks
        running, waiting, usage = self._busy if self._running else (0, 0, 0.0)
        return EngineStats(
            running,
            waiting + len(self._coming),
            total,
            total - round(usage * total),
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
        return self._thread.is_alive() and not self._stopping and not self._engine.errored

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

    # The engine's thread

    def _run(self) -> None:
        asyncio.run(self._work())

    async def _work(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        try:
            await self._load()
        except BaseException as error:
            self._ready.set_exception(error)
            if self._engine is not None:
                self._engine.shutdown()
            return
        self._stepped(self.stats())
        self._ready.set_result(None)
        while not self._stopping:
            await self._wake.wait()
            self._wake.clear()
            while self._coming:
                await self._begin(self._coming.popleft())
            await self._cut()
        for id in list(self._running):
            self._aborts.append(id)
        await self._cut()
        self._engine.shutdown()

    async def _load(self) -> None:
        self._engine = engine = framework.engine(self._arguments, self._step)
        tasks = await engine.get_supported_tasks()
        if "generate" not in tasks:
            raise Unsupported(f"the model generates no text: vLLM would do {', '.join(tasks)} with it")
        self._tokenizer = engine.get_tokenizer()
        config = engine.vllm_config
        self._blocks = (config.cache_config.num_gpu_blocks or 0, config.cache_config.block_size)
        self._adapters = framework.adapters(self._arguments)
        for adapter in self._adapters.values():
            await engine.add_lora(adapter)
        self._able = Capabilities(
            NAME,
            config.model_config.max_model_len,
            config.scheduler_config.max_num_seqs,
            top_logprobs=config.model_config.max_logprobs,
            grammars=framework.GRAMMARS,
            adapters=frozenset(self._adapters),
            priorities=config.scheduler_config.policy == "priority",
        )
        # What is compiled for the first request would otherwise be waited for by its caller; so for probabilities.
        said = SamplingParameters(max_tokens=2, ignore_eos=True, logprobs=min(1, self._able.top_logprobs))
        first = framework.sampling(GenerationRequest("", [0], said))
        async for _ in engine.generate(framework.prompt([0]), first, "warm-up"):
            pass
        engine.output_handler.add_done_callback(self._ended)

    def _ended(self, _task: Any) -> None:
        """Tell everybody that vLLM has come to an end, if nobody has asked it to."""
        if self._stopping:
            return
        self._deliver()
        self._given_up("vLLM has failed, and what it said is above")

    async def _begin(self, running: Running) -> None:
        request = running.request
        try:
            running.outputs = await self._engine.add_request(
                running.id,
                framework.prompt(running.tokens),
                running.sampling,
                lora_request=self._adapters.get(request.lora),
                priority=request.priority,
            )
        except Exception as error:  # Of this request alone; or the engine is dead, and says so.
            running.listener.failed(framework.translated(error, "beginning a request"))
            self._stepped(self.stats())
            return
        self._running[running.id] = running
        self._prompt_tokens += len(running.tokens)
        running.listener.admitted(len(running.tokens))

    async def _cut(self) -> None:
        """End the requests that are not wanted any more."""
        aborts = []
        while self._aborts:
            aborts.append(self._aborts.popleft())
        if aborts:
            await self._engine.abort(aborts)
            self._deliver()

    def _step(self, scheduler: Any, step: Any) -> None:
        """Take what a step has brought. Called by vLLM in the loop."""
        if scheduler is not None:
            self._busy = (scheduler.num_running_reqs, scheduler.num_waiting_reqs, scheduler.kv_cache_usage)
            self._count("prefix_queries", scheduler.prefix_cache_stats.queries)
            self._count("prefix_hits", scheduler.prefix_cache_stats.hits)
            if scheduler.spec_decoding_stats is not None:
                self._count("drafted", scheduler.spec_decoding_stats.num_draft_tokens)
                self._count("accepted", scheduler.spec_decoding_stats.num_accepted_tokens)
        if step is not None:
            self._count("preemptions", step.num_preempted_reqs)
        self._deliver()

    def _count(self, what: str, number: int) -> None:
        self._totals[what] += number

    def _deliver(self) -> None:
        """Hand on what has come, of all requests."""
        now = time.monotonic_ns()
        for running in list(self._running.values()):
            try:
                deltas = running.taken()
            except Exception as error:  # vLLM gives all of them the reason, when it has died.
                self._failed(running, framework.translated(error, "a step of the engine"))
                continue
            if deltas:
                self._generated_tokens += sum(len(delta.tokens) for delta in deltas)
                if running.finished:
                    del self._running[running.id]
                running.listener.advanced(deltas)
            if not running.finished and 0 < running.request.deadline_ns <= now:
                self._failed(running, TooLate("the deadline of the request has passed while it ran"))
                self._aborts.append(running.id)
                self._wake.set()
        if self._ready.done():
            self._stepped(self.stats())

    def _failed(self, running: Running, error: NeriteError) -> None:
        del self._running[running.id]
        running.listener.failed(error)
