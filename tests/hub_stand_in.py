"""A stand-in for the Hugging Face hub: its HTTP API as far as downloads need it, and a second host with large files.

Written from the public documentation of the API: descriptions of a revision with sizes and hashes, ``resolve`` with
ETag and X-Repo-Commit, a redirect to the other host for files in Git LFS, Range, access by token, X-Error-Code.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

TOKEN = "hf_secretsecretsecret"
_LARGE = (".safetensors", ".gguf", ".bin", ".onnx", ".pt")
_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(?:revision|tree)/([^/]+))?")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class HubRead(NamedTuple):
    """A request."""

    method: str
    path: str
    range: str
    authorization: str


class Published(NamedTuple):
    """A state of a model."""

    commit: str
    files: Mapping[str, bytes]
    stated: Mapping[str, Mapping[str, Any]]
    """Descriptions of files that differ from what they are."""


class HubStandIn:
    """The hub. ``url`` is what ``HF_ENDPOINT`` has to be."""

    def __init__(self, port: int, files_port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._files_url = f"http://localhost:{files_port}"
        self.reset()

    def reset(self) -> None:
        """Begin anew, without models and faults."""
        self.reads: list[HubRead] = []
        self.models: dict[str, dict[str, Published]] = {}
        self.licences: dict[str, str] = {}
        self.gated: set[str] = set()
        self.blobs: dict[str, bytes] = {}
        self.status = 0
        """A status that everything is answered with."""
        self.breaks: list[int] = []
        """After how many bytes the next downloads of large files break off."""
        self.stops_at = 0
        """After how many bytes downloads of large files stand still, until ``goes_on``."""
        self.goes_on = threading.Event()
        self.arrived_there = threading.Event()
        """A download stands still."""
        self.spoilt: set[str] = set()
        """Files whose last byte arrives as another one."""
        self.ignores_ranges = False

    def publish(
        self,
        model: str,
        files: Mapping[str, bytes] | Path,
        licence: str = "apache-2.0",
        revision: str = "main",
        stated: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> str:
        """Publish a state of a model; return its commit. ``stated`` replaces parts of descriptions of files."""
        if isinstance(files, Path):
            paths = [path for path in sorted(files.rglob("*")) if path.is_file()]
            files = {str(path.relative_to(files)): path.read_bytes() for path in paths}
        content = b"".join(name.encode() + data for name, data in sorted(files.items()))
        commit = hashlib.sha1(content).hexdigest()
        published = Published(commit, files, stated or {})
        self.models.setdefault(model, {}).update({revision: published, commit: published})
        self.licences[model] = licence
        self.blobs |= {hashlib.sha256(data).hexdigest(): data for data in files.values()}
        return commit

    @property
    def downloads(self) -> list[str]:
        """The paths of the large files and others that were read, each as often as it was."""
        return [read.path for read in self.reads if read.method == "GET" and not read.path.startswith("/api/")]

    def environment(self, home: Path, token: str = "") -> dict[str, str]:
        """Return the environment of a client whose cache is in ``home``."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN": token,
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def description(self, model: str, published: Published) -> dict[str, Any]:
        """Return what the API says about a state."""
        siblings = []
        for name, data in published.files.items():
            sibling: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": blob_id(data)}
            if name.endswith(_LARGE):
                digest = hashlib.sha256(data).hexdigest()
                sibling["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 130}
            siblings.append({**sibling, **published.stated.get(name, {})})
        licence = self.licences[model]
        return {
            "_id": "0", "id": model, "sha": published.commit, "private": False, "gated": model in self.gated,
            "disabled": False, "downloads": 1, "likes": 1, "tags": [f"license:{licence}"],
            "cardData": {"license": licence}, "siblings": siblings,
        }  # fmt: skip

    def answer(self, handler: _Handler) -> None:
        """Answer a request to the hub itself."""
        path = unquote(urlsplit(handler.path).path)
        self.reads.append(HubRead(handler.command, path, *handler.fields("Range", "Authorization")))
        if self.status:
            handler.reply(self.status, b"{}")
            return
        api, resolve = _API.fullmatch(handler.path.partition("?")[0]), _RESOLVE.fullmatch(path)
        model = (api or resolve or [None, ""])[1]
        revision = unquote((api or resolve or [None, "", ""])[2] or "main")
        if model not in self.models:
            handler.reply(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif model in self.gated and handler.fields("Authorization") != [f"Bearer {TOKEN}"]:
            handler.reply(401, b"{}", {"X-Error-Code": "GatedRepo"})
        elif revision not in self.models[model]:
            handler.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif api:
            found: Any = self.description(model, self.models[model][revision])
            if "/tree/" in path:
                found = [_entry(sibling) for sibling in found["siblings"]]
            handler.reply(200, json.dumps(found).encode(), {"Content-Type": "application/json"})
        elif resolve:
            self._resolve(handler, self.models[model][revision], resolve[3])

    def _resolve(self, handler: _Handler, published: Published, name: str) -> None:
        fields = {"X-Repo-Commit": published.commit}
        data = published.files.get(name)
        if data is None:
            handler.reply(404, b"", {**fields, "X-Error-Code": "EntryNotFound"})
            return
        digest = hashlib.sha256(data).hexdigest()
        if name.endswith(_LARGE):
            place = f"{self._files_url}/{digest}?signature=xyz"
            linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data)), "Location": place}
            handler.reply(302, b"", {**fields, **linked})
        else:
            self._send(handler, data, {**fields, "ETag": f'"{blob_id(data)}"'}, large=False, spoilt=name in self.spoilt)

    def answer_file(self, handler: _Handler) -> None:
        """Answer a request for a large file to the other host."""
        digest = urlsplit(handler.path).path.lstrip("/")
        self.reads.append(HubRead(handler.command, f"/{digest}", *handler.fields("Range", "Authorization")))
        names = [
            name
            for states in self.models.values()
            for published in states.values()
            for name, data in published.files.items()
            if hashlib.sha256(data).hexdigest() == digest
        ]
        spoilt = bool(self.spoilt.intersection(names))
        self._send(handler, self.blobs[digest], {"ETag": f'"{digest}"'}, large=True, spoilt=spoilt)

    def _send(
        self, handler: _Handler, data: bytes, fields: Mapping[str, str], *, large: bool, spoilt: bool = False
    ) -> None:
        if spoilt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        begin, status = 0, 200
        given = handler.fields("Range")[0]
        if given and not self.ignores_ranges:
            begin, status = int(given.removeprefix("bytes=").rstrip("-")), 206
            fields = {**fields, "Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"}
        handler.head(status, {**fields, "Content-Length": str(len(data) - begin), "Accept-Ranges": "bytes"})
        if handler.command == "HEAD":
            return
        rest = data[begin:]
        if large and self.breaks:
            handler.wfile.write(rest[: self.breaks.pop(0)])
            handler.close_connection = True
            return
        if large and self.stops_at and len(rest) > self.stops_at:
            handler.wfile.write(rest[: self.stops_at])
            handler.wfile.flush()
            self.arrived_there.set()
            self.goes_on.wait(60)
            rest = rest[self.stops_at :]
        handler.wfile.write(rest)


