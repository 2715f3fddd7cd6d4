"""What a head asks of the router: which endpoint, for whom, and the head that members get. Made once for each head."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple
from urllib.parse import unquote

from nerite.admission.policy import IDLE
from nerite.core.client_text import checked, target_error
from nerite.core.errors import InvalidArgument, NeriteError, NotFound, TooLarge, Unsupported
from nerite.core.request import Caller
from nerite.llm.openai.errors import anthropic_body_of, anthropic_reply_of, body_of, reply_of
from nerite.router.admission import ANYBODY
from nerite.router.load_reports import FORMAT
from nerite.router.response_head import HOP_BY_HOP
from nerite.transports import access
from nerite.transports.access import Callers
from nerite.transports.http import reply, routes
from nerite.transports.http.handler import HTTP
from nerite.transports.http.head import RequestHead, field_line, request_line
from nerite.transports.http.origins import BrowserGuard, Cors
from nerite.transports.http.reply import Reply

_POSTED: Final = ("POST",)
"""Methods of paths under ``/v1`` that the cluster file adds."""
_ONCE: Final = ("content-type", "content-encoding", "inference-header-content-length")
"""Headers on whose value router and member must agree."""
_MODELS: Final = "/v1/models/"
_ENCODED_SLASH: Final = re.compile("%2[Ff]")
_LOAD_FORMAT: Final = FORMAT.decode()
_NOT_PASSED: Final = HOP_BY_HOP | {
    b"host", b"content-length", b"expect", b"origin", b"http2-settings", _LOAD_FORMAT.encode(),
    access.CLASS.encode(), *(name.encode() for name in access.OF_ROUTERS),
}  # fmt: skip
"""Fields that members do not get as they are. ``Origin`` was checked; members would compare it with their address."""
_IDLE_LINE: Final = field_line(access.CLASS, IDLE.name)
_VIA: Final = field_line("Via", "1.1 nerite")
_BROWSER: Final = b"sec-fetch-"
_CODINGS: Final = "accept-encoding"
_TENSORS: Final = "infer"
_GENERATED: Final = ("generate", "generate_stream")
_STREAM: Final = "/generate_stream"
_CONTENTS: Final = frozenset((
    *("completions", "chat_completions", "responses", "messages", "count_tokens", "tokenize", "detokenize"),
    *("embeddings", "rerank", "score", "classify", "classify_texts", "speech", "images"),
))  # fmt: skip
_FORMS: Final = ("transcriptions", "translations")
_BY_MODEL: Final = ("model_ready", "model_metadata", "config", "openai_model")
_OF_ROUTERS: Final = frozenset((
    "live", "ready", "health", "ping", "root", "release", "index", "openai_models", "quota",
    *routes.QUERIED, *routes.BACKGROUND, *routes.BATCH_ENDPOINTS,
))  # fmt: skip
_ELSEWHERE: Final = ("server_metadata", "response", "response_items")


class BodyKind(Enum):
    """What is read from a body to choose a member."""

    NOTHING = auto()
    TENSORS = auto()
    """KServe's infer: the sequence, if it names one."""
    TEXT = auto()
    """Triton's generate: the prompt, too."""
    OPENAI = auto()
    """The model is in the body."""
    FORM = auto()
    """The same, and the body is a form."""


