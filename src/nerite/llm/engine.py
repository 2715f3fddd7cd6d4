"""The interface of language model engines, its data types, and what engines share: checks, and the loop's thread.

An engine runs in the worker process of its model and does continuous batching: requests join and leave between two
steps. Its interface is plain data, so no other module depends on a particular engine. ``add`` rejects, by name, each
feature that an engine lacks; nothing is silently ignored. Engines know no deadlines: the server aborts a request when
its deadline passes.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar, Final, Protocol, TypeAlias, runtime_checkable

from nerite.core.errors import InvalidArgument, NeriteError, Unavailable, Unsupported
from nerite.core.tensor import Array
from nerite.llm.sampling_parameters import SamplingParameters
from nerite.llm.structured_output import Grammar

LONGEST_TOKEN: Final = 256
"""Characters; no known token is longer. The longest token of most vocabularies is 128 spaces."""
_AVERAGE_TOKEN: Final = 16
"""Characters that the tokens of a long prompt may have on average: those of any language have fewer than five."""
_USUAL_TOKEN: Final = 6
_SHORT_PROMPT: Final = 64 * 1024
"""Characters that are tokenized in some milliseconds."""
_CUT_TOKENS: Final = 16
"""More tokens than a text has because it is cut."""


class FinishReason(Enum):
    """Reason why a sequence ended, independent of how the engine names it."""

    STOP = "stop"
    """The model ended the text, or a stop token or stop string occurred."""
    LENGTH = "length"
    """``max_tokens`` was reached, or the context is full."""
    ABORT = "abort"
    """The request was cancelled."""


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt, and how to generate from it."""

    id: str
    """Unique among the requests that are running."""
    prompt: str | Sequence[int]
    """Text or token ids."""
    sampling: SamplingParameters
    special_tokens: bool = True
    """Whether the tokenizer adds special tokens to a text prompt, such as a beginning-of-sequence token."""
    images: Sequence[Array] = ()
    """Height, width and RGB of each."""
    """Image files; the prompt is text then."""
    grammar: Grammar | None = None
    lora: str = ""
    """Name of a LoRA adapter."""
    priority: int = 0
    """Lower values run first. Only for engines that support priorities; others get requests in the right order."""
    cache_salt: str = ""
    """Cached prefixes are shared only between requests with the same salt, by engines that support salts."""


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of a chosen token or of an alternative to it."""

    token: int
    logprob: float
    text: str
    rank: int | None = None
    """1 for the likeliest; None if the engine does not report ranks."""
    others: Sequence[TokenLogprob] = ()
    """The likeliest alternatives in the same position, if they were requested."""


@dataclass(frozen=True)
class TokenDelta:
    """New output of one sequence of a request."""

    index: int
    """Index among the request's ``n`` sequences."""
    tokens: Sequence[int]
    text: str
    """May lag behind the tokens: an incomplete character or a possible start of a stop string is held back."""
    logprobs: Sequence[TokenLogprob] = ()
    """One for each token, if they were requested."""
    finish_reason: FinishReason | None = None
    """None while the sequence is not finished."""
    prompt_logprobs: Sequence[TokenLogprob] = ()
    """Those of the tokens of the prompt, once, if they were requested. The first follows none and has no number."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were in the prefix cache; None if the engine does not say, or did before."""


class RequestListener(Protocol):
    """Receives the output of a request. Called by the engine's thread; must neither block nor raise."""

    def admitted(self, prompt_tokens: int, cached_tokens: int = 0, image_tokens: int = 0) -> None:
        """Receive the number of prompt tokens, and how many of them were cached (if known) or come from images.

        Called first, when the engine starts the request; not called if the request never starts.
        """

    def advanced(self, deltas: Sequence[TokenDelta]) -> None:
        """Receive the output of one step. The request is over when each of its sequences has a finish reason."""

    def failed(self, error: NeriteError) -> None:
        """Receive the error that ended the request."""


