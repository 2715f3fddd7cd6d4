"""What would hold up the event loop, done in a process beside the server: large bodies are read, and prompts rendered.

The functions at the end run there. What they return crosses as bytes where it is text of clients, so that here nothing
is done for each of its characters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from nerite.core.errors import NeriteError
from nerite.core.failures import report
from nerite.core.request import CancelReason, RequestHeader
from nerite.core.tensor import Buffer
from nerite.llm.openai import embeddings, requests
from nerite.llm.openai import embeddings as reranking
from nerite.llm.openai.chat_templates import ChatTemplate
from nerite.llm.openai.embeddings import EmbeddingRequest, RerankRequest
from nerite.llm.openai.fields import ApiError, encoded, reply_of
from nerite.llm.openai.requests import ChatRequest, CompletionFields, CompletionRequest
from nerite.llm.openai.sampling import SamplingSetting, written
from nerite.workers.helper_pool import HelperTimeout

if TYPE_CHECKING:
    from nerite.transports.http.handler import HttpExchange
    from nerite.workers.helper_pool import HelperCall, HelperPool

LARGE: Final = 64 * 1024
"""Bytes from which on a body is read here: reading less than that takes about as long as handing it over."""
_SECONDS: Final = 10.0
_MOST_VALUES: Final = 2_000_000
"""Values in a body: that many take some 200 MB."""


class PromptHelper:
    """Something that is done before the model can be asked. To its connection it is what runs."""

    id = ""

    def __init__(
        self,
        helpers: HelperPool,
        connection: HttpExchange,
        function: Callable[..., tuple[Any, ...]],
        arguments: Sequence[Any],
        then: Callable[..., None],
        what: str,
    ) -> None:
        """``then`` is called with what ``function`` returns, and may raise ``NeriteError``. ``what`` is said of it."""
        self.header = RequestHeader("", "", ())
        self._connection = connection
        self._then = then
        connection.request = self
        name = f"{__name__}:{function.__name__}"
        self._call: HelperCall = helpers.call(name, arguments, self._answered, what, seconds=_SECONDS)

    def cancel(self, why: CancelReason = CancelReason.CANCELLED) -> None:
        """End it: nobody waits for the reply."""
        self._call.cancel()

    def pause(self, paused: bool) -> None:
        """Go on: there is no reply yet that a client could read too slowly."""

    def _answered(self, values: list[Any], error: NeriteError | None) -> None:
        try:
            if isinstance(error, HelperTimeout):
                raise ApiError(f"{error.message}: make the request smaller", None, "request_too_complex")
            if error is not None:
                raise error
            if isinstance(values[0], dict) and "refused" in values[0]:
                raise ApiError(*values[0]["refused"])
            self._then(*values)
        except NeriteError as failure:
            self._connection.send([reply_of(failure).encode()])
        except Exception as failure:
            self._connection.send([reply_of(report("openai", failure, "in a large request")).encode()])


class BodyReader(NamedTuple):
    """What reads one kind of bodies."""

    here: Callable[[Buffer], Any]
    there: Callable[[memoryview], tuple[Any, ...]]
    """Does it in the helper process."""
    of: Callable[..., Any]
    """From what ``there`` returns to what ``here`` returns."""

    def told(self, then: Callable[[Any], None], *told: Any) -> None:
        """Go on with what was read in the helper process."""
        then(self.of(*told))


def completion_of(told: dict[str, Any], *prompts: memoryview) -> CompletionRequest:
    """Return what ``read_completion`` read."""
    return CompletionRequest(_wanted(told["wanted"]), prompts, told["echo"])


def chat_of(told: dict[str, Any], given: memoryview, *images: memoryview) -> ChatRequest:
    """Return what ``read_chat`` read."""
    return ChatRequest(_wanted(told["wanted"]), told["choice"], told["tool"], given, images, told["first_image"])


def embedding_of(told: dict[str, Any], *texts: memoryview) -> EmbeddingRequest:
    """Return what ``read_embedding`` read."""
    return EmbeddingRequest(texts=texts, **told)


def reranking_of(told: dict[str, Any], query: memoryview, *documents: memoryview) -> RerankRequest:
    """Return what ``read_reranking`` read."""
    return RerankRequest(query=query, documents=documents, **told)


def _wanted(told: Sequence[Any]) -> CompletionFields:
    wanted = CompletionFields(*told)
    return wanted._replace(sampling={name: SamplingSetting(*setting) for name, setting in wanted.sampling.items()})


# In the helper process


def _refusing(function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Have a refusal returned, with all that it says."""

    def refusing(*arguments: Any) -> tuple[Any, ...]:
        try:
            return function(*arguments)
        except ApiError as error:
            return ({"refused": (error.message, error.param, error.api_code, error.status)},)

    refusing.__name__ = function.__name__
    return refusing


def _text(body: Buffer) -> bytes:
    """Return a body that has no more values than memory is there for."""
    text = bytes(body)
    if sum(map(text.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise ApiError(f"The body has more than {_MOST_VALUES} values.", None, "content_too_large", 413)
    return text


@_refusing
def read_completion(body: memoryview) -> tuple[Any, ...]:
    """Read the body of a completion."""
    asked = requests.read_completion(_text(body))
    written(asked.wanted.sampling)  # so that it crosses, and is small
    return {"wanted": asked.wanted, "echo": asked.echo}, *asked.prompts


@_refusing
def read_chat(body: memoryview) -> tuple[Any, ...]:
    """Read the body of a chat."""
    wanted, choice, tool, given, images, first_image = requests.read_chat(_text(body))
    written(wanted.sampling)
    told = {"wanted": wanted, "choice": choice, "tool": tool, "first_image": first_image}
    return told, as_json(given), *images


@_refusing
def read_embedding(body: memoryview) -> tuple[Any, ...]:
    """Read the body of a request for embeddings."""
    told = embeddings.read_embedding(_text(body))._asdict()
    return told, *told.pop("texts")


@_refusing
def read_reranking(body: memoryview) -> tuple[Any, ...]:
    """Read the body of a request to rerank."""
    told = reranking.read_reranking(_text(body))._asdict()
    return told, told.pop("query"), *told.pop("documents")


COMPLETION: Final = BodyReader(requests.read_completion, read_completion, completion_of)
CHAT: Final = BodyReader(requests.read_chat, read_chat, chat_of)
EMBEDDING: Final = BodyReader(embeddings.read_embedding, read_embedding, embedding_of)
RERANKING: Final = BodyReader(reranking.read_reranking, read_reranking, reranking_of)


@_refusing
def render(source: str, origin: str, words: dict[str, str], given: memoryview) -> tuple[Any, ...]:
    """Render a chat template."""
    template = _template(source, origin, tuple(words.items()))
    return (template.render(orjson.loads(given)).encode("utf-8", "surrogatepass"),)


@lru_cache(8)
def _template(source: str, origin: str, words: tuple[tuple[str, str], ...]) -> ChatTemplate:
    """Return a template; to compile one takes longer than to render it."""
    return ChatTemplate(source, origin, dict(words))


def as_json(given: dict[str, Any] | Buffer) -> Buffer:
    """Return what a template is given as JSON. Raises ``ApiError`` for what is nested too deeply."""
    return encoded("messages", given) if isinstance(given, dict) else given