class RouteTarget(NamedTuple):
    """What a head asks, and how it is passed on."""

    refusal: Reply | None = None
    """The error reply to a request that is not passed on."""
    local: str = ""
    """Name of an endpoint that the router answers itself."""
    arguments: Mapping[str, str] = {}
    """What stands in the path, of such an endpoint."""
    kind: BodyKind = BodyKind.NOTHING
    model: str = ""
    version: str = ""
    level: str = ""
    """Class that the client asks for."""
    caller: Caller = ANYBODY
    timeout: float = 0.0
    """Seconds; 0: the client states none."""
    session: str = ""
    openai: bool = False
    """Errors have OpenAI's format."""
    anthropic: bool = False
    """Errors have Anthropic's format instead."""
    json_size: int = -1
    """Size of the JSON part of a body; -1: the whole."""
    coding: str = ""
    """Content coding of the body."""
    media_type: str = ""
    """Content type of the body, with its parameters."""
    repeatable: bool = True
    bodiless: bool = False
    """The response has no body, as for HEAD."""
    passes_load: bool = False
    """The client asked for the load report."""
    start: bytes = b""
    """The request line."""
    lines: bytes = b""
    """The header lines for members, without those for the host, the length and the class."""
    class_line: bytes = b""
    identity: bytes = b""
    """Header lines that tell members of Nerite who sends the request."""
    streams: bool = False
    """The answer comes in parts, as the path says."""
    responses: bool = False
    """The request is for a response, which the member may keep."""
    response: str = ""
    """Id of the response that the path names."""

    def request(self, host: bytes, body_size: int, more: bytes = b"", *, idle: bool = False) -> bytes:
        """Return the head for a member; ``more`` are further header lines. ``idle``: its class is the idle one."""
        length = b"Content-Length: %d\r\n" % body_size if body_size or not self.start.startswith(b"GET ") else b""
        level = _IDLE_LINE if idle else self.class_line
        return b"%bHost: %b\r\n%b%b%b%b\r\n" % (self.start, host, self.lines, level, more, length)

    def reply(self, error: NeriteError) -> Reply:
        """Return the reply for an error."""
        if self.anthropic:
            return anthropic_reply_of(error)
        return reply_of(error) if self.openai else reply.error_reply(error)

    def last_event(self, error: NeriteError) -> bytes:
        """Return the event that breaks off a stream of events."""
        if self.anthropic:
            return b"event: error\ndata: %b\n\n" % anthropic_body_of(error)
        return b"data: %b\n\n" % (body_of(error) if self.openai else reply.error_reply(error).body)


class HttpTargets:
    """Makes the targets of heads."""

    def __init__(
        self,
        guard: BrowserGuard,
        session_headers: Sequence[str],
        max_body: int,
        callers: Callers | None = None,
        cors: Cors | None = None,
        member_key: str = "",
        *,
        counts: bool = False,
        paths: Collection[str] = (),
    ) -> None:
        """``callers`` identifies callers if a policy is in force; ``cors`` are the rules for pages of other origins.

        ``member_key`` is what members know the router by. ``counts``: the tokens of answers are counted, so members
        are not told that answers under ``/v1`` may be compressed. ``paths`` are passed on beside those of endpoints.
        """
        self._paths = frozenset(paths)
        self._counts = counts
        self._member_key = member_key
        self._callers = callers
        self._cors = cors
        self._guard = guard
        self._session_headers = session_headers
        self._max_body = max_body

    def of(self, head: RequestHead) -> RouteTarget:
        """Return the target of a head."""
        openai = routes.is_openai(head.path)
        try:
            self._guard.check(head)
            _check_path(head.path)
            if self._cors is not None and (preflight := self._cross_origin(self._cors, head)) is not None:
                return RouteTarget(refusal=preflight)
            if head.content_length > self._max_body:
                raise TooLarge(
                    f"the body has {head.content_length} bytes, more than the {self._max_body} that the router takes. "
                    "Raise max-body in [router] of the cluster file"
                )
            return self._found(head, openai)
        except NeriteError as error:
            plain = RouteTarget(openai=openai, anthropic=routes.is_anthropic(head.path))
            return plain._replace(refusal=plain.reply(error))

    def _cross_origin(self, cors: Cors, head: RequestHead) -> Reply | None:
        """Have replies to ``head`` carry the headers of CORS; return the reply to a preflight request."""
        head.reply_lines = cors.lines(head)
        head.special = head.special or bool(head.reply_lines)
        route = routes.find_route(head.path)
        if route is None:
            return cors.preflight(head, _POSTED) if head.path in self._paths else None
        return cors.preflight(head, route[0].methods)

    def _found(self, head: RequestHead, openai: bool) -> RouteTarget:
        route = routes.find_route(head.path)
        if route is None:
            if head.path in self._paths and head.method == "POST":
                return self._passed(head, BodyKind.OPENAI, repeatable=False)
            more = "; paths in [router] of the cluster file adds others under /v1" if openai else ""
            raise NotFound(f"Not Found ({routes.route_remedy(head.path)}{more})")
        endpoint, arguments = route
        name = endpoint.name
        if head.method not in endpoint.methods and not (head.method == "HEAD" and "GET" in endpoint.methods):
            return RouteTarget(refusal=reply.NOT_ALLOWED_JSON, openai=openai)
        if name == "metrics":
            raise NotFound("metrics have their own port: metrics-port in [router] of the cluster file")
        if name in _OF_ROUTERS:
            return self._local(head, name, arguments, openai)
        model = arguments.get("model", "")
        model = checked(unquote(model) if openai else model, "the model in the path")
        version = checked(arguments.get("version", ""), "the version in the path")
        kind = BodyKind.NOTHING
        if name == _TENSORS:
            kind = BodyKind.TENSORS
        elif name in _GENERATED:
            kind = BodyKind.TEXT
        elif name in _CONTENTS:
            kind = BodyKind.OPENAI
        elif name in _FORMS:
            kind = BodyKind.FORM
        elif name not in _BY_MODEL and name not in _ELSEWHERE:
            raise Unsupported(
                f"the router does not answer {head.method} {head.path}, which concerns a single server: "
                "send it to the server itself"
            )
        target = self._passed(head, kind, model, version)
        return target._replace(responses=name == "responses", response=unquote(arguments.get("response", "")))

    def _local(self, head: RequestHead, name: str, arguments: Mapping[str, str], openai: bool) -> RouteTarget:
        if name in routes.BATCH_ENDPOINTS and head.headers.get("content-encoding", "identity") != "identity":
            raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
        found = {key: checked(unquote(value), f"the {key} in the path") for key, value in arguments.items()}
        caller = self._caller(head) if name in routes.QUERIED or name in routes.BATCH_ENDPOINTS else ANYBODY
        return RouteTarget(local=name, openai=openai, arguments=found, caller=caller)

    def _caller(self, head: RequestHead) -> Caller:
        if head.caller is not None:
            return head.caller
        return ANYBODY if self._callers is None else self._callers.of(access.texts(head.headers.get))

    def _passed(
        self, head: RequestHead, kind: BodyKind, model: str = "", version: str = "", *, repeatable: bool = True
    ) -> RouteTarget:
        _check_once(head)
        get = access.texts(head.headers.get)
        report = kind in (BodyKind.TEXT, BodyKind.OPENAI, BodyKind.FORM)
        wanted = head.headers.get(_LOAD_FORMAT, "")
        counted = self._counts and kind in (BodyKind.OPENAI, BodyKind.FORM)
        lines = [*_passed_fields(head, _CODINGS if counted else ""), _VIA]
        if report or wanted:
            lines.append(field_line(_LOAD_FORMAT, wanted or "text"))
        session = next((value for name in self._session_headers if (value := get(name))), "")
        caller = self._caller(head)
        told = access.identity(self._member_key, caller)
        return RouteTarget(
            identity=b"".join(field_line(name, value) for name, value in told),
            kind=kind,
            model=model,
            version=version,
            level=checked(get(access.CLASS) or "", f"header '{access.CLASS}'"),
            caller=caller,
            timeout=access.timeout_of(get),
            session=checked(session, "the session in a header"),
            openai=routes.is_openai(head.path),
            anthropic=routes.is_anthropic(head.path),
            json_size=HTTP.json_size(head) if kind is BodyKind.TENSORS else -1,
            coding=head.headers.get("content-encoding", "").lower(),
            media_type=head.headers.get("content-type", ""),
            repeatable=repeatable,
            bodiless=head.method == "HEAD",
            passes_load=bool(wanted),
            class_line=_class_line(head),
            streams=head.path.endswith(_STREAM),
            start=request_line(head.method, head.target),
            lines=b"".join(lines),
        )


