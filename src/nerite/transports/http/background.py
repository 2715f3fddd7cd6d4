"""What is told of the loops that run beside the requests, the same for servers and routers: metrics, and their API."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

import orjson

from nerite.core.client_text import checked
from nerite.core.errors import InvalidArgument
from nerite.core.text import MAX_NAME, quoted_text
from nerite.core.work_loop import DeadLetter, WorkLoop, WorkLoops
from nerite.observability.exposition import Metric, MetricTable, Page
from nerite.transports.http import reply
from nerite.transports.http.handler import HttpExchange
from nerite.transports.http.reply import Reply

_MAX_LISTED: Final = 1000
"""Failing units, and dead letters, of a loop in one document: the oldest ones."""
_MAX_BODY: Final = 16 * 1024
LOOPS: Final = MetricTable[WorkLoop]((
    Metric("nerite_background_stalled", "gauge", "Whether a loop beside the requests makes no progress",
           lambda loop: int(bool(loop.problem))),
    Metric("nerite_background_waiting", "gauge", "Units of work that wait for the loop", lambda loop: loop.waiting),
    Metric("nerite_background_set_aside", "gauge",
           "Units that failed again and again, and wait for an operator to retry or discard them",
           lambda loop: len(loop.dead_letters)),
    Metric("nerite_background_failures_total", "counter",
           "Units and steps of the loop that raised something unforeseen, each time", lambda loop: loop.failures),
    Metric("nerite_background_restarts_total", "counter", "Times that the whole loop failed and was started again",
           lambda loop: loop.restarts),
), labels=("about", "loop"))  # fmt: skip


def write_background_metrics(loops: WorkLoops, page: Page) -> None:
    """Write the metrics of all loops of a process.

    The label ``about`` distinguishes loops of one name, by what the settings name: a pool, a file, a model of a pool.
    """
    page.write(LOOPS, [LOOPS.row(loop, loop.about, loop.name) for loop in loops])


class BackgroundApi:
    """Answers ``/v2/background``. Each method is named after its endpoint (``routes``), and sends one reply."""

    def __init__(self, loops: WorkLoops) -> None:
        self._loops = loops

    def background(self, connection: HttpExchange, body: memoryview) -> None:
        """List the loops."""
        connection.send([reply.json_reply({"loops": [document_of(loop) for loop in self._loops]}).encode()])

    def background_retry(self, connection: HttpExchange, body: memoryview, loop: str) -> None:
        """Have a dead letter tried again, and send what its loop is like then."""
        unit = _unit_in(body)
        found = self._loops.of_unit(loop, unit)
        found.retry(unit)
        connection.send([reply.json_reply(document_of(found)).encode()])

    def background_discard(self, connection: HttpExchange, body: memoryview, loop: str) -> None:
        """Give a dead letter up, and send what its loop is like then."""
        unit = _unit_in(body)
        found = self._loops.of_unit(loop, unit)
        found.discard(unit)
        connection.send([reply.json_reply(document_of(found)).encode()])


def document_of(loop: WorkLoop) -> dict[str, Any]:
    """Return what is told of a loop."""
    letters, failing = loop.dead_letters, loop.failing
    return {
        "name": loop.name,
        "about": quoted_text(loop.about),
        "essential": loop.essential,
        "state": loop.state,
        "problem": loop.problem,
        "waiting": loop.waiting,
        "failures": loop.failures,
        "restarts": loop.restarts,
        "failing_units": len(failing),
        "failing": [
            {"unit": quoted_text(unit, MAX_NAME), "text": text} for unit, text in islice(failing.items(), _MAX_LISTED)
        ],
        "set_aside": len(letters),
        "dead_letters": [_letter(each) for each in letters[:_MAX_LISTED]],
    }


def _letter(letter: DeadLetter) -> dict[str, str]:
    at = datetime.fromtimestamp(letter.at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return {"unit": quoted_text(letter.unit, MAX_NAME), "tenant": letter.tenant, "text": letter.text, "time": at}


def not_ready(obstacle: str, plain: Reply) -> Reply:
    """Return ``plain``, the reply of a process that is not ready, with the reason if a loop is the obstacle."""
    return plain._replace(body=f"{obstacle} (GET /v2/background)\n".encode()) if obstacle else plain


def _unit_in(body: memoryview) -> str:
    """Return the unit that a request names. Raises ``InvalidArgument``."""
    with suppress(orjson.JSONDecodeError):
        given = orjson.loads(body[:_MAX_BODY])
        if isinstance(given, dict) and given.keys() == {"unit"} and isinstance(given["unit"], str):
            return checked(given["unit"], "the unit")
    raise InvalidArgument('the body must be {"unit": "..."}, with the unit as GET /v2/background names it')
