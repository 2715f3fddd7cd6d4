"""What an engine for language models has to offer: requests in, token by token out, at any time.

An engine runs in the worker process of its model and batches by itself: requests join and leave between two steps.
What is asked of it and what it says is plain data, so that no other module knows which engine it is. An engine refuses
by name what it cannot do, in ``add``, and never leaves it out in silence. It knows no deadlines: the server aborts who
is late, exactly then.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Final, Protocol, TypeAlias

from nerite.core.errors import InvalidArgument, NeriteError, Unsupported
from nerite.llm.request import SamplingParameters
from nerite.llm.structured_output import Grammar

LONGEST_TOKEN: Final = 256
"""Characters: more than any that is known has. The longest of most vocabularies are 128 spaces."""


class FinishReason(Enum):
    """Why a sequence ended. The server's own, whatever an engine says of sequences that were stopped."""

    STOP = "stop"
    """The model said that it is done, or a stop token or string came."""
    LENGTH = "length"
    """``max_tokens``, or the context is full."""
    ABORT = "abort"
    """Nobody wanted the rest."""


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt, and what is wanted of it."""

    id: str
    """Of the request, unique among those that run."""
    prompt: str | Sequence[int]
    """Text, or the tokens of it."""
    sampling: SamplingParameters
    special_tokens: bool = True
    """Whether the tokenizer adds to a text what it adds to any, such as a token for its beginning."""
    images: Sequence[bytes] = ()
    """Files. The prompt is text then."""
    grammar: Grammar | None = None
    lora: str = ""
    """The name of an adapter."""
    priority: int = 0
    """Lower ones first. Only for an engine that knows priorities; any other gets requests in the right order."""
    cache_salt: str = ""
    """What was computed of a prompt is used for requests with the same salt alone, by an engine that knows salts."""


@dataclass(frozen=True)
class TokenLogprob:
    """How likely a token was that was chosen, or that might have been."""

    token: int
    logprob: float
    text: str
    rank: int | None = None
    """1 for the likeliest; None where the engine does not tell."""
    others: Sequence[TokenLogprob] = ()
    """The likeliest ones in the same place, if they were asked for."""


@dataclass(frozen=True)
class TokenDelta:
    """What is new of one sequence of a request."""

    index: int
    """Which of its ``n`` sequences."""
    tokens: Sequence[int]
    text: str
    """May lag behind the tokens: what can be the start of a stop string, or half of a character, waits."""
    logprobs: Sequence[TokenLogprob] = ()
    """One for each token, if they were asked for."""
    finish_reason: FinishReason | None = None
    """None while more comes."""


class RequestListener(Protocol):
    """Whoever waits for what becomes of a request. Called by the engine's thread; must not block and not raise."""

    def admitted(self, prompt_tokens: int, cached_tokens: int = 0, image_tokens: int = 0) -> None:
        """Take how many tokens the prompt has: of them, those that were computed before, if that is known, and images.

        Called first, when the engine begins with the request; not at all if it comes to nothing.
        """

    def advanced(self, deltas: Sequence[TokenDelta]) -> None:
        """Take what one step has brought. The request is over when each of its sequences has a finish reason."""

    def failed(self, error: NeriteError) -> None:
        """Take the reason why nothing more comes."""


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do. Asked at load; what is not here is refused."""

    engine: str
    """Its name in messages."""
    context_length: int
    """Tokens of prompt and answer together that a sequence can have."""
    most_sequences: int
    """That run at the same time; more wait."""
    top_logprobs: int = 0
    """How many alternatives to the chosen token it tells of."""
    grammars: frozenset[str] = frozenset()
    adapters: frozenset[str] = frozenset()
    """LoRA adapters that may be chosen by request."""
    images: bool = False
    priorities: bool = False
    """It has those of a lower priority make room for others, when there is too little for all that it has."""


@dataclass(frozen=True)
class EngineStats:
    """How it is with an engine at this moment."""

    running: int
    """Sequences in the batch."""
    waiting: int
    """Sequences that are not in it."""
    total_blocks: int
    free_blocks: int
    """Of the KV cache; those that may be used again are free."""
    block_size: int
    """Tokens that a block holds."""
    context_length: int
    most_sequences: int
    """As ``Capabilities`` have them."""
    prompt_tokens: int
    generated_tokens: int
    """Since the engine started, those of sequences that were cut short, too."""
    failures: int
    """Times that a step failed, and the engine began anew."""
    # None where the engine does not tell.
    prefix_queries: int | None = None
    """Tokens of prompts that were looked for in the cache, since the engine started."""
    prefix_hits: int | None = None
    preemptions: int | None = None
    drafted: int | None = None
    """Tokens that were guessed ahead."""
    accepted: int | None = None


Stepped: TypeAlias = Callable[[EngineStats], None]
"""Called when the engine is ready, and by its thread after each step, once all listeners have heard of it."""
GivenUp: TypeAlias = Callable[[str], None]
"""Called with the reason when the engine has failed and cannot begin anew, after all listeners have heard of it."""


class LlmEngine(Protocol):
    """An engine with a model. All methods may be called from any thread."""

    def start(self, stepped: Stepped, given_up: GivenUp) -> None:
        """Load the model. ``stepped`` is told how it is from now on. Raises ``NeriteError``.

        ``given_up`` is told if it ever comes to an end by itself.
        """

    def add(self, request: GenerationRequest, listener: RequestListener) -> None:
        """Take a request up; the listener is told what becomes of it.

        Raises ``NeriteError`` for what cannot be done; the listener hears nothing then.
        """

    def abort(self, id: str) -> None:
        """End a request, if it runs: its sequences finish with ``ABORT`` and give their memory back."""

    def stats(self) -> EngineStats:
        """Return how it is now, also while nothing runs."""

    def capabilities(self) -> Capabilities:
        """Return what it can do. For one that was started."""

    def is_healthy(self) -> bool:
        """Return whether it takes requests."""

    def is_ready(self) -> bool:
        """Return whether it can begin with a request at once: not while it begins anew after a failure."""

    def stop(self) -> None:
        """Abort what runs and give everything back."""


def kept_of_prompt(sampling: SamplingParameters, context_length: int) -> int | None:
    """Return how many of a prompt's last tokens are taken, by ``truncate_prompt_tokens``; None for all of them."""
    cut = sampling.truncate_prompt_tokens
    if cut is None or cut > 0:
        return cut
    least = 1 if sampling.max_tokens is None else sampling.max_tokens
    return max(context_length - least, 1)


