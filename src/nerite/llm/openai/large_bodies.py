"""Work that would block the event loop, done in a helper process: parsing large bodies and rendering chat templates.

The functions at the end of the file run in the helper. They return client text as bytes, so that the event loop does no
work per character.
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
from nerite.llm.openai import (
    anthropic,
    classification,
    embeddings,
    images,
    requests,
    responses,
    speech,
    tokens,
    transcriptions,
)
from nerite.llm.openai import embeddings as reranking
from nerite.llm.openai.chat_templates import ChatTemplate
from nerite.llm.openai.classification import ClassifyRequest
from nerite.llm.openai.embeddings import EmbeddingRequest, RerankRequest, ScoreRequest
from nerite.llm.openai.fields import ApiError, UnknownField, encoded, reply_of
from nerite.llm.openai.images import ImageRequest
from nerite.llm.openai.requests import ChatRequest, CompletionFields, CompletionRequest
from nerite.llm.openai.responses import ResponseCall
from nerite.llm.openai.sampling import SamplingSetting, written
from nerite.llm.openai.speech import SpeechRequest
from nerite.llm.openai.transcriptions import TranscriptionRequest
from nerite.workers.helper_pool import HelperTimeout

if TYPE_CHECKING:
    from nerite.transports.http.handler import HttpExchange
    from nerite.transports.http.reply import Reply
    from nerite.workers.helper_pool import HelperCall, HelperPool

LARGE: Final = 64 * 1024
"""Minimum size in bytes of a body that is parsed in a helper: parsing less takes about as long as handing it over."""
_TIMEOUT_SECONDS: Final = 10.0
FILE_SECONDS: Final = 60.0
"""Time limit for a body that holds files."""
_MAX_VALUES: Final = 2_000_000
"""Maximum number of values in a body: that many take about 200 MB."""


class PromptHelper:
    """A helper call that precedes the request to the model. Its connection treats it as the running request."""

    id = ""

    def __init__(
        self,
        helpers: HelperPool,
        connection: HttpExchange,
        function: Callable[..., tuple[Any, ...]],
        arguments: Sequence[Any],
        then: Callable[..., None],
        what: str,
        refusal: Callable[[NeriteError], Reply] = reply_of,
        seconds: float = _TIMEOUT_SECONDS,
    ) -> None:
        """``then`` is called with the results of ``function`` and may raise ``NeriteError``. ``what`` describes it.

        ``refusal`` returns the reply for an error. The call may take ``seconds``.
        """
        self.header = RequestHeader("", "", ())
        self._connection = connection
        self._then = then
        self._refusal = refusal
        connection.request = self
        name = f"{__name__}:{function.__name__}"
        self._call: HelperCall = helpers.call(name, arguments, self._answered, what, seconds=seconds)

    def cancel(self, why: CancelReason = CancelReason.CANCELLED) -> None:
        """Cancel the call because the client is gone."""
        self._call.cancel()

    def pause(self, paused: bool) -> None:
        """Do nothing: no reply is being sent yet."""

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
            self._connection.send([self._refusal(failure).encode()])
        except Exception as failure:
            self._connection.send([self._refusal(report("openai", failure, "in a large request")).encode()])


class BodyReader(NamedTuple):
    """Parser of one kind of body, on the event loop or in the helper process."""

    here: Callable[..., Any]
    there: Callable[..., tuple[Any, ...]]
    """Parses in the helper process."""
    of: Callable[..., Any]
    """Converts the result of ``there`` to that of ``here``."""

    def resume(self, then: Callable[[Any], None], *parsed: Any) -> None:
        """Call ``then`` with the request that the helper process parsed."""
        then(self.of(*parsed))


def completion_of(parsed: dict[str, Any], *prompts: memoryview) -> CompletionRequest:
    """Rebuild the request that ``read_completion`` parsed."""
    more = {name: parsed[name] for name in _OF_COMPLETIONS}
    return CompletionRequest(_wanted(parsed["wanted"]), prompts, suffix=parsed["suffix"].encode(), **more)


def chat_of(parsed: dict[str, Any], given: memoryview, *images: memoryview) -> ChatRequest:
    """Rebuild the request that ``read_chat`` parsed."""
    more = {name: parsed[name] for name in _OF_CHATS}
    return ChatRequest(_wanted(parsed["wanted"]), given=given, images=images, **more)


def embedding_of(parsed: dict[str, Any], *texts: memoryview) -> EmbeddingRequest:
    """Rebuild the request that ``read_embedding`` parsed."""
    return EmbeddingRequest(texts=texts, **{**parsed, "unknown": _unknown(parsed["unknown"])})


def reranking_of(parsed: dict[str, Any], query: memoryview, *documents: memoryview) -> RerankRequest:
    """Rebuild the request that ``read_reranking`` parsed."""
    parsed["unknown"] = _unknown(parsed["unknown"])
    return RerankRequest(query=query, documents=documents, **parsed)


_OF_COMPLETIONS: Final = ("echo", "kept", "tokens")
_OF_CHATS: Final = ("choice", "tool", "first_image", "schemas", "single", "thoughts", "budget", "continued")
_OF_RESPONSES: Final = ("echo", "store", "sealed", "kinds")
"""Fields of requests that are passed on unchanged."""


def _wanted(parsed: Sequence[Any]) -> CompletionFields:
    wanted = CompletionFields(*parsed)
    settings = {name: SamplingSetting(*setting) for name, setting in wanted.sampling.items()}
    return wanted._replace(sampling=settings, unknown=_unknown(wanted.unknown))


def _unknown(parsed: Sequence[Any]) -> list[UnknownField]:
    return [UnknownField(*each) for each in parsed]


# In the helper process


def _refusing(function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Make ``function`` return an ``ApiError`` as data instead of raising it."""

    def refusing(*arguments: Any) -> tuple[Any, ...]:
        try:
            return function(*arguments)
        except ApiError as error:
            return ({"refused": (error.message, error.param, error.api_code, error.status)},)

    refusing.__name__ = function.__name__
    return refusing


