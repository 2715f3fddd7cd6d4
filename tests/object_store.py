"""An object store for tests: moto's S3 server, with a door that counts what is read, and breaks what it is told to.

Google's XML interface is of the same dialect, so it stands for Google Cloud Storage, too.
"""

from __future__ import annotations

import itertools
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote
from xml.sax.saxutils import escape

import obstore
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from obstore.store import S3Store
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "bucket"
KEYS = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "secret"}
Environ = dict[str, Any]
Respond = Callable[..., Any]
Application = Callable[[Environ, Respond], Iterable[bytes]]
Door = Callable[[Environ, Respond, Application], Iterable[bytes]]
"""What a request comes to before the store."""


class Read(NamedTuple):
    """A request for the content of an object."""

    key: str
    range: str
    condition: str
    authorization: str


class ObjectStore:
    """A server with one bucket."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.location = f"s3://{self.url}/{BUCKET}/models"
        self.reads: list[Read] = []
        self.lists = 0
        self.door: Door = _open
        self.client = S3Store(
            BUCKET,
            endpoint=self.url,
            region="us-east-1",
            client_options={"allow_http": True},
            credential_provider=lambda: {
                "access_key_id": "someone",
                "secret_access_key": "secret",
                "token": None,
                "expires_at": None,
            },
        )

    def reset(self) -> None:
        """Begin anew: an empty bucket, an open door."""
        self.door = _open
        # What moto stores belongs to the process, not to the server.
        self._ask("POST", "/moto-api/reset")
        self._ask("PUT", f"/{BUCKET}")
        self.reads.clear()
        self.lists = 0

    def _ask(self, method: str, path: str, **headers: str) -> None:
        request = urllib.request.Request(self.url + path, method=method, headers=headers)
        urllib.request.urlopen(request, timeout=30).close()

    def put(self, key: str, content: bytes | str) -> None:
        """Write an object."""
        obstore.put(self.client, key, content.encode() if isinstance(content, str) else content)

    def mark(self, key: str) -> None:
        """Write the empty object that stands for a directory."""
        self._ask("PUT", f"/{BUCKET}/{key}/")

    def upload(self, repository: Path) -> None:
        """Write all models of a repository."""
        for path in sorted(repository.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                self.put(f"models/{path.relative_to(repository)}", path.read_bytes())

    def remove(self, key: str) -> None:
        """Remove all objects below ``key``."""
        obstore.delete(self.client, [meta["path"] for meta in obstore.list(self.client, key).collect()])

    def contents(self, key: str) -> dict[str, bytes]:
        """The objects below ``key``, by their own."""
        found = obstore.list(self.client, key).collect()
        return {meta["path"]: bytes(obstore.get(self.client, meta["path"]).bytes()) for meta in found}

    def keys(self, key: str) -> set[str]:
        """The keys of the objects below ``key``."""
        return {meta["path"] for meta in obstore.list(self.client, key).collect()}

    @property
    def downloads(self) -> list[str]:
        """The keys of the objects that were read, in alphabetical order, each as often as it was."""
        return sorted(read.key for read in self.reads)


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Run a store with an empty bucket."""
    moto = DomainDispatcherApplication(create_backend_app)

    def application(environ: Environ, respond: Respond) -> Iterable[bytes]:
        store = running
        if is_read(environ):
            names = ("HTTP_RANGE", "HTTP_IF_MATCH", "HTTP_AUTHORIZATION")
            key = environ["PATH_INFO"].removeprefix(f"/{BUCKET}/")
            store.reads.append(Read(key, *(environ.get(name, "") for name in names)))
        elif environ["REQUEST_METHOD"] == "GET":
            store.lists += 1
        return store.door(environ, respond, moto)

    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_Quiet)
    running = ObjectStore(server.port)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        running.reset()
        yield running
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def is_read(environ: Environ) -> bool:
    """Say whether a request is for the content of an object."""
    return bool(
        environ["REQUEST_METHOD"] == "GET"
        and environ["PATH_INFO"].startswith(f"/{BUCKET}/")
        and environ["PATH_INFO"] != f"/{BUCKET}/"
    )


def breaking(after: int, times: int) -> Door:
    """Let the first reads of more than so many bytes break off there."""
    left = threading.Semaphore(times)

    def door(environ: Environ, respond: Respond, store: Application) -> Iterable[bytes]:
        body = b"".join(store(environ, respond))
        if is_read(environ) and len(body) > after and left.acquire(blocking=False):
            return [body[:after]]
        return [body]

    return door


def refusing(status: str, code: str, times: int = 1000) -> Door:
    """Refuse the first requests."""
    left = threading.Semaphore(times)

    def door(environ: Environ, respond: Respond, store: Application) -> Iterable[bytes]:
        if not left.acquire(blocking=False):
            return store(environ, respond)
        body = f"<Error><Code>{code}</Code><Message>says the store</Message></Error>".encode() if code else b""
        respond(status, [("Content-Length", str(len(body)))])
        return [body]

    return door


def dripping(part: str, ended: threading.Event) -> Door:
    """Send the answers to requests for what contains ``part`` byte by byte, with long pauses, until ``ended``."""

    def door(environ: Environ, respond: Respond, store: Application) -> Iterable[bytes]:
        body = b"".join(store(environ, respond))
        if part not in unquote(f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"):
            return [body]
        return (body[at : at + 1] for at in range(len(body) - 1) if not ended.wait(0.05))

    return door


def listing(keys: Callable[[int], Iterable[str]], *, endless: bool = False) -> Door:
    """List these objects, by the number of the page; ``endless``: each page says that another follows."""
    pages = itertools.count()

    def door(environ: Environ, respond: Respond, store: Application) -> Iterable[bytes]:
        page = next(pages)
        objects = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-21T20:00:00Z</LastModified><Size>1</Size>"
            "</Contents>"
            for key in keys(page)
        )
        more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{page}</NextContinuationToken>" * endless
        body = f"<ListBucketResult>{objects}{more}</ListBucketResult>".encode()
        respond("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    return door


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Say nothing: what a test is told it asks for."""


def _open(environ: Environ, respond: Respond, store: Application) -> Iterable[bytes]:
    return store(environ, respond)
