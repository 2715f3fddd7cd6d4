"""Requests to the OpenAI API that follow a plan: their texts, their encoding, and conversations of several turns."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import orjson

from nerite.cli.command import did_you_mean
from nerite.client import ClientError
from nerite.client.connection import Address, HttpClientConnection, Unreachable, text_of
from nerite.tools.bench.forms import Dialogue, Script, Scripts, post
from nerite.tools.bench.measurement import BenchPlan, BenchTarget
from nerite.tools.bench.planning import PLACES, Distribution, PlannedConversation, PlannedRequest, Workload
from nerite.tools.bench.replay import BLOCK, TracedRequest

# Texts: words without meaning, as long as planned.

_SYLLABLES: Final = ("ka", "re", "mi", "to", "na", "lo", "shi", "ve", "du", "pa", "san", "tor", "el", "in")
_LABEL_WORDS: Final = 4
_LABELS: Final = len(_SYLLABLES) ** _LABEL_WORDS
_STARTS: Final = PLACES // _LABELS
"""Number of different beginnings, and of different continuations."""
_NEXT_TEXT: Final = 977
"""Distance of the places of two texts of one request."""


@functools.cache
def _words() -> tuple[str, ...]:
    chosen = np.random.default_rng(0).integers(len(_SYLLABLES), size=_STARTS)
    return tuple(_SYLLABLES[number] for number in chosen)


def made_up_text(place: int, words: int) -> str:
    """Return that many words, the same for the same place, and for other places another beginning."""
    known = _words()
    label, start = place // _STARTS, place % _STARTS
    taken = tuple(
        _SYLLABLES[label // len(_SYLLABLES) ** digit % len(_SYLLABLES)] for digit in range(min(words, _LABEL_WORDS))
    )
    while len(taken) < words:
        taken += known[start : start + words - len(taken)]
        start = 0
    return " ".join(taken)


# Requests by endpoint.

Endpoint = Literal["chat", "completions", "embeddings", "rerank", "score"]
PATHS: Final[Mapping[Endpoint, str]] = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "embeddings": "/embeddings",
    "rerank": "/rerank",
    "score": "/score",
}
STREAMED: Final = ("chat", "completions")
"""Endpoints whose answers are streamed."""
Chat = Sequence[Mapping[str, Any]]
_STREAM: Final = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class PromptForm:
    """Makes requests to an endpoint. Can be pickled and sent to another process."""

    address: Address
    headers: Mapping[str, str]
    endpoint: Endpoint
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request."""

    @property
    def path(self) -> str:
        """Path of the endpoint below the prefix of the address."""
        return ("" if self.address.prefix.endswith("/v1") else "/v1") + PATHS[self.endpoint]

    def document(self, model: str, texts: Sequence[str], messages: Chat = (), output: int = 0) -> dict[str, Any]:
        """Return the body of a request: about ``messages`` for chats, else about ``texts``."""
        content: dict[str, Any]
        match self.endpoint:
            case "chat":
                content = {"messages": messages, **_STREAM}
            case "completions":
                content = {"prompt": texts[0], **_STREAM}
            case "embeddings":
                content = {"input": texts}
            case "rerank":
                content = {"query": texts[0], "documents": texts[1:]}
            case "score":
                content = {"text_1": texts[0], "text_2": texts[1:]}
        if output:
            # Without the latter the model may end the answer earlier.
            content |= {"max_tokens": output, "ignore_eos": True}
        return {"model": model, **content, **self.settings}

    def encoded(self, document: Mapping[str, Any]) -> bytes:
        """Return the encoded request."""
        headers = {**self.headers, "Content-Type": "application/json"}
        return post(self.address, self.path, headers, [orjson.dumps(document)])