def _text(body: Buffer) -> bytes:
    """Return a body as bytes. Raises ``ApiError`` if parsing it could exhaust the memory."""
    text = bytes(body)
    if sum(map(text.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        raise ApiError(f"The body has more than {_MAX_VALUES} values.", None, "content_too_large", 413)
    return text


@_refusing
def read_completion(body: memoryview) -> tuple[Any, ...]:
    """Read the body of a completion."""
    return _parts_of_completion(requests.read_completion(_text(body)))


def _parts_of_completion(asked: CompletionRequest) -> tuple[Any, ...]:
    """Return the parts of a request that are sent back; ``completion_of`` rebuilds it."""
    written(asked.wanted.sampling)  # check that it can be sent back and is small
    parsed = {"wanted": asked.wanted, "suffix": bytes(asked.suffix).decode()}
    return parsed | {name: getattr(asked, name) for name in _OF_COMPLETIONS}, *asked.prompts


@_refusing
def read_chat(body: memoryview) -> tuple[Any, ...]:
    """Read the body of a chat."""
    return _parts_of(requests.read_chat(_text(body)))


def _parts_of(asked: ChatRequest, **more: Any) -> tuple[Any, ...]:
    """Return the parts of a request that are sent back; ``chat_of`` rebuilds it."""
    written(asked.wanted.sampling)
    parsed = {"wanted": asked.wanted, **{name: getattr(asked, name) for name in _OF_CHATS}, **more}
    return parsed, as_json(asked.given), *asked.images


@_refusing
def read_embedding(body: memoryview) -> tuple[Any, ...]:
    """Read the body of a request for embeddings."""
    parsed = embeddings.read_embedding(_text(body))._asdict()
    return parsed, *parsed.pop("texts")


@_refusing
def read_reranking(body: memoryview) -> tuple[Any, ...]:
    """Read the body of a request to rerank."""
    parsed = reranking.read_reranking(_text(body))._asdict()
    return parsed, parsed.pop("query"), *parsed.pop("documents")


@_refusing
def read_tokenize(body: memoryview) -> tuple[Any, ...]:
    """Read the body of a request for tokens."""
    asked = tokens.read_tokenize(_text(body))
    return _parts_of(asked) if isinstance(asked, ChatRequest) else _parts_of_completion(asked)


def tokenize_of(parsed: dict[str, Any], *rest: memoryview) -> CompletionRequest | ChatRequest:
    """Rebuild the request that ``read_tokenize`` parsed."""
    return chat_of(parsed, *rest) if "choice" in parsed else completion_of(parsed, *rest)


@_refusing
def read_detokenize(body: memoryview) -> tuple[Any, ...]:
    """Read the body of a request for the text of tokens."""
    return _parts_of_completion(tokens.read_detokenize(_text(body)))


@_refusing
def read_messages(body: memoryview) -> tuple[Any, ...]:
    """Read the body of a request to Anthropic's API."""
    return _parts_of(anthropic.read_messages(_text(body)))


@_refusing
def read_count(body: memoryview) -> tuple[Any, ...]:
    """Read the body of a request to count tokens."""
    return _parts_of(anthropic.read_count(_text(body)))


@_refusing
def read_response(body: memoryview, earlier: memoryview | None = None) -> tuple[Any, ...]:
    """Read the body of a request for a response, which continues the conversation ``earlier``."""
    asked = responses.read_response(_text(body), b"" if earlier is None else bytes(earlier))
    if isinstance(asked, str):
        return ({"previous": asked},)
    parsed, *rest = _parts_of(asked.chat, **{name: getattr(asked, name) for name in _OF_RESPONSES})
    return parsed, asked.items, *rest


def response_of(parsed: dict[str, Any], *rest: memoryview) -> ResponseCall | str:
    """Rebuild the call that ``read_response`` parsed."""
    if "previous" in parsed:
        return str(parsed["previous"])
    items, *chat = rest
    more = {name: parsed[name] for name in _OF_RESPONSES}
    return ResponseCall(chat_of(parsed, *chat), items=bytes(items), **more)


RESPONSE: Final = BodyReader(responses.read_response, read_response, response_of)
TOKENIZE: Final = BodyReader(tokens.read_tokenize, read_tokenize, tokenize_of)
DETOKENIZE: Final = BodyReader(tokens.read_detokenize, read_detokenize, completion_of)
MESSAGES: Final = BodyReader(anthropic.read_messages, read_messages, chat_of)
COUNT: Final = BodyReader(anthropic.read_count, read_count, chat_of)


@_refusing
def read_scoring(body: memoryview) -> tuple[Any, ...]:
    """Read the body of a request to score."""
    parsed = embeddings.read_scoring(_text(body))._asdict()
    firsts, seconds = parsed.pop("firsts"), parsed.pop("seconds")
    return {**parsed, "count": len(firsts)}, *firsts, *seconds


def scoring_of(parsed: dict[str, Any], *texts: memoryview) -> ScoreRequest:
    """Rebuild the request that ``read_scoring`` parsed."""
    count, unknown = parsed.pop("count"), _unknown(parsed.pop("unknown"))
    return ScoreRequest(firsts=texts[:count], seconds=texts[count:], unknown=unknown, **parsed)


@_refusing
def read_transcription(body: memoryview, content_type: memoryview) -> tuple[Any, ...]:
    """Read the form of a request to transcribe, and its recording."""
    parsed = transcriptions.read_transcription(body, content_type)._asdict()
    return parsed, parsed.pop("samples")


def transcription_of(parsed: dict[str, Any], samples: memoryview) -> TranscriptionRequest:
    """Rebuild the request that ``read_transcription`` parsed."""
    return TranscriptionRequest(samples=samples, **{**parsed, "unknown": _unknown(parsed["unknown"])})


@_refusing
def read_classification(body: memoryview) -> tuple[Any, ...]:
    """Read the body of a request to classify."""
    parsed = classification.read_classification(_text(body))._asdict()
    return parsed, *parsed.pop("texts")


def classification_of(parsed: dict[str, Any], *texts: memoryview) -> ClassifyRequest:
    """Rebuild the request that ``read_classification`` parsed."""
    return ClassifyRequest(texts=texts, **{**parsed, "unknown": _unknown(parsed["unknown"])})


CLASSIFICATION: Final = BodyReader(classification.read_classification, read_classification, classification_of)


@_refusing
def read_speech(body: memoryview) -> tuple[Any, ...]:
    """Read the body of a request for speech."""
    parsed = speech.read_speech(_text(body))._asdict()
    return parsed, parsed.pop("text")


def speech_of(parsed: dict[str, Any], text: memoryview) -> SpeechRequest:
    """Rebuild the request that ``read_speech`` parsed."""
    return SpeechRequest(text=bytes(text), **{**parsed, "unknown": _unknown(parsed["unknown"])})


@_refusing
def read_images(body: memoryview) -> tuple[Any, ...]:
    """Read the body of a request for images."""
    parsed = images.read_images(_text(body))._asdict()
    return parsed, parsed.pop("prompt")


def images_of(parsed: dict[str, Any], prompt: memoryview) -> ImageRequest:
    """Rebuild the request that ``read_images`` parsed."""
    rebuilt = {"unknown": _unknown(parsed["unknown"]), "size": tuple(parsed["size"])}
    return ImageRequest(prompt=bytes(prompt), **{**parsed, **rebuilt})


IMAGES: Final = BodyReader(images.read_images, read_images, images_of)
SPEECH: Final = BodyReader(speech.read_speech, read_speech, speech_of)
TRANSCRIPTION: Final = BodyReader(transcriptions.read_transcription, read_transcription, transcription_of)
SCORING: Final = BodyReader(embeddings.read_scoring, read_scoring, scoring_of)
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
    """Return a compiled template; cached, because compiling takes longer than rendering."""
    return ChatTemplate(source, origin, dict(words))


def as_json(given: dict[str, Any] | Buffer) -> Buffer:
    """Return the variables of a template as JSON. Raises ``ApiError`` if they are nested too deeply."""
    return encoded("messages", given) if isinstance(given, dict) else given
