"""What the endpoints under ``/v1`` share: they read bodies, find the model, and submit requests to it."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from nerite.config.options import OpenAiOptions
from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest, RepeatedRequest
from nerite.llm.openai.bodies import read_body
from nerite.llm.openai.errors import reply_of
from nerite.llm.openai.fields import UnknownField
from nerite.llm.openai.model_tasks import TASKS, ModelTask, TaskRequest
from nerite.llm.openai.replies import SharedReply
from nerite.llm.openai.served_models import ServedModels
from nerite.llm.openai.text_model import ModelRequest
from nerite.transports.access import SenderHeaders

if TYPE_CHECKING:
    from nerite.inference_entry import TransportEntry
    from nerite.transports.http.handler import HttpExchange
    from nerite.transports.http.reply import Reply

_log = logging.getLogger("nerite.http")
_MAX_TOLD: Final = 256
"""Number of unknown fields that are logged."""


class OpenAiServing:
    """Reads bodies and submits requests."""

    def __init__(self, server: TransportEntry, options: OpenAiOptions) -> None:
        self.server = server
        self.models = ServedModels(server, options.aliases)
        self._strict = options.strict
        self._told: set[UnknownField] = set()
        """Unknown fields that were logged."""

    def read(
        self,
        connection: HttpExchange,
        endpoint: str,
        body: memoryview,
        then: Callable[[Any], None],
        refusal: Callable[[NeriteError], Reply] = reply_of,
        more: Sequence[bytes] = (),
    ) -> None:
        """Parse a body and what belongs to it, in a helper process if they are large; call ``then`` with the request.

        ``refusal`` returns the reply for an error.
        """
        read_body(self.server, connection, endpoint, [body, *more], then, refusal)

    def pass_over(self, unknown: Sequence[UnknownField]) -> None:
        """Log each unknown field once, or refuse the first one if the server is strict."""
        if self._strict and unknown:
            raise unknown[0].error()
        for field in unknown:
            if field in self._told or len(self._told) >= _MAX_TOLD:
                continue
            self._told.add(field)
            meant = f" (did the client mean '{field.meant}'?)" if field.meant else ""
            _log.warning(
                "requests under /v1 have the field '%s', which is unknown here and passed over%s; "
                "--openai-strict=true refuses such requests",
                field.path,
                meant,
            )

    def submit(
        self, reply: SharedReply, name: str, asked: Sequence[ModelRequest], sender: SenderHeaders, answers: int = 1
    ) -> None:
        """Submit all requests of a reply, of which consecutive groups of ``answers`` have the same prompt."""
        key = sender.idempotency_key
        if key is not None:
            parts = [key._replace(part=part, parts=len(asked)) for part in range(len(asked))]
            asked = [
                ModelRequest(header.changed(idempotency_key=part), data)
                for (header, data), part in zip(asked, parts, strict=True)
            ]
        now = time.monotonic_ns()
        names = [name] if len(asked) == 1 else [f"{name}-{number}" for number in range(len(asked))]
        requests = [
            (RepeatedRequest if number % answers else InferenceRequest)(header, data, reply, now, each)
            for number, ((header, data), each) in enumerate(zip(asked, names, strict=True))
        ]
        # Validate all headers before submitting the first request.
        for request in requests:
            self.server.version_of(request)
        reply.begin(requests, self._submit_one)

    def _submit_one(self, request: InferenceRequest) -> None:
        self.server.version_of(request).submit(request)

    def run_task(self, endpoint: str, connection: HttpExchange, body: memoryview, sender: SenderHeaders) -> None:
        """Answer a request to one of ``TASKS``."""
        task = TASKS[endpoint]
        content_type = connection.head.headers.get("content-type", "").encode("latin-1", "replace")
        more = [content_type] if task.takes_file else []
        self.read(connection, endpoint, body, partial(self._run, task, connection, sender), more=more)

    def _run(self, task: ModelTask, connection: HttpExchange, sender: SenderHeaders, asked: TaskRequest) -> None:
        self.pass_over(asked.unknown)
        running, address = self.models.find(asked.model, asked.origin(sender), task.purpose)
        name = f"{task.prefix}-{secrets.token_hex(16)}"
        requests = asked.model_requests(running.signature, sender, address)
        self.submit(asked.reply(connection, name, running.signature), name, requests, sender)
