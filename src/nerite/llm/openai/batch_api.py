"""OpenAI's endpoints of files and batches: bodies and queries become calls of ``Batches``, results become replies."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Final
from urllib.parse import parse_qsl

from nerite.batches.items import InvalidItems
from nerite.batches.records import BatchRecord, FileRecord
from nerite.batches.service import NewBatch
from nerite.batches.store import PageRequest
from nerite.core.errors import NeriteError, NotFound
from nerite.core.failures import report
from nerite.core.request import EVERYBODY, CancelReason, RequestHeader
from nerite.core.text import name_error, quoted_text
from nerite.llm.openai.errors import ApiError, reply_of
from nerite.llm.openai.fields import Fields, check_name, missing, wrong_value
from nerite.transports.http import files as forms
from nerite.transports.http import reply
from nerite.transports.http.handler import BackgroundCalls
from nerite.transports.http.reply import Reply, json_reply

if TYPE_CHECKING:
    from nerite.batches.service import Batches
    from nerite.transports.access import SenderHeaders
    from nerite.transports.http.handler import HttpExchange

PURPOSES: Final = ("batch", "user_data", "assistants", "vision", "fine-tune", "evals")
_NEW_BATCH: Final = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")
_FILE_FIELDS: Final = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
_SHORTEST, _LONGEST = 3600, 30 * 86400
"""OpenAI's bounds of the seconds after which files expire."""
_CHUNK: Final = 256 * 1024
_NO_MODEL: Final = RequestHeader("", "", ())


class BatchApi:
    """Answers the endpoints of files and batches. Each method with an underscore in front is named for its endpoint."""

    def __init__(self, batches: Batches | None, remedy: str = "start it with --batches=PATH") -> None:
        """``batches`` is None if the server has none, and ``remedy`` says how to have some."""
        self._batches = batches
        self._remedy = remedy
        self._calls = BackgroundCalls(reply_of)
        self._downloads: set[asyncio.Task[None]] = set()

    def answer(
        self, endpoint: str, connection: HttpExchange, body: memoryview, sender: SenderHeaders, **arguments: str
    ) -> None:
        """Answer a request to ``endpoint``. Raises ``NeriteError``."""
        batches, head = self._batches, connection.head
        if batches is None:
            raise ApiError(
                f"This server keeps no files and batches: {self._remedy} (docs/batches.md).",
                None,
                "batches_not_enabled",
                501,
            )
        tenant = EVERYBODY if sender.caller is None else sender.caller.tenant
        name = next(iter(arguments.values()), "")
        work: Any
        match endpoint, head.method:
            case "files", "POST":
                work = self._upload(batches, tenant, head.headers.get("content-type", ""), body)
            case "files", _:
                work = self._files(batches, tenant, _listing(head.query, "files"))
            case "file", "DELETE":
                work = self._delete(batches, tenant, name)
            case "file", _:
                work = self._file(batches, tenant, name)
            case "file_content", _:
                self._download(connection, batches, tenant, name)
                return
            case "batches", "POST":
                work = self._create(batches, tenant, _new_batch(body))
            case "batches", _:
                work = self._list(batches, tenant, _listing(head.query, "batches"))
            case "cancel_batch", _:
                work = self._cancel(batches, tenant, name)
            case _:
                work = self._batch(batches, tenant, name)
        self._calls.start(connection, work)

    # Files

    async def _upload(self, batches: Batches, tenant: str, content_type: str, body: memoryview) -> Reply:
        if forms.form_media_type(content_type) != forms.TYPE:
            raise ApiError(f"A file is uploaded as a form of type {forms.TYPE}.", None, "invalid_content_type")
        parts = {each.name: each for each in await asyncio.to_thread(forms.parse_multipart, content_type, body)}
        for name in parts:
            if name not in _FILE_FIELDS:
                raise ApiError(f"Unknown parameter: '{quoted_text(name)}'.", name, "unknown_parameter")
        for name in ("file", "purpose"):
            if name not in parts:
                raise missing(name)
        texts = {name: bytes(part.data).decode(errors="replace") for name, part in parts.items() if name != "file"}
        purpose = texts["purpose"]
        if purpose not in PURPOSES:
            raise wrong_value("purpose", f"one of {', '.join(PURPOSES)}", purpose)
        file = parts["file"]
        name = file.file_name or "file"
        if name_error(name):
            raise wrong_value(
                "file", "a file whose name is UTF-8 of at most 1024 characters without control characters", name
            )
        if purpose == "batch" and not name.endswith(".jsonl"):
            raise ApiError("Invalid file format for Batch API. Must be .jsonl", "file", "invalid_file_format")
        expires = None
        if "expires_after[seconds]" in texts or "expires_after[anchor]" in texts:
            seconds = texts.get("expires_after[seconds]", "")
            count = int(seconds) if seconds.isascii() and seconds.isdecimal() and len(seconds) < 9 else 0
            expires = _expiry(texts.get("expires_after[anchor]", ""), count, "created_at", "expires_after")
        try:
            record = await batches.upload(tenant, name, purpose, file.data, expires)
        except InvalidItems as error:
            raise ApiError(error.message, "file", error.mistake.code) from None
        return json_reply(record.as_json())

    async def _files(self, batches: Batches, tenant: str, listing: PageRequest) -> Reply:
        found, more = await batches.list_files(tenant, listing)
        return _list_reply([each.as_json() for each in found], more)

    async def _file(self, batches: Batches, tenant: str, name: str) -> Reply:
        return json_reply((await batches.file(tenant, name)).as_json())

    async def _delete(self, batches: Batches, tenant: str, name: str) -> Reply:
        await batches.delete_file(tenant, name)
        return json_reply({"id": name, "object": "file", "deleted": True})

    def _download(self, connection: HttpExchange, batches: Batches, tenant: str, name: str) -> None:
        download = FileDownload(connection)
        connection.request = download
        task = asyncio.get_running_loop().create_task(download.run(batches, tenant, name))
        self._downloads.add(task)
        task.add_done_callback(self._downloads.discard)

    # Batches

    async def _create(self, batches: Batches, tenant: str, new: NewBatch) -> Reply:
        try:
            record = await batches.create(tenant, new)
        except NotFound as error:
            raise ApiError(error.message, "input_file_id", "invalid_value", 400) from None
        return _batch_reply(batches, record)

    async def _batch(self, batches: Batches, tenant: str, name: str) -> Reply:
        return _batch_reply(batches, await batches.batch(tenant, name))

    async def _list(self, batches: Batches, tenant: str, listing: PageRequest) -> Reply:
        found, more = await batches.list_batches(tenant, listing)
        return _list_reply([each.as_json(batches.predicted_end(each.id)) for each in found], more)

    async def _cancel(self, batches: Batches, tenant: str, name: str) -> Reply:
        return _batch_reply(batches, await batches.cancel(tenant, name))