def _check_path(path: str) -> None:
    """Raise ``InvalidArgument`` for a path that a member may take for another one."""
    # Names of models may have slashes, which are encoded where the name is part of a path.
    plain = _ENCODED_SLASH.sub("/", path) if path.startswith(_MODELS) else path
    if mistake := target_error(plain):
        raise InvalidArgument(f"the path of the request {mistake}: the router does not pass it on")


def _check_once(head: RequestHead) -> None:
    """Raise ``InvalidArgument`` if what says how to read the body occurs twice."""
    seen = [key for name, _ in head.fields if (key := name.lower()) in _ONCE]
    if len(seen) > len(set(seen)):
        raise InvalidArgument(f"a header occurs twice that says how to read the body; these are {', '.join(_ONCE)}")


def _class_line(head: RequestHead) -> bytes:
    value = head.headers.get(access.CLASS, "")
    return field_line(access.CLASS, value) if value else b""


def _passed_fields(head: RequestHead, withheld: str) -> list[bytes]:
    """Return the header lines that members get, without the field ``withheld``."""
    dropped = {token.strip() for token in head.headers.get("connection", "").lower().split(",")}
    lines = []
    for name, value in head.fields:
        key = name.lower()
        raw = key.encode("latin-1")
        if raw in _NOT_PASSED or raw.startswith(_BROWSER) or key in dropped or key == withheld:
            continue
        lines.append(field_line(name, value))
    return lines