@dataclass(frozen=True, slots=True)
class Conversations(Scripts):
    """Conversations drawn from a workload, and sent to an endpoint."""

    form: PromptForm
    workload: Workload
    models: tuple[str, ...]
    words_per_token: float = 1.0
    system_tokens: int = 0
    """Length of the system prompt; 0 for none."""
    prompts: Sequence[Chat] = ()
    """Prompts to send instead of made-up ones, in turn."""
    trace: Sequence[TracedRequest] = ()
    """Requests to send again, in turn; each is a conversation of one turn."""

    def begin(self, share: int, shares: int, run: int = 0) -> Callable[[], Script]:
        """Return a factory of scripts; together the slots of all shares hold conversations 0, 1, 2 and so on."""
        numbers = itertools.count(share, shares)

        def script() -> Script:
            user = _User(self, numbers, run)
            return Script(user.following, dialogue=user)

        return script

    def planned(self, number: int, run: int = 0) -> PlannedConversation:
        """Return the plan of a conversation. The lengths of a trace take the place of those that are drawn."""
        plan = self.workload.conversation(number, run)
        if not self.trace or not (self.trace[number].input_tokens or self.trace[number].text):
            return plan
        traced = self.trace[number]
        drawn = plan.turns[0]
        output = traced.output_tokens or drawn.output
        return plan._replace(turns=(drawn._replace(lengths=(traced.input_tokens,), output=output),))

    def opening(self, plan: PlannedConversation) -> list[Mapping[str, Any]]:
        """Return the messages in front of the first turn."""
        if not self.system_tokens:
            return []
        return [{"role": "system", "content": self._text(plan.system_place, self.system_tokens)}]

    def texts(self, number: int, request: PlannedRequest) -> list[str]:
        """Return the texts of a request of a conversation."""
        if self.trace:
            traced = self.trace[number]
            if traced.text:
                return [traced.text]
            if traced.blocks:
                return [self._block_text(traced)]
        lengths = enumerate(request.lengths)
        return [self._text(request.place + at * _NEXT_TEXT, length) for at, length in lengths]

    def _text(self, place: int, tokens: int) -> str:
        return made_up_text(place, max(1, round(tokens * self.words_per_token)))

    def _block_text(self, traced: TracedRequest) -> str:
        """Return a text whose beginning it shares with requests with the same first blocks."""
        left = traced.input_tokens
        texts = []
        for at, block in enumerate([*traced.blocks, *range(-1, -1 - left // BLOCK, -1)]):
            if left <= 0:
                break
            # Tokens that no block covers are of nobody else's text.
            known = block if at < len(traced.blocks) else hash((traced.at, at))
            texts.append(self._text(known % _LABELS * _STARTS + known * 40_503 % _STARTS, min(left, BLOCK)))
            left -= BLOCK
        return " ".join(texts)


class _User(Dialogue):
    """Holds one conversation after the other on a slot."""

    __slots__ = ("_messages", "_numbers", "_of", "_plan", "_run", "_turn")

    def __init__(self, of: Conversations, numbers: Iterator[int], run: int) -> None:
        super().__init__()
        self._of = of
        self._numbers = numbers
        self._run = run
        self._plan = PlannedConversation(-1, 0, 0, ())
        self._turn = 0
        """Number of requests of the plan that were sent."""
        self._messages: list[Mapping[str, Any]] = []

    def following(self) -> bytes:
        """Return the next request of the conversation, or the first of another."""
        of = self._of
        if self._turn == len(self._plan.turns):
            self._plan, self._turn = of.planned(next(self._numbers), self._run), 0
            self._messages = of.opening(self._plan)
        plan = self._plan
        request = plan.turns[self._turn]
        self._turn += 1
        self.cancel_after = request.cancel_after
        self.listens = self._turn < len(plan.turns)
        self.model = plan.model
        if of.prompts:
            self._messages = [*self._messages, *of.prompts[plan.number % len(of.prompts)]]
            texts = [str(message["content"]) for message in self._messages]
        else:
            texts = of.texts(plan.number, request)
            self._messages.append({"role": "user", "content": texts[0]})
        if of.form.endpoint not in STREAMED:
            self.texts = len(texts) - (of.workload.query is not None)
        model = of.models[plan.model]
        return of.form.encoded(of.form.document(model, texts, self._messages, request.output))

    def heard(self, text: str) -> None:
        """Add the answer to the conversation."""
        self._messages.append({"role": "assistant", "content": text})

    def pause(self) -> float | None:
        """Return the time to think about the answer, or None after the last turn."""
        turns = self._plan.turns
        return turns[self._turn].think if self._turn < len(turns) else None

    def broken(self) -> None:
        """End the conversation."""
        self._turn = len(self._plan.turns)


# Preparation: what is asked for, the length of words, and prompts of a file.

_TEXTS: Final = ("prompt", "text", "text_input")
"""Keys that may hold the prompt in a line of JSON, including those of aiperf and genai-perf."""
_FEW_WORDS: Final = 16
_MORE_WORDS: Final = 48


@dataclass(frozen=True, slots=True)
class PromptLoad:
    """Specifies the requests to send to the OpenAI API."""

    endpoint: Endpoint
    workload: Workload
    in_words: bool = False
    """Lengths are in words, and not in tokens."""
    system_tokens: int = 0
    data: Path | None = None
    """File of prompts to use instead of made-up ones: one per line, as text or JSON."""
    trace: Sequence[TracedRequest] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of each request: ``temperature`` and so on."""
    words: int = 0
    """Length of the prompts in words, even if other lengths are in tokens; 0 if it is that of the workload."""


def prepared_prompts(wanted: PromptLoad, target: BenchTarget, known: Collection[str] | None = None) -> BenchPlan:
    """Return a plan for models of the OpenAI API. Raises ``ClientError``.

    ``known`` are the models that the server lists, if it does. It may have further names for them.
    """
    form = PromptForm(target.address, target.headers, wanted.endpoint, wanted.settings)
    models = tuple(wanted.workload.models)
    for model in models:
        if known is not None and model not in known and (reason := refusal(form, model, target)):
            remedy = did_you_mean(model, known) or f"It has: {', '.join(sorted(known)) or 'none'}."
            raise ClientError(f"the server does not answer as '{model}': {reason}\n    {remedy}")
    prompts = () if wanted.data is None else read_prompts(wanted.data)
    if wanted.endpoint != "chat" and any(len(prompt) != 1 for prompt in prompts):
        raise ClientError(f"{wanted.data} has chats of several messages: send them with --endpoint chat")
    tokens = 1.0
    needs_length = wanted.system_tokens or not (prompts or all(traced.text for traced in wanted.trace or (_NO_TEXT,)))
    if needs_length and not wanted.in_words:
        tokens = tokens_per_word(form, models[0], target)
    workload = wanted.workload
    if wanted.words:
        workload = replace(workload, inputs=Distribution("fixed", (wanted.words * tokens,)))
    scripts = Conversations(form, workload, models, 1 / tokens, wanted.system_tokens, prompts, tuple(wanted.trace))
    return BenchPlan(
        target,
        scripts,
        streaming=wanted.endpoint in STREAMED,
        models=models,
        per_arrival=workload.mean_turns,
    )


_NO_TEXT: Final = TracedRequest(0.0)


def tokens_per_word(form: PromptForm, model: str, target: BenchTarget) -> float:
    """Return the length of made-up words in tokens, by two requests; 1 if the server does not report lengths.

    Raises ``ClientError`` if it refuses the requests.
    """
    few, more = (_prompt_tokens(form, model, target, words) for words in (_FEW_WORDS, _MORE_WORDS))
    return (more - few) / (_MORE_WORDS - _FEW_WORDS) if more > few else 1.0


def refusal(form: PromptForm, model: str, target: BenchTarget) -> str:
    """Return why the server refuses a short request to a model; "" if it answers."""
    try:
        _prompt_tokens(form, model, target, 1)
    except Unreachable:
        raise
    except ClientError as error:
        return str(error)
    return ""


def _prompt_tokens(form: PromptForm, model: str, target: BenchTarget, words: int) -> int:
    """Return how long a prompt is for the server, or 0 if it does not report that, by a request."""
    text = made_up_text(0, words)
    texts = [text] if form.endpoint in ("chat", "completions", "embeddings") else [made_up_text(0, 1), text]
    document = form.document(model, texts, [{"role": "user", "content": text}])
    if form.endpoint in STREAMED:
        del document["stream_options"]
        document |= {"stream": False, "max_tokens": 1}
    connection = HttpClientConnection(target.address, target.headers, target.timeout, target.context())
    try:
        body = [orjson.dumps(document)]
        answer = connection.ask("POST", form.path, body, {"Content-Type": "application/json"})
    finally:
        connection.close()
    if answer.status != 200:
        raise ClientError(text_of(answer.status, answer.body), answer.status)
    usage = orjson.loads(answer.body).get("usage") or {}
    return int(usage.get("prompt_tokens") or usage.get("total_tokens") or 0)


def read_prompts(path: Path) -> list[Chat]:
    """Return the chats in a file. Raises ``ClientError``."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ClientError(f"cannot read the prompts in {path}: {error}") from None
    if not lines:
        raise ClientError(f"{path} contains no prompts")
    return [_of_line(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _of_line(line: str, place: str) -> Chat:
    if not line.startswith("{"):
        return _chat(line)
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ClientError(f"{place} is not JSON: {error}") from None
    if isinstance(document.get("messages"), list):
        messages: Chat = document["messages"]
        return messages
    text = next((document[name] for name in _TEXTS if name in document), None)
    if not isinstance(text, str):
        raise ClientError(f'{place} has no prompt: write {{"prompt": TEXT}} or {{"messages": [...]}}')
    return _chat(text)


def _chat(prompt: str) -> Chat:
    return [{"role": "user", "content": prompt}]