def _batch_reply(batches: Batches, record: BatchRecord) -> Reply:
    return json_reply(record.as_json(batches.predicted_end(record.id)))


def _list_reply(found: Sequence[Mapping[str, Any]], more: bool) -> Reply:
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {"first_id": None, "last_id": None}
    return json_reply({"object": "list", "data": found, **ends, "has_more": more})


def _listing(query: str, kind: str) -> PageRequest:
    """Return what a query asks for. Raises ``ApiError``."""
    known = ("limit", "after", "order", "purpose") if kind == "files" else ("limit", "after")
    try:
        values = dict(parse_qsl(query, max_num_fields=16))
    except ValueError as error:
        raise ApiError(f"The query could not be parsed: {error}", None, "invalid_query") from None
    for name, value in values.items():
        if name not in known:
            raise ApiError(f"Unknown parameter: '{name}'. There are: {', '.join(known)}.", name, "unknown_parameter")
        check_name(name, value)
    most, usual = (10_000, 10_000) if kind == "files" else (100, 20)
    limit = values.get("limit", str(usual))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 6 and 1 <= int(limit) <= most):
        raise wrong_value("limit", f"an integer from 1 to {most}", limit)
    order = values.get("order", "desc")
    if order not in ("asc", "desc"):
        raise wrong_value("order", "'asc' or 'desc'", order)
    return PageRequest(int(limit), values.get("after", ""), order == "asc", values.get("purpose", ""))


def _new_batch(body: memoryview) -> NewBatch:
    """Return what a body says about a new batch. Raises ``ApiError``."""
    fields = Fields.of_small_body(body)
    fields.refuse_unknown(_NEW_BATCH)
    output_seconds = None
    if "output_expires_after" in fields:
        after = fields.object("output_expires_after")
        after.refuse_unknown(("anchor", "seconds"))
        seconds = after.integer("seconds", 0, _SHORTEST, _LONGEST)
        output_seconds = _expiry(after.text("anchor"), seconds, "created_at", "output_expires_after")
    metadata = fields.object("metadata").values
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise wrong_value(f"metadata.{key}", "a string", value)
    input_file = fields.name("input_file_id")
    if not input_file:
        raise wrong_value("input_file_id", "the id of a file", input_file)
    return NewBatch(
        input_file,
        fields.name("endpoint"),
        fields.name("completion_window"),
        metadata,
        output_seconds,
    )


def _expiry(anchor: str, seconds: int, known: str, param: str) -> float:
    if anchor != known:
        raise wrong_value(f"{param}.anchor", f"'{known}'", anchor)
    if not _SHORTEST <= seconds <= _LONGEST:
        raise wrong_value(f"{param}.seconds", f"an integer from {_SHORTEST} to {_LONGEST}", seconds)
    return float(seconds)


class FileDownload:
    """Sends the content of a file in chunks, as fast as the client reads. The work of its exchange."""

    id = ""
    header = _NO_MODEL

    def __init__(self, connection: HttpExchange) -> None:
        self._connection = connection
        self._cancelled = False
        self._writable = asyncio.Event()
        self._writable.set()

    def cancel(self, why: CancelReason = CancelReason.CANCELLED) -> None:
        """Stop: the client is gone."""
        self._cancelled = True
        self._writable.set()

    def pause(self, paused: bool) -> None:
        """Wait while the client does not read."""
        if paused:
            self._writable.clear()
        else:
            self._writable.set()

    async def run(self, batches: Batches, tenant: str, name: str) -> None:
        """Send the file, or the error."""
        connection = self._connection
        try:
            record, file = await batches.open_file(tenant, name)
        except NeriteError as error:
            connection.send([reply_of(error).encode()])
            return
        except Exception as error:
            connection.send([reply_of(report("openai", error, "in a download")).encode()])
            return
        with file:
            await self._send(record, file)

    async def _send(self, record: FileRecord, file: BinaryIO) -> None:
        connection = self._connection
        content_type = "application/jsonl" if record.name.endswith(".jsonl") else "application/octet-stream"
        connection.open(reply.chunked_head(200, content_type))
        try:
            while not self._cancelled and (chunk := await asyncio.to_thread(file.read, _CHUNK)):
                connection.send_chunk(chunk)
                await self._writable.wait()
        except Exception as error:
            report("openai", error, "in a download")
            return  # the client sees a reply without its end
        if not self._cancelled:
            connection.close_reply()