@dataclass(frozen=True)
class Capabilities:
    """Features of an engine, known after it was started. Requests for other features are rejected."""

    engine: str
    """Name of the engine in messages."""
    context_length: int
    """Maximum number of tokens of prompt and answer together."""
    max_sequences: int
    """Maximum number of sequences that run at the same time; more wait."""
    top_logprobs: int = 0
    """Maximum number of alternatives to the chosen token that are reported."""
    grammars: frozenset[str] = frozenset()
    adapters: frozenset[str] = frozenset()
    """LoRA adapters that a request may choose."""
    images: bool = False
    priorities: bool = False
    """Whether the engine preempts requests of a lower priority when its memory runs short."""
    sleeps: bool = False
    """Whether it is a ``SleepingEngine`` that was started with the ability to sleep."""


@dataclass(frozen=True)
class EngineStats:
    """Current state of an engine. Token and failure counts are totals since its start."""

    running: int
    """Sequences in the batch."""
    waiting: int
    """Sequences that wait to enter the batch."""
    total_blocks: int
    free_blocks: int
    """Free blocks of the KV cache, including cached blocks that can be evicted."""
    block_size: int
    """Tokens per block."""
    context_length: int
    max_sequences: int
    """As in ``Capabilities``."""
    prompt_tokens: int
    generated_tokens: int
    """Includes the tokens of aborted sequences."""
    failures: int
    """Number of times that a step failed and the engine restarted."""
    # The following are None if the engine does not report them.
    prefix_queries: int | None = None
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits: int | None = None
    preemptions: int | None = None
    drafted: int | None = None
    """Speculative tokens."""
    accepted: int | None = None
    step_began_ns: int = 0
    """When the last step began (``time.monotonic_ns``); 0 if the engine does not time its steps, or ran none."""
    step_ended_ns: int = 0


Stepped: TypeAlias = Callable[[EngineStats], None]
"""Called when the engine is ready, and by its thread after each step, once all listeners were called."""
GivenUp: TypeAlias = Callable[[str], None]
"""Called with the reason when the engine has failed and cannot restart, after all listeners were called."""


class LlmEngine(Protocol):
    """An engine with a model. All methods are thread-safe."""

    def start(self, stepped: Stepped, given_up: GivenUp) -> None:
        """Load the model. From then on ``stepped`` is called after each step. Raises ``NeriteError``.

        ``given_up`` is called if the engine terminates by itself.
        """

    def add(self, request: GenerationRequest, listener: RequestListener) -> None:
        """Add a request; its output goes to the listener.

        Raises ``NeriteError`` if the request is rejected; the listener is not called then.
        """

    def tokenize(self, request: GenerationRequest) -> Sequence[int]:
        """Return the tokens of a prompt that is text or tokens. Raises ``NeriteError``, also if there are too many."""

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included. Raises ``NeriteError``."""

    def abort(self, id: str) -> None:
        """End a request if it runs: its sequences finish with ``ABORT`` and release their memory."""

    def stats(self) -> EngineStats:
        """Return the current state, also while nothing runs."""

    def capabilities(self) -> Capabilities:
        """Return the features of the engine, which must have been started."""

    def is_healthy(self) -> bool:
        """Return whether the engine accepts requests."""

    def is_ready(self) -> bool:
        """Return whether the engine can start a request immediately: False while it restarts after a failure."""

    def stop(self) -> None:
        """Abort all requests and release all resources."""


@runtime_checkable
class AdaptableEngine(Protocol):
    """An engine that takes further LoRA adapters while it runs. Its methods are thread-safe, and wait for it."""

    def load_adapter(self, name: str, path: str) -> None:
        """Load the adapter in the directory ``path``. Raises ``NeriteError``."""

    def unload_adapter(self, name: str) -> None:
        """Refuse requests for an adapter from now on. Raises ``NeriteError``."""


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine that gives the memory of its GPUs back while it has no requests. Its methods are thread-safe."""

    def sleep(self) -> None:
        """Move the weights to the memory of the host, and forget the KV cache. Raises ``NeriteError``."""

    def wake(self) -> None:
        """Take requests again, as before ``sleep``. Raises ``NeriteError``."""


def kept_of_prompt(sampling: SamplingParameters, context_length: int) -> int | None:
    """Return how many of a prompt's last tokens ``truncate_prompt_tokens`` keeps; None for all of them."""
    cut = sampling.truncate_prompt_tokens
    if cut is None or cut > 0:
        return cut
    least = 1 if sampling.max_tokens is None else sampling.max_tokens
    return max(context_length - least, 1)


def longest_text(context_length: int) -> int:
    """Return the characters of a text that is tokenized if it has to fit into a context."""
    return max(context_length * _AVERAGE_TOKEN, _SHORT_PROMPT)