def _entry(sibling: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the tree of a revision has of a file."""
    entry = {"type": "file", "path": sibling["rfilename"], "size": sibling["size"], "oid": sibling["blobId"]}
    if large := sibling.get("lfs"):
        entry["lfs"] = {"oid": large["sha256"], "size": large["size"], "pointerSize": large["pointerSize"]}
    return entry


def blob_id(data: bytes) -> str:
    """Return Git's hash of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubStandIn

    def fields(self, *names: str) -> list[str]:
        """Return fields of the head; empty if they are missing."""
        return [self.headers.get(name) or "" for name in names]

    def head(self, status: int, fields: Mapping[str, str]) -> None:
        """Send the head of an answer."""
        self.send_response(status)
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()

    def reply(self, status: int, body: bytes, fields: Mapping[str, str] | None = None) -> None:
        """Send an answer."""
        self.head(status, {"Content-Length": str(len(body)), **(fields or {})})
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        try:
            self.respond()
        except (BrokenPipeError, ConnectionResetError):  # the client was killed
            self.close_connection = True

    do_HEAD = do_GET

    def respond(self) -> None:
        self.hub.answer(self)

    def log_message(self, *_: object) -> None:
        """Say nothing: what a test is told it asks for."""


class _FileHandler(_Handler):
    def respond(self) -> None:
        self.hub.answer_file(self)


@contextmanager
def hub_stand_in() -> Iterator[HubStandIn]:
    """Run a hub without models."""
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (kind,), {})) for kind in (_Handler, _FileHandler)]
    hub = HubStandIn(*(server.server_address[1] for server in servers))
    for server in servers:
        server.daemon_threads = True
        server.RequestHandlerClass.hub = hub  # type: ignore[attr-defined]
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        hub.goes_on.set()
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()