def tokenizable(prompt: str, kept: int | None, context_length: int) -> str:
    """Return the end of a prompt that the last ``kept`` of its tokens come from; all of it if all are kept.

    Raises ``InvalidArgument`` for one that is too long whatever its tokens are: to count them takes seconds for each
    ten megabytes, in which nothing else is taken up.
    """
    if kept is not None:
        return prompt[-(kept + 1) * LONGEST_TOKEN :]
    if len(prompt) > context_length * LONGEST_TOKEN:
        raise InvalidArgument(
            f"the prompt has {len(prompt)} characters, which no context of {context_length} tokens has room for"
        )
    return prompt


def refuse_what_is_unknown(sampling: SamplingParameters, known: Container[str], engine: str) -> None:
    """Raise ``Unsupported`` for the first sampling parameter that says something and that an engine does not know."""
    for field in fields(sampling):
        if field.name not in known and getattr(sampling, field.name) != field.default:
            raise Unsupported(
                f"the sampling parameter '{field.name}' is not offered by the engine {engine}: take it out"
            )


def refuse_what_is_lacking(request: GenerationRequest, able: Capabilities) -> None:
    """Raise ``NeriteError`` for the first thing in ``request`` that the engine cannot do."""
    sampling = request.sampling
    if sampling.logprobs is not None and sampling.logprobs > able.top_logprobs:
        raise Unsupported(
            f"'logprobs' is {sampling.logprobs}, and the engine {able.engine} tells the probability of "
            f"{f'{able.top_logprobs} tokens at most' if able.top_logprobs else 'the chosen token alone'}: set it to "
            f"{able.top_logprobs}"
        )
    if request.images and not able.images:
        raise Unsupported("the model takes no images: leave 'image' out")
    if request.grammar is not None and request.grammar.kind not in able.grammars:
        raise Unsupported(f"structured output ({request.grammar.kind}) is not offered by the engine {able.engine}")
    if request.grammar is not None and (sampling.ignore_eos or sampling.min_tokens):
        name = "ignore_eos" if sampling.ignore_eos else "min_tokens"
        raise InvalidArgument(
            f"'{name}' and structured output contradict each other: the text ends where its form does"
        )
    if request.lora and not able.adapters:
        raise Unsupported(
            f"LoRA feature is not enabled. The engine {able.engine} has no adapters that a request can choose, such as "
            f"'{request.lora}'"
        )
    if request.lora and request.lora not in able.adapters:
        raise Unsupported(f"LoRA {request.lora} is not supported, we currently support {sorted(able.adapters)}")
    if sampling.n > able.most_sequences:
        raise Unsupported(f"'n' is {sampling.n}, and the engine runs {able.most_sequences} sequences at most")