def tokenizable(prompt: str, kept: int | None, context_length: int, count: Callable[[str], int]) -> str:
    """Return the part of a prompt that can contain its last ``kept`` tokens; all of it if all tokens are kept.

    Raises ``InvalidArgument`` if a prompt does not fit into the context. Tokenizing takes seconds for ten megabytes,
    during which no other request is accepted: so its characters are limited, too, and ``count``, which returns the
    number of tokens of a text, is asked of no more text than fits.
    """
    most = longest_text(context_length)
    if kept is not None:
        return prompt[-min((kept + 1) * LONGEST_TOKEN, most) :]
    if len(prompt) > most:
        raise InvalidArgument(
            f"the prompt has {len(prompt)} characters, which do not fit into a context of {context_length} tokens"
        )
    if len(prompt) > max(context_length * _USUAL_TOKEN, _SHORT_PROMPT):
        tokens = 0
        for at in range(0, len(prompt), _SHORT_PROMPT):
            tokens += count(prompt[at : at + _SHORT_PROMPT]) - _CUT_TOKENS
            if tokens > context_length:
                part = f"the first {at + _SHORT_PROMPT} of {len(prompt)} characters of the prompt"
                raise InvalidArgument(f"{part} do not fit into a context of {context_length} tokens")
    return prompt


def refuse_what_is_unknown(sampling: SamplingParameters, known: Container[str], engine: str) -> None:
    """Raise ``Unsupported`` for the first sampling parameter that is set and that an engine does not support."""
    for field in fields(sampling):
        if field.name not in known and getattr(sampling, field.name) != field.default:
            raise Unsupported(
                f"the sampling parameter '{field.name}' is not supported by the engine {engine}: remove it"
            )


def refuse_what_is_lacking(request: GenerationRequest, able: Capabilities) -> None:
    """Raise ``NeriteError`` for the first feature of ``request`` that the engine lacks."""
    sampling = request.sampling
    # The token that greedy decoding chooses is the likeliest.
    if sampling.logprobs is not None and sampling.logprobs > max(able.top_logprobs, sampling.temperature == 0):
        raise Unsupported(
            f"'logprobs' is {sampling.logprobs}, but the engine {able.engine} reports the probability of "
            f"{f'at most {able.top_logprobs} tokens' if able.top_logprobs else 'the chosen token only'}: set it to "
            f"{able.top_logprobs}"
        )
    if request.grammar is not None and request.grammar.kind not in able.grammars:
        raise Unsupported(f"structured output ({request.grammar.kind}) is not supported by the engine {able.engine}")
    if request.grammar is not None and (sampling.ignore_eos or sampling.min_tokens):
        name = "ignore_eos" if sampling.ignore_eos else "min_tokens"
        raise InvalidArgument(f"'{name}' cannot be combined with structured output, which decides where the text ends")
    if request.lora and not able.adapters:
        raise Unsupported(
            f"LoRA feature is not enabled. The engine {able.engine} has no adapters that a request could choose, such "
            f"as '{request.lora}'"
        )
    if request.lora and request.lora not in able.adapters:
        raise Unsupported(f"LoRA {request.lora} is not supported, we currently support {sorted(able.adapters)}")
    if sampling.n > able.max_sequences:
        raise Unsupported(f"'n' is {sampling.n}, but the engine runs at most {able.max_sequences} sequences")


class LoopEngine(ABC):
    """Base class of engines whose framework needs an event loop. A thread runs it, and only that thread calls it.

    It rejects unsupported requests before they reach the framework, and keeps the statistics.
    """

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
        self._take(request, self.tokenize(request), listener)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included. Raises ``InvalidArgument`` for tokens that do not exist."""
        try:
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))
        except Exception as error:  # tokenizers raise anything
            raise InvalidArgument(f"the tokens have no text: {error}") from None

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

    def tokenize(self, request: GenerationRequest) -> list[int]:
        """Return the tokens of a prompt. Raises ``InvalidArgument`` if it has none or too many."""
        prompt = request.prompt
        most = self._able.context_length
        kept = kept_of_prompt(request.sampling, most)
        tokens: list[int]
        if isinstance(prompt, str):
            text = tokenizable(prompt, kept, most, self._count)
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

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))

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
