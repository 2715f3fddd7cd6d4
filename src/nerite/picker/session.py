"""One HTTP request at a gateway: what the gateway tells of it, what it is answered, and where the request goes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from time import monotonic_ns
from typing import Final
from urllib.parse import unquote

from nerite.balancing.member import AttemptEnd, LoadReport, Member, RoutedRequest
from nerite.balancing.pool_balancer import MemberAttempt
from nerite.balancing.prefix_hashes import BYTES_PER_TOKEN, prefix_hashes, prefix_tokens
from nerite.core.client_text import checked_name
from nerite.core.errors import NeriteError
from nerite.picker import answers
from nerite.picker.endpoints import EndpointTable
from nerite.router.body_facts import SequenceFacts, form_facts, generate_facts, openai_facts, sequence_of
from nerite.router.grpc_routing import CallMessages, routed_request
from nerite.router.load_reports import load_report
from nerite.router.pools import RouterPool
from nerite.transports import access
from nerite.transports.grpc.messages import WINDOWS
from nerite.transports.http import routes
from nerite.transports.http.files import TYPE as FORM
from nerite.transports.http.files import form_media_type
from nerite.wire import ext_proc as wire

_OPENAI: Final = "/v1/"
_GRPC_MODELS: Final = "/inference.GRPCInferenceService/Model"
"""Beginning of the methods whose messages name a model, in the same field."""
_GENERATED: Final = ("generate", "generate_stream")
_INFERENCES: Final = ("infer", *_GENERATED)
_FULL_DUPLEX: Final = 4
_BUFFERED: Final = 2
_STATUS: Final = re.compile("[1-5][0-9]{2}")
"""Of a response. It becomes a label of metrics, so nothing else may."""
_FAILED: Final = range(500, 600)
_REFUSED: Final = ("429", "503")
_INFINITE: Final = float("inf")
_MAX_WANTED: Final = 16


class PickSession:
    """Answers the messages of one call of ``Process``, which is about one HTTP request.

    In the mode FULL_DUPLEX_STREAMED, headers and body of the request are kept until an endpoint can be chosen: at the
    end of the body, or as soon as a gRPC call has named its model. If the gateway sends bodies in other ways, it needs
    the answer to the headers first, so the choice does not depend on what is in the body.
    """

    def __init__(
        self,
        table: EndpointTable,
        max_body: int,
        session_headers: tuple[str, ...] = (),
        *,
        conformance: bool = False,
    ) -> None:
        """With ``conformance``, requests may say which endpoint they want, and responses tell who has answered."""
        self._conformance = conformance
        self._table = table
        self._max_body = max_body
        self._session_headers = session_headers
        self._begun = False
        self._request_mode = _FULL_DUPLEX
        self._response_mode = _FULL_DUPLEX
        self._fields = answers.fields_of(wire.HeaderMap())
        self._subset: frozenset[str] | None = None
        self._body = bytearray()
        self._messages = CallMessages(0)
        """Those of a gRPC call."""
        self._decided = False
        """An endpoint was chosen, or the request was refused."""
        self._place: tuple[RouterPool, Member] | None = None
        self._attempt: MemberAttempt | None = None
        self._lent = False
        """The member is lent to the pool of the request."""
        self._status = ""
        self._report: LoadReport | None = None

    # What the gateway sends

    def take(self, message: wire.ProcessingRequest) -> Iterator[wire.ProcessingResponse]:
        """Yield the answers to a message; none if more is needed."""
        if not self._begun:
            self._begun = True
            if message.HasField("protocol_config"):
                self._request_mode = int(message.protocol_config.request_body_mode)
                self._response_mode = int(message.protocol_config.response_body_mode)
        kind = message.WhichOneof("request")
        if message.observability_mode or kind is None:
            return
        if kind == "request_headers":
            self._fields = answers.fields_of(message.request_headers.headers)
            self._messages = CallMessages(WINDOWS.get(self._fields.get("grpc-encoding", ""), 0))
            self._subset = answers.subset_of(message)
            yield from self._take_request_headers(message.request_headers.end_of_stream)
        elif kind == "request_body":
            yield from self._take_request_body(message.request_body.body, message.request_body.end_of_stream)
        elif kind == "request_trailers":
            if not self._decided:
                yield from self._decide(end_of_body=False)
            yield wire.ProcessingResponse(request_trailers=wire.TrailersResponse())
        elif kind == "response_headers":
            served = self._take_response_headers(message)
            if self._conformance and served:
                yield answers.told_served(served)
            else:
                yield wire.ProcessingResponse(response_headers=wire.HeadersResponse())
        elif kind == "response_body":
            yield from self._take_response_body(message.response_body.body, message.response_body.end_of_stream)
        else:
            self.close()
            yield wire.ProcessingResponse(response_trailers=wire.TrailersResponse())

    @property
    def kept(self) -> int:
        """Bytes of the body that are kept."""
        return len(self._body)

    @property
    def decided(self) -> bool:
        """Whether an endpoint was chosen, or the request was refused."""
        return self._decided

    def refuse(self, error: NeriteError) -> wire.ProcessingResponse:
        """Refuse the request, whose body is no longer kept. To be called before it is decided."""
        self._decided = True
        self._body = bytearray()
        return answers.refused(error.http_status, error.message, error.retry_after)

    def close(self, *, cancelled: bool = False) -> None:
        """Note that the request has ended. Repeated calls have no effect."""
        attempt, self._attempt = self._attempt, None
        if attempt is None or self._place is None:
            return
        if not self._status:
            how = AttemptEnd.CANCELLED if cancelled else AttemptEnd.LOST
        elif self._status in _REFUSED:
            how = AttemptEnd.REFUSED
        elif int(self._status) in _FAILED:
            how = AttemptEnd.FAILED
        else:
            how = AttemptEnd.ANSWERED
        pool, member = self._place
        pool.balancer.end(attempt, how, self._report, monotonic_ns())
        pool.answers[member.name, self._status or str(how)] += 1
        pool.under_way -= 1
        if self._lent:
            pool.take_back(member.name)

    # The request

    @property
    def _grpc(self) -> bool:
        return self._fields.get("content-type", "").startswith("application/grpc")

    @property
    def _names_models(self) -> bool:
        return self._grpc and self._fields.get(":path", "").startswith(_GRPC_MODELS)

    def _take_request_headers(self, end: bool) -> Iterator[wire.ProcessingResponse]:
        if not end and self._request_mode == _FULL_DUPLEX and not self._decided:
            return
        if self._decided or (not end and self._request_mode == _BUFFERED):
            yield wire.ProcessingResponse(request_headers=wire.HeadersResponse())
            return
        yield self._choose()

    def _take_request_body(self, body: bytes, end: bool) -> Iterator[wire.ProcessingResponse]:
        if self._request_mode not in (_FULL_DUPLEX, _BUFFERED):
            yield wire.ProcessingResponse(request_body=wire.BodyResponse())
        elif self._names_models and (error := self._follow_messages(body)) is not None:
            if self._place is not None or not self._decided:
                yield answers.refused(error.http_status, error.message)
            self._decided, self._place = True, None
        elif self._decided:
            if self._place is not None:
                yield from answers.request_pieces(body, end)
        elif len(self._body) + len(body) > self._max_body:
            self._decided = True
            yield answers.refused(413, f"the body has more than the {self._max_body} bytes that the picker keeps")
        elif self._request_mode == _BUFFERED:
            self._body += body
            yield self._choose()
            self._body = bytearray()
        else:
            self._body += body
            if end or (self._grpc and self._messages.facts is not None):
                yield from self._decide(end_of_body=end)

    def _follow_messages(self, body: bytes) -> NeriteError | None:
        """Read more of a gRPC call; return the error if it may not be passed on, after which it has ended."""
        try:
            self._messages.feed(memoryview(body))
        except NeriteError as error:
            self.close(cancelled=True)
            return error.without_frames()
        return None

    def _decide(self, *, end_of_body: bool) -> Iterator[wire.ProcessingResponse]:
        """Choose an endpoint, and pass on what was kept of the body."""
        yield self._choose()
        body, self._body = self._body, bytearray()
        if self._place is not None and (body or end_of_body):
            yield from answers.request_pieces(memoryview(body), end_of_body)

    def _choose(self) -> wire.ProcessingResponse:
        """Choose an endpoint; return the answer to the headers, or to a whole body."""
        self._decided = True
        try:
            request, level = self._routed(), self._level()
        except NeriteError as error:
            return answers.refused(error.http_status, error.message)
        if self._conformance and (wanted := self._fields.get(answers.WANTED)):
            hosts = [each.strip() for each in wanted.split(",")][:_MAX_WANTED]
            found = self._table.choose_in_order(request, level, hosts, grpc=self._grpc)
        else:
            found = self._table.choose(request, level, self._subset, grpc=self._grpc)
        if isinstance(found, NeriteError):
            return answers.refused(found.http_status, found.message, found.retry_after)
        self._begin(found.pool, found.member, request, lent=found.lent)
        whole = self._request_mode == _BUFFERED and self._body
        return answers.picked_with_body(found.endpoints) if whole else answers.picked(found.endpoints)

    def _begin(self, pool: RouterPool, member: Member, request: RoutedRequest, *, lent: bool = False) -> None:
        self._place = (pool, member)
        self._attempt = pool.balancer.begin(request, member, monotonic_ns())
        pool.under_way += 1
        self._lent = lent
        if lent:
            pool.lend(member.name)

    def _level(self) -> str:
        return checked_name(self._fields.get(access.CLASS, ""), f"header '{access.CLASS}'")

    def _routed(self) -> RoutedRequest:
        """Return what the choice of a member depends on. Raises ``NeriteError`` for a body that cannot be routed."""
        path = self._fields.get(":path", "").partition("?")[0]
        session = next((value for name in self._session_headers if (value := self._fields.get(name))), "")
        session = checked_name(session, "the session in a header")
        body = memoryview(self._body)
        if self._grpc:
            facts = self._messages.settle()
            single = not path.endswith("/ModelStreamInfer")
            return routed_request(facts, session, single=single, repeatable=False)
        model, version, limit, prompt = "", "", 0.0, memoryview(b"")
        sequence = SequenceFacts()
        if path.startswith(_OPENAI):
            if body:
                media_type = self._fields.get("content-type", "")
                form = form_media_type(media_type) == FORM
                openai = form_facts(body, media_type) if form else openai_facts(body)
                model, limit, prompt = openai.model, openai.answer_limit, openai.prompt
                session = session or openai.user
        elif route := routes.find_route(path):
            model = checked_name(unquote(route.arguments.get("model", "")), "the model in the path")
            version = checked_name(route.arguments.get("version", ""), "the version in the path")
            if body and route.endpoint.name in _GENERATED:
                limit, prompt = generate_facts(body)
            if route.endpoint.name in _INFERENCES:
                sequence = sequence_of(body)
        prefix = prefix_hashes(prompt, model) if prompt else ()
        return RoutedRequest(
            model,
            version,
            prompt_tokens=len(prompt) / BYTES_PER_TOKEN,
            answer_limit=limit or _INFINITE,
            prefix=prefix,
            prefix_tokens=prefix_tokens(len(prefix)),
            session=session,
            sequence=sequence.id,
            sequence_start=sequence.start,
            sequence_end=sequence.end,
            repeatable=False,
        )

    # The response

    def _take_response_headers(self, message: wire.ProcessingRequest) -> str:
        """Note what the headers say; return who has answered, as far as the gateway says."""
        fields = answers.fields_of(message.response_headers.headers)
        status = fields.get(":status", "")
        self._status = status if _STATUS.fullmatch(status) else ""
        line = fields.get("endpoint-load-metrics", "")
        self._report = load_report(line.encode("latin-1")) if line else None
        served = answers.served_of(message)
        self._follow(served)
        if self._place is not None and self._report is not None:
            pool, member = self._place
            pool.balancer.report(member.name, self._report, monotonic_ns())
        if message.response_headers.end_of_stream:
            self.close()
        return served

    def _follow(self, served: str) -> None:
        """Take note that another endpoint has answered than the first that was chosen."""
        if not served or self._place is None or self._attempt is None:
            return
        pool, member = self._place
        found = None if served in (member.http, member.grpc) else self._table.member_at(served)
        if found is not None:
            pool.balancer.end(self._attempt, AttemptEnd.LOST, None, monotonic_ns())
            pool.answers[member.name, str(AttemptEnd.LOST)] += 1
            pool.under_way -= 1
            if self._lent:
                pool.take_back(member.name)
            self._begin(*found, self._attempt.request)

    def _take_response_body(self, body: bytes, end: bool) -> Iterator[wire.ProcessingResponse]:
        if self._attempt is not None and self._place is not None:
            self._place[0].balancer.progress(self._attempt, 1.0, monotonic_ns())
        if end:
            self.close()
        if self._response_mode == _FULL_DUPLEX:
            yield from answers.response_pieces(body, end)
        else:
            yield wire.ProcessingResponse(response_body=wire.BodyResponse())
