"""Handler of the router's HTTP port: passes requests on, and answers what concerns all members itself."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from time import monotonic_ns
from typing import Any, Final, cast

from nerite import __version__
from nerite.balancing.member import RoutedRequest
from nerite.balancing.prefix_hashes import BYTES_PER_TOKEN, prefix_hashes, prefix_tokens
from nerite.balancing.response_ids import tag_in
from nerite.cluster.settings import RouterSettings
from nerite.core.errors import NeriteError, TooLarge, Unsupported
from nerite.core.execution_observer import TraceContext
from nerite.core.failures import report
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.work_loop import WorkLoops
from nerite.ledger.ledger import Ledger
from nerite.ledger.usage import UsageQuery
from nerite.llm.openai.batch_api import BatchApi
from nerite.llm.openai.errors import reply_of
from nerite.router.accounting import RouterLedger
from nerite.router.admission import AdmissionRequest, RouterAdmission
from nerite.router.body_facts import SequenceFacts, form_facts, generate_facts, lora_of, openai_facts, sequence_of
from nerite.router.exchange import RoutedExchange
from nerite.router.http_members import HttpMembers
from nerite.router.http_relay import HttpRelay
from nerite.router.http_targets import BodyKind, HttpTargets, RouteTarget
from nerite.router.merged_lists import MergedLists
from nerite.router.pools import PoolTable
from nerite.transports.access import Lock, SenderHeaders, figures_seen, key_refusal, operator_refusal
from nerite.transports.http import content_coding, reply
from nerite.transports.http.background import BackgroundApi, not_ready
from nerite.transports.http.connection import HttpConnection
from nerite.transports.http.handler import BackgroundCalls, HttpExchange
from nerite.transports.http.head import RequestHead, field_line
from nerite.transports.http.reply import Reply
from nerite.transports.http.routes import BACKGROUND, BATCH_ENDPOINTS, OF_TENANTS

_UNHEALTHY: Final = Reply(503, b"", reply.PLAIN)
_READINESS: Final = {"ready": reply.BAD_REQUEST, "health": _UNHEALTHY, "ping": _UNHEALTHY}
"""Replies of a router that is not ready, by endpoint."""
_LINKS: Final = reply.json_reply({"server": "/v2", "health": "/v2/health/ready", "openai_models": "/v1/models"})
_NO_BATCHES: Final = "add batches to [router] of the cluster file"
_LARGEST_QUESTION: Final = 64 * 1024
"""Bytes of a body that is sent to all members."""
OF_ALL_TENANTS: Final = "statistics"
"""Category of endpoints that tell the usage and quotas of all tenants, as servers call it."""
_TENANTS_KEY: Final = "add admin-key to [router] of the cluster file (docs/router.md)"
_NO_TENANTS: Final[dict[str, list[Any]]] = {"tenants": [], "models": [], "use": []}


class RouterService:
    """Handler of every connection to the HTTP port."""

    def __init__(
        self,
        table: PoolTable,
        members: HttpMembers,
        targets: HttpTargets,
        settings: RouterSettings,
        admission: RouterAdmission | None = None,
        accounting: RouterLedger | None = None,
    ) -> None:
        """``accounting`` makes a row for each request."""
        self._accounting = accounting
        self.ledger: Ledger | None = None
        """Answers what requests have used."""
        self.locks: Mapping[str, Lock] = {}
        """What a request needs for ``OF_ALL_TENANTS``."""
        self._admission = admission
        self._table = table
        self._members = members
        self._targets = targets
        self._settings = settings
        self._lists = MergedLists(table, members)
        self._background_calls = BackgroundCalls()
        self._openai_calls = BackgroundCalls(reply_of)
        self.batch_api = BatchApi(None, _NO_BATCHES)
        """Answers the endpoints of files and batches."""
        self.background = BackgroundApi(WorkLoops())
        """Answers the endpoints of the loops beside the requests."""
        self._prefix = any(pool.settings.balancing.prefix for pool in table.pools)
        self.draining = False
        """The router is not ready: it is about to stop."""

    def begin(self, head: RequestHead) -> Reply | None:
        """Return the error reply to a request that is refused because of its head."""
        if head.route is None:
            head.route = self._targets.of(head)
        target: RouteTarget = head.route
        return target.refusal

    def receive_buffer(self, head: RequestHead) -> memoryview | None:
        """Return None: any memory will do."""
        return None

    def handle(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
        """Pass a request on, or answer it."""
        arrived = monotonic_ns()
        target: RouteTarget = head.route
        try:
            if target.local:
                self._answer(connection, head, target, body)
                return
            relay = self._relay(cast(HttpConnection, connection), target, body, arrived)
        except NeriteError as error:
            connection.send([target.reply(error).encode()])
            return
        except Exception as error:
            connection.send([target.reply(report("router", error, f"in {head.method} {head.path}")).encode()])
            return
        connection.request = relay
        relay.exchange.begin(arrived)

    def _relay(self, client: HttpConnection, target: RouteTarget, body: memoryview, arrived_ns: int) -> HttpRelay:
        """Return the relay of a request, whose exchange has not begun. Raises ``NeriteError``."""
        routed = self._routed(target, body)
        settings = self._settings
        timeout = min(target.timeout or settings.timeout, settings.timeout or target.timeout)
        span = client.outer_span
        relay = HttpRelay(client, target, body, self._members, b"" if span is None else _span_lines(span))
        if span is not None and target.caller.trusted:
            relay.attempt = span.request_id
        relay.exchange = exchange = RoutedExchange(
            self._table,
            relay,
            routed,
            level=target.level,
            attempts=settings.attempts,
            timeout=timeout,
            gate=self._admission,
            asks=None if self._admission is None else _asks(target, routed, len(body)),
            waits=target.kind is not BodyKind.NOTHING,
        )
        if self._accounting is not None and target.kind is not BodyKind.NOTHING:
            tokens = target.kind is not BodyKind.TENSORS
            exchange.account = self._accounting.open(
                target.caller.tenant, routed, arrived_ns, tokens=tokens, attempt=relay.attempt
            )
        return relay

    def _routed(self, target: RouteTarget, body: memoryview) -> RoutedRequest:
        """Return what the choice of a member depends on. Raises ``NeriteError`` for a body that cannot be routed."""
        if target.kind is BodyKind.NOTHING:
            stored_at = tag_in(target.response)
            return RoutedRequest(target.model, target.version, repeatable=target.repeatable, stored_at=stored_at)
        if target.coding and target.coding != "identity":
            body = self._unpacked(target, body)
        model, prompt, limit, session = target.model, memoryview(b""), 0.0, target.session
        streams = target.streams
        sequence, stored_at = SequenceFacts(), ""
        if target.kind in (BodyKind.OPENAI, BodyKind.FORM):
            form = target.kind is BodyKind.FORM
            facts = form_facts(body, target.media_type) if form else openai_facts(body)
            model, prompt, limit, streams = self._meant(facts.model), facts.prompt, facts.answer_limit, facts.streams
            session, stored_at = session or facts.user, tag_in(facts.continues)
        else:
            sequence = sequence_of(body if target.json_size < 0 else body[: target.json_size])
            if target.kind is BodyKind.TENSORS:
                if not (sequence.id or session):
                    return RoutedRequest(model, target.version, answer_tokens=1.0, repeatable=target.repeatable)
            else:
                limit, prompt = generate_facts(body)
        prefix = prefix_hashes(prompt, model) if self._prefix and prompt else ()
        return RoutedRequest(
            model,
            target.version,
            prompt_tokens=len(prompt) / BYTES_PER_TOKEN,
            answer_limit=limit or float("inf"),
            lora="" if target.kind is BodyKind.TENSORS else self._adapter_of(model, body),
            prefix=prefix,
            prefix_tokens=prefix_tokens(len(prefix)),
            session=session,
            sequence=sequence.id,
            sequence_start=sequence.start,
            sequence_end=sequence.end,
            tenant="" if self._admission is None else target.caller.tenant,
            repeatable=target.repeatable and not sequence.id,
            streams=streams,
            stored_at=stored_at,
        )

    def _meant(self, name: str) -> str:
        """Return the model by which a member is chosen for a name, which may be an alias."""
        aliases = self._settings.model_aliases
        return next((model for pattern, model in aliases if fnmatchcase(name, pattern)), name)

    def _adapter_of(self, model: str, body: memoryview) -> str:
        """Return the LoRA adapter that a request uses; empty if that is not known."""
        return model if self._table.is_adapter(model) else lora_of(body)

    def _unpacked(self, target: RouteTarget, body: memoryview) -> memoryview:
        """Return the body without its coding. Raises ``TooLarge`` if that would block other requests."""
        content_coding.check_coding(target.coding)
        plain = content_coding.decompress_small(body, self._settings.max_body, alone=True)
        if plain is None:
            raise TooLarge(
                f"a compressed body of {len(body)} bytes is too large for the router, which has to read it: "
                "send it without Content-Encoding"
            )
        return plain

    def _answer(self, connection: HttpExchange, head: RequestHead, target: RouteTarget, body: memoryview) -> None:
        """Answer what concerns all members."""
        if target.local in OF_TENANTS:
            self._answer_of_tenants(connection, head, target)
        elif target.local in BACKGROUND:
            self._answer_of_background(connection, head, target, body)
        elif target.local in BATCH_ENDPOINTS:
            sender = SenderHeaders({}, target.caller)
            self.batch_api.answer(target.local, connection, body, sender, **target.arguments)
        elif target.local == "own_usage":
            tenant = "" if self._admission is None else target.caller.tenant
            self._openai_calls.start(connection, self._usage(UsageQuery.parse(head.query, time.time(), tenant)))
        elif target.local == "index":
            if len(body) > _LARGEST_QUESTION:
                raise TooLarge(f"the body has {len(body)} bytes, more than the {_LARGEST_QUESTION} for this request")
            self._background_calls.start(connection, self._lists.index(bytes(body)))
        elif target.local == "openai_models":
            self._background_calls.start(connection, self._lists.openai_models())
        elif target.local == "release":
            connection.send([reply.json_reply({"version": __version__}).encode()])
        elif target.local == "root":
            connection.send([_LINKS.encode()])
        elif target.local in _READINESS and (self.draining or not self._table.ready):
            connection.send([not_ready(self._table.obstacle(), _READINESS[target.local]).encode()])
        else:
            connection.send([reply.EMPTY.encode()])

    def _answer_of_tenants(self, connection: HttpExchange, head: RequestHead, target: RouteTarget) -> None:
        """Send the figures of all tenants, or those of the tenant who asks without the key. Raises ``NeriteError``."""
        admission = self._admission
        refusal = key_refusal(self.locks, OF_ALL_TENANTS, head)
        refusal, tenant = figures_seen(
            refusal,
            has_key=refusal is None and OF_ALL_TENANTS in self.locks,
            callers=None if admission is None else admission.callers,
            caller=lambda: target.caller,
            remedy=_TENANTS_KEY,
        )
        if refusal is not None:
            connection.send([refusal.encode()])
        elif target.local == "quota":
            quota = {} if admission is None else admission.quota(tenant)
            connection.send([reply.json_reply(quota or _NO_TENANTS).encode()])
        else:
            query = replace(UsageQuery.parse(head.query, time.time(), None), tenant=tenant)
            self._background_calls.start(connection, self._usage(query))

    def _answer_of_background(
        self, connection: HttpExchange, head: RequestHead, target: RouteTarget, body: memoryview
    ) -> None:
        """Send or change what concerns the loops beside the requests, which are of all tenants."""
        remedy = "" if self._admission is None else "admin-key in [router] of the cluster file"
        refusal = operator_refusal(self.locks, OF_ALL_TENANTS, head, remedy)
        if refusal is not None:
            connection.send([refusal.encode()])
        else:
            getattr(self.background, target.local)(connection, body, **target.arguments)

    async def _usage(self, query: UsageQuery) -> Reply:
        """Return what the requests of a tenant, or of all, have used."""
        if self.ledger is None:
            raise Unsupported("the router has no ledger: add ledger to [router] of the cluster file (docs/ledger.md)")
        return reply.json_reply(query.to_json(await self.ledger.read(query.sums)))

    def handle_again(self, connection: HttpExchange, meaning: Any, data: bytearray) -> None:
        """Fail: no request is remembered."""
        raise AssertionError("no request of a router is remembered")

    def answer(self, connection: HttpExchange, request: InferenceRequest, response: InferenceResponse) -> None:
        """Fail: a router has no inferences of its own."""
        raise AssertionError("a router has no inferences of its own")


def _asks(target: RouteTarget, routed: RoutedRequest, size: int) -> AdmissionRequest | None:
    """Return what a request asks of admission control; None if it is not to a model."""
    if target.kind is BodyKind.NOTHING:
        return None
    text = target.kind is not BodyKind.TENSORS
    limit = routed.answer_limit
    return AdmissionRequest(
        target.caller,
        routed.model,
        text,
        math.ceil(routed.prompt_tokens) if text else size,
        int(limit) if limit < math.inf else 0,
    )


def _span_lines(span: TraceContext) -> bytes:
    """Return the header lines of a trace context."""
    return b"".join(field_line(name, value) for name, value in span.carrier.items())
