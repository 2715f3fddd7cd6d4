"""Batches that are run to their end, whose every line has an answer, and the rows that a ledger has of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final

from fuzz import models, stored
from fuzz.case import Case
from fuzz.lanes import Answer, Kept, Outcome, judged, request
from fuzz.symptoms import Symptom

_ENDS: Final = ("completed", "failed", "expired", "cancelled")
_ASK_AGAIN: Final = 0.02
_INFER: Final = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}
_SENDER: Final = b"\nx-tenant: acme"
"""Who asks what is always to be answered: a tenant, where there are any."""


def upload(text: bytes, head: bytes = b"POST /v1/files") -> bytes:
    """Return a request that stores the input of a batch."""
    form = [
        b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch',
        b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n' + text,
    ]
    body = b"".join(b"--fuzz-form\r\n" + part + b"\r\n" for part in form) + b"--fuzz-form--\r\n"
    return request(head + b"\nContent-Type: multipart/form-data; boundary=fuzz-form", body)


def items(model: str, count: int) -> bytes:
    """Return an input file in which nothing is wrong."""
    line = {"method": "POST", "url": f"/v2/models/{model}/infer", "body": _INFER}
    return b"".join(json.dumps({"custom_id": str(at), **line}).encode() + b"\n" for at in range(count))


class _Ended(Exception):
    """An input ended earlier than with its batch."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


class Runs:
    """Stores the file of an input, runs it as a batch, and wants an end of it and a line for each of its items."""

    def __init__(self, lane: Kept) -> None:
        self._lane = lane
        self._lines: Sequence[bytes] = ()
        """In the heads of all requests of an input."""
        self.last: dict[str, Any] = {}
        """The last batch that has ended."""

    async def send(self, case: Case) -> Outcome:
        """Send one input."""
        head, text, document, *actions = case.parts
        self._lines = head.split(b"\n")[1:]
        files: list[str | None] = []
        try:
            uploaded = self._said(case, await self._sent(case, upload(text, head)))
            files.append(uploaded["id"])
            body = document.replace(stored.FILE.encode(), uploaded["id"].encode())
            batch = self._said(case, await self._ask(case, "POST /v1/batches", body))
            for action in actions:
                await self._ask(case, f"POST /v1/batches/{batch['id']}/{action.decode()}")
            batch = await self._end(case, batch)
            self.last = batch
            files += [batch["output_file_id"], batch["error_file_id"]]
            complaint = await self._wrong_lines(case, batch)
            return Outcome(case, complaint, json.dumps(batch).encode()[:2_000], batch["status"] == "completed")
        except _Ended as end:
            return end.outcome
        finally:
            for name in files:
                if name:
                    await self._lane.ask([request(self._head(f"DELETE /v1/files/{name}"), b"")])

    def _head(self, first: str) -> bytes:
        return b"\n".join([first.encode(), *self._lines])

    async def _ask(self, case: Case, first: str, body: bytes = b"") -> Answer:
        return await self._sent(case, request(self._head(first), body))

    async def _sent(self, case: Case, raw: bytes) -> Answer:
        answers, complaint = await self._lane.ask([raw])
        if not answers:
            raise _Ended(Outcome(case, complaint))
        outcome = judged(case, answers[0])
        if outcome.complaint:
            raise _Ended(outcome)
        return answers[0]

    def _said(self, case: Case, answer: Answer) -> dict[str, Any]:
        """Return the document of an answer that was no refusal."""
        if answer.status != 200:
            raise _Ended(judged(case, answer))
        said: dict[str, Any] = json.loads(answer.body)
        return said

    async def _end(self, case: Case, batch: dict[str, Any]) -> dict[str, Any]:
        """Wait for the end of a batch."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._lane.patience
        while batch["status"] not in _ENDS:
            if loop.time() > until:
                said = json.dumps(batch).encode()[:2_000]
                raise _Ended(Outcome(case, f"no end of a batch within {self._lane.patience:g} s", said))
            await asyncio.sleep(_ASK_AGAIN)
            batch = self._said(case, await self._ask(case, f"GET /v1/batches/{batch['id']}"))
        return batch

    async def _wrong_lines(self, case: Case, batch: dict[str, Any]) -> str:
        """Return what is wrong with the output files of a batch."""
        counts = batch["request_counts"]
        if batch["status"] == "failed":
            return "" if batch["errors"] else "a batch failed without an error"
        if batch["status"] != "cancelled" and counts["completed"] + counts["failed"] != counts["total"]:
            return "items of a batch have no end"
        seen: set[str] = set()
        for name, kind in (("output_file_id", "completed"), ("error_file_id", "failed")):
            if not batch[name]:
                lines = []
            else:
                lines = (await self._ask(case, f"GET /v1/files/{batch[name]}/content")).body.splitlines()
            if len(lines) != counts[kind]:
                return f"{kind} items of a batch have not one line each"
            try:
                seen.update(json.loads(line)["custom_id"] for line in lines)
            except (ValueError, KeyError):
                return "a line of an output file is no JSON"
        return "" if len(seen) == counts["completed"] + counts["failed"] else "an item of a batch has two lines"


class Books:
    """A batch that has to complete, whatever else is under way, and the rows of a ledger, which have to add up."""

    def __init__(self, lane: Kept, *, tenants: bool = False) -> None:
        self._lane = lane
        # Without a policy rows are nobody's, or the default tenant's.
        self._reports = [b"GET /v1/usage"] if tenants else [b"GET /v1/usage", b"GET /v2/usage"]
        self.runs = Runs(lane)
        self._answered = 0

    async def ask(self) -> list[Symptom]:
        """Run a batch, and look whether each of its items has its row."""
        url = f"/v2/models/{models.COUNTED}/infer"
        document = {"input_file_id": stored.FILE, "endpoint": url, "completion_window": "1h"}
        parts = (b"POST /v1/files" + _SENDER, items(models.COUNTED, 2), json.dumps(document).encode())
        outcome = await self.runs.send(Case("batches", parts))
        if outcome.complaint or not outcome.taken:
            return [Symptom("canary", "batch", f"{outcome.complaint} {outcome.said.decode(errors='replace')}")]
        self._answered += 2
        found = 0
        for first in self._reports:
            asked = request(first + b"?group_by=model,ending" + _SENDER, b"")
            answers, complaint = await self._lane.ask([asked])
            if complaint or not answers or answers[0].status != 200:
                return [Symptom("canary", "ledger", complaint or f"{answers[0].status} {answers[0].body[:1_000]!r}")]
            rows = json.loads(answers[0].body)["data"]
            own = [row for row in rows if (row["model"], row["ending"]) == (models.COUNTED, "answered")]
            found = sum(row["requests"] for row in own)
        if found != self._answered:
            return [Symptom("canary", "ledger", f"{found} rows for {self._answered} answers")]
        return []
