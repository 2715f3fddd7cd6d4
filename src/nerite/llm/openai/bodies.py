"""Reads the bodies of requests: here, or in a helper process if that would block the event loop; and renders templates.

The functions at the end of the file run in the helper. They return client text as bytes, so that the event loop does no
work per character.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial, wraps
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from nerite.core.errors import NeriteError, NotLoaded
from nerite.core.failures import report
from nerite.core.request import CancelReason, RequestHeader
from nerite.core.tensor import Buffer
from nerite.llm.openai import anthropic, tokenization
from nerite.llm.openai.chat_requests import ChatRequest, read_chat
from nerite.llm.openai.chat_templates import ChatTemplate
from nerite.llm.openai.completion_requests import CompletionFields, CompletionRequest, read_completion
from nerite.llm.openai.errors import ApiError, reply_of
from nerite.llm.openai.fields import UnknownField, encoded
from nerite.llm.openai.model_tasks import TASKS
from nerite.llm.openai.responses.request import ResponseCall, read_response
from nerite.llm.openai.sampling import SamplingSetting, written
from nerite.transports.http.awaited_load import AwaitedLoad
from nerite.workers.helper_pool import HelperTimeout

if TYPE_CHECKING:
    from nerite.inference_entry import TransportEntry
    from nerite.transports.http.handler import HttpExchange
    from nerite.transports.http.reply import Reply
    from nerite.workers.helper_pool import HelperCall, HelperPool

_LARGE: Final = 64 * 1024
"""Minimum size in bytes of a body that is parsed in a helper: parsing less takes about as long as handing it over."""
_TIMEOUT_SECONDS: Final = 10.0
_FILE_SECONDS: Final = 60.0
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


def read_body(
    server: TransportEntry,
    connection: HttpExchange,
    endpoint: str,
    parts: Sequence[Buffer],
    then: Callable[[Any], None],
    refusal: Callable[[NeriteError], Reply],
) -> None:
    """Parse a body and what belongs to it, in a helper process if they are large; call ``then`` with the request.

    ``refusal`` returns the reply for an error.
    """
    reader = READERS[endpoint]
    if sum(map(len, parts)) < _LARGE and not reader.holds_files:
        then(reader.read(*parts))
        return

    def answer(*parsed: Any) -> None:
        then(reader.rebuilt(*parsed))

    def again(*parsed: Any) -> None:
        try:
            answer(*parsed)
        except NeriteError as error:
            send_error(connection, refusal, error)
        except Exception as error:
            send_error(connection, refusal, report("openai", error, "in a large request"))

    def answer_or_wait(*parsed: Any) -> None:
        try:
            answer(*parsed)
        except NotLoaded as absent:
            refuse = partial(send_error, connection, refusal)
            AwaitedLoad(server.waits, connection, absent.without_frames(), None, partial(again, *parsed), refuse)

    seconds = _FILE_SECONDS if reader.holds_files else _TIMEOUT_SECONDS
    arguments = [endpoint, *parts]
    PromptHelper(
        *(server.helpers, connection, read_in_helper, arguments, answer_or_wait, "reading the body"), refusal, seconds
    )


def send_error(connection: HttpExchange, refusal: Callable[[NeriteError], Reply], error: NeriteError) -> None:
    """Answer a request with an error. ``refusal`` returns the reply."""
    connection.send([refusal(error).encode()])


# Requests on their way back from the helper process: JSON, and buffers


class BodyReader(NamedTuple):
    """Parser of one kind of body, and the form in which a helper process returns the request."""

    read: Callable[..., Any]
    packed: Callable[[Any], tuple[Any, ...]]
    """Returns the parts of a request that are sent back."""
    rebuilt: Callable[..., Any]
    """Returns the request of these parts."""
    holds_files: bool = False
    """Whether a helper parses even small bodies, because they hold files."""


def _packed_task(asked: Any) -> tuple[Any, ...]:
    plain: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    buffers: list[Buffer] = []
    for name, value in asked._asdict().items():
        if isinstance(value, bytes | memoryview):
            sizes[name] = -1
            buffers.append(value)
        elif isinstance(value, list) and value and isinstance(value[0], bytes | memoryview):
            sizes[name] = len(value)
            buffers += value
        else:
            plain[name] = value
    return {"fields": plain, "sizes": sizes}, *buffers


def _task(kind: type, parsed: Mapping[str, Any], *buffers: memoryview) -> Any:
    fields, at = dict(parsed["fields"]), 0
    for name, size in parsed["sizes"].items():
        fields[name] = buffers[at] if size < 0 else buffers[at : at + size]
        at += abs(size)
    return kind(**{**fields, "unknown": _unknown(fields["unknown"])})


_OF_COMPLETIONS: Final = ("echo", "kept", "tokens")
_OF_CHATS: Final = ("choice", "tool", "first_image", "schemas", "single", "thoughts", "budget", "continued")
_OF_RESPONSES: Final = ("echo", "previous", "store", "sealed", "kinds")
"""Fields of requests that are passed on unchanged."""


def _packed_completion(asked: CompletionRequest) -> tuple[Any, ...]:
    written(asked.wanted.sampling)  # check that it can be sent back and is small
    parsed = {"wanted": asked.wanted, "suffix": bytes(asked.suffix).decode()}
    return parsed | {name: getattr(asked, name) for name in _OF_COMPLETIONS}, *asked.prompts


def _completion(parsed: dict[str, Any], *prompts: memoryview) -> CompletionRequest:
    more = {name: parsed[name] for name in _OF_COMPLETIONS}
    return CompletionRequest(_wanted(parsed["wanted"]), prompts, suffix=parsed["suffix"].encode(), **more)


def _packed_chat(asked: ChatRequest, **more: Any) -> tuple[Any, ...]:
    written(asked.wanted.sampling)
    parsed = {"wanted": asked.wanted, **{name: getattr(asked, name) for name in _OF_CHATS}, **more}
    return parsed, as_json(asked.given), *asked.images


def _chat(parsed: dict[str, Any], given: memoryview, *images: memoryview) -> ChatRequest:
    more = {name: parsed[name] for name in _OF_CHATS}
    return ChatRequest(_wanted(parsed["wanted"]), given=given, images=images, **more)


def _packed_tokenize(asked: CompletionRequest | ChatRequest) -> tuple[Any, ...]:
    return _packed_chat(asked) if isinstance(asked, ChatRequest) else _packed_completion(asked)


def _tokenize(parsed: dict[str, Any], *rest: memoryview) -> CompletionRequest | ChatRequest:
    return _chat(parsed, *rest) if "choice" in parsed else _completion(parsed, *rest)


def _packed_response(asked: ResponseCall | str) -> tuple[Any, ...]:
    if isinstance(asked, str):
        return ({"continues": asked},)
    parsed, *rest = _packed_chat(asked.chat, **{name: getattr(asked, name) for name in _OF_RESPONSES})
    return parsed, asked.items, *rest


def _response(parsed: dict[str, Any], *rest: memoryview) -> ResponseCall | str:
    if "continues" in parsed:
        return str(parsed["continues"])
    items, *chat = rest
    more = {name: parsed[name] for name in _OF_RESPONSES}
    return ResponseCall(_chat(parsed, *chat), items=bytes(items), **more)


def _wanted(parsed: Sequence[Any]) -> CompletionFields:
    wanted = CompletionFields(*parsed)
    settings = {name: SamplingSetting(*setting) for name, setting in wanted.sampling.items()}
    return wanted._replace(sampling=settings, unknown=_unknown(wanted.unknown))


def _unknown(parsed: Sequence[Any]) -> list[UnknownField]:
    return [UnknownField(*each) for each in parsed]


READERS: Final[Mapping[str, BodyReader]] = {
    "completions": BodyReader(read_completion, _packed_completion, _completion),
    "chat_completions": BodyReader(read_chat, _packed_chat, _chat),
    "responses": BodyReader(read_response, _packed_response, _response),
    "messages": BodyReader(anthropic.read_messages, _packed_chat, _chat),
    "count_tokens": BodyReader(anthropic.read_count, _packed_chat, _chat),
    "tokenize": BodyReader(tokenization.read_tokenize, _packed_tokenize, _tokenize),
    "detokenize": BodyReader(tokenization.read_detokenize, _packed_completion, _completion),
    **{
        name: BodyReader(task.read, _packed_task, partial(_task, task.kind), task.takes_file)
        for name, task in TASKS.items()
    },
}
"""By the names of the endpoints (``http/routes.py``)."""


# In the helper process


def _refusing(function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Make ``function`` return an ``ApiError`` as data instead of raising it."""

    @wraps(function)
    def refusing(*arguments: Any) -> tuple[Any, ...]:
        try:
            return function(*arguments)
        except ApiError as error:
            return ({"refused": (error.message, error.param, error.api_code, error.status)},)

    return refusing


@_refusing
def read_in_helper(endpoint: str, *parts: memoryview) -> tuple[Any, ...]:
    """Parse the body of a request to an endpoint."""
    reader = READERS[endpoint]
    return reader.packed(reader.read(*(parts if reader.holds_files else map(_text, parts))))


def _text(body: Buffer) -> bytes:
    """Return a body as bytes. Raises ``ApiError`` if parsing it could exhaust the memory."""
    text = bytes(body)
    if sum(map(text.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        raise ApiError(f"The body has more than {_MAX_VALUES} values.", None, "content_too_large", 413)
    return text


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
