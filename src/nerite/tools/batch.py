"""``nerite batch``: runs a file of requests as a batch on a server, lists batches, and cancels them."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from nerite.cli.command import ProgressBar, add_repeated, new_parser, show, show_json, show_table, status_of
from nerite.client.connection import Address, ClientError, HttpClientConnection, Unreachable, text_of
from nerite.tools.connection import add_connection, remedied

_EPILOG = """\
Each line of the input file is a request, as in OpenAI's batch API; docs/batches.md describes it. The server must run
with --batches. 'run' can be interrupted: the batch goes on, and the same command takes it up again.

Examples:
  nerite batch run questions.jsonl -o answers.jsonl --window 30m
  nerite batch list
  nerite batch cancel batch_68a5…
"""
_WINDOW: Final = re.compile(r"[1-9][0-9]*[smhd]")
_POLL_SECONDS: Final = 1.0
_PATIENCE: Final = 300.0
"""Seconds for which a server may be unreachable, such as during a restart, while a batch is watched."""
_ENDS: Final = ("completed", "failed", "expired", "cancelled")
_HEADINGS: Final = ("Batch", "Status", "Endpoint", "Completed", "Failed", "Of", "Deadline", "Predicted")


def run(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    return status_of("nerite batch", lambda: _run(_parser().parse_args(arguments)), ClientError)


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("nerite batch", "Run a file of requests as a batch.", _EPILOG)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    one = commands.add_parser("run", help="run a file of requests, and fetch the answers")
    one.add_argument("input", metavar="FILE", type=Path, help="requests, one JSON object on each line")
    one.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="where to write the answers")
    one.add_argument("--window", metavar="DURATION", default="24h", help="deadline, such as 30m (default: 24h)")
    add_repeated(one, "--metadata", "KEY=VALUE", "text that is kept with the batch")
    one.set_defaults(act=_run_batch)
    listing = commands.add_parser("list", help="list batches, the newest first")
    listing.add_argument("--limit", metavar="N", type=int, default=20, help="number of batches (default: 20)")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(act=_list)
    cancel = commands.add_parser("cancel", help="cancel a batch; what is done is kept")
    cancel.add_argument("batch", metavar="BATCH", help="id of the batch")
    cancel.set_defaults(act=_cancel)
    for each in (one, listing, cancel):
        add_connection(each)
    return parser


def _run(options: argparse.Namespace) -> int:
    with remedied("HTTP"), _connected(options) as api:
        status: int = options.act(api, options)
        return status


class BatchConnection:
    """The endpoints of files and batches, on one connection."""

    def __init__(self, connection: HttpClientConnection) -> None:
        self._connection = connection

    def ask(self, method: str, path: str, body: bytes = b"", content_type: str = "application/json") -> Any:
        """Return the JSON of an answer. Raises ``ClientError``."""
        headers = {"Content-Type": content_type} if body else {}
        answer = self._connection.ask(method, path, [body] if body else [], headers)
        if answer.status != 200:
            raise ClientError(text_of(answer.status, answer.body), answer.status)
        return json.loads(answer.body)

    def upload(self, file: Path, content: bytes) -> str:
        """Upload the input of a batch; return the id of the file."""
        boundary = secrets.token_hex(16)
        name = file.name.replace('"', "_")
        name = name if name.endswith(".jsonl") else f"{name}.jsonl"
        purpose = 'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'
        head = (
            f'Content-Disposition: form-data; name="file"; filename="{name}"\r\nContent-Type: application/jsonl\r\n\r\n'
        )
        body = b"".join(
            (
                f"--{boundary}\r\n{purpose}\r\n--{boundary}\r\n{head}".encode(),
                content,
                f"\r\n--{boundary}--\r\n".encode(),
            )
        )
        made = self.ask("POST", "/v1/files", body, f"multipart/form-data; boundary={boundary}")
        return str(made["id"])

    def download(self, name: str, to: Path) -> None:
        """Write the content of a file, which replaces another one only when it is complete."""
        part = to.with_name(f"{to.name}.part")
        with part.open("wb") as file:
            for line in self._connection.lines("GET", f"/v1/files/{name}/content", []):
                file.write(line)
        part.replace(to)


@contextmanager
def _connected(options: argparse.Namespace) -> Iterator[BatchConnection]:
    connection = HttpClientConnection(Address.parse(options.url), dict(options.header), options.timeout, None)
    try:
        yield BatchConnection(connection)
    finally:
        connection.close()


# Running a file


def _run_batch(api: BatchConnection, options: argparse.Namespace) -> int:
    """Create a batch, or take one up again; wait for its end, and fetch its files."""
    if not _WINDOW.fullmatch(options.window):
        raise ClientError(f"--window must be a duration such as 30m or 24h, got '{options.window}'")
    metadata = dict(_pair(text) for text in options.metadata)
    try:
        content = options.input.read_bytes()
    except OSError as error:
        raise ClientError(f"cannot read '{options.input}': {error.strerror}") from error
    state = options.output.with_name(f"{options.output.name}.batch")
    digest = hashlib.sha256(content).hexdigest()
    name = _resumed(state, digest, options)
    if not name:
        endpoint = _endpoint(content)
        file = api.upload(options.input, content)
        new = {
            "input_file_id": file,
            "endpoint": endpoint,
            "completion_window": options.window,
            "metadata": metadata,
        }
        name = api.ask("POST", "/v1/batches", json.dumps(new).encode())["id"]
        state.write_text(json.dumps({"batch": name, "input_sha256": digest}))
    try:
        batch = _watched(api, name)
    except KeyboardInterrupt:
        show(f"Batch {name} goes on. The same command takes it up again; nerite batch cancel {name} ends it.")
        raise
    return _fetch(api, batch, options.output, state)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ClientError(f"--metadata must be KEY=VALUE, got '{text}'")
    return key, value


def _resumed(state: Path, digest: str, options: argparse.Namespace) -> str:
    """Return the id of the batch that an earlier run has created; empty if there is none."""
    try:
        found = json.loads(state.read_text())
        name, known = str(found["batch"]), found["input_sha256"]
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError):
        raise ClientError(f"'{state}' is not readable: remove it to start a new batch") from None
    if known != digest:
        raise ClientError(
            f"'{options.input}' has changed since batch {name} was created. Remove '{state}' to start a new batch"
        )
    show(f"Taking up batch {name} again")
    return name


def _endpoint(content: bytes) -> str:
    """Return the URL of the first request."""
    for line in content.splitlines():
        if line.strip():
            try:
                return str(json.loads(line)["url"])
            except (ValueError, KeyError, TypeError):
                break
    raise ClientError("the first line of the input file is not a request with a 'url'")


def _watched(api: BatchConnection, name: str) -> dict[str, Any]:
    """Show the progress of a batch until it ends; return it."""
    reached = time.monotonic()
    with ProgressBar() as progress:
        while True:
            try:
                batch: dict[str, Any] = api.ask("GET", f"/v1/batches/{name}")
                reached = time.monotonic()
            except ClientError as error:
                lost = isinstance(error, Unreachable) or error.status is None or error.status == 503
                if not lost or time.monotonic() - reached > _PATIENCE:
                    raise
                progress.doing("waiting for the server")
                time.sleep(_POLL_SECONDS)
                continue
            if batch["status"] in _ENDS:
                return batch
            _draw(progress, batch)
            time.sleep(_POLL_SECONDS)


def _draw(progress: ProgressBar, batch: dict[str, Any]) -> None:
    counts = batch["request_counts"]
    done = counts["completed"] + counts["failed"]
    if not counts["total"]:
        progress.doing(batch["status"])
        return
    predicted = batch.get("estimated_completion_at")
    remark = f"{done} of {counts['total']}"
    if predicted is not None:
        remark += f", ends in {_duration(predicted - time.time())}"
    progress.part(batch["status"], done / counts["total"], remark)


def _fetch(api: BatchConnection, batch: dict[str, Any], output: Path, state: Path) -> int:
    """Fetch the files of a batch that has ended; return the exit status."""
    errors = output.with_name(f"{output.stem}.errors{output.suffix}")
    for file, path in ((batch["output_file_id"], output), (batch["error_file_id"], errors)):
        if file is not None:
            api.download(file, path)
    state.unlink(missing_ok=True)
    for mistake in (batch["errors"] or {}).get("data", ()):
        place = f"line {mistake['line']}: " if mistake.get("line") else ""
        show(f"{place}{mistake['message']}")
    counts = batch["request_counts"]
    show(f"{batch['status']}: {counts['completed']} of {counts['total']} requests completed, {counts['failed']} failed")
    if batch["output_file_id"] is not None:
        show(f"Answers: {output}")
    if batch["error_file_id"] is not None:
        show(f"Errors: {errors}")
    return 0 if batch["status"] == "completed" and not counts["failed"] else 1


# Other commands


def _list(api: BatchConnection, options: argparse.Namespace) -> int:
    found = api.ask("GET", f"/v1/batches?limit={options.limit}")["data"]
    if options.json:
        show_json(found)
    elif found:
        show_table(_HEADINGS, [_row(batch) for batch in found])
    else:
        show("There are no batches.")
    return 0


def _row(batch: dict[str, Any]) -> list[str]:
    counts, now = batch["request_counts"], time.time()
    ended = batch["status"] in _ENDS
    predicted = batch.get("estimated_completion_at")
    return [
        batch["id"],
        batch["status"],
        batch["endpoint"],
        str(counts["completed"]),
        str(counts["failed"]),
        str(counts["total"]),
        "" if ended else f"in {_duration(batch['expires_at'] - now)}",
        "" if ended or predicted is None else f"in {_duration(predicted - now)}",
    ]


def _duration(seconds: float) -> str:
    seconds = max(round(seconds), 0)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _cancel(api: BatchConnection, options: argparse.Namespace) -> int:
    batch = api.ask("POST", f"/v1/batches/{options.batch}/cancel")
    show(f"{batch['id']}: {batch['status']}")
    return 0
