"""The documentation pages of the HTTP port: its models and endpoints, and the paths of ``GET /``."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nerite import __version__
from nerite.core.signature import SignatureInput
from nerite.transports.access import Lock
from nerite.transports.http import reply
from nerite.transports.http.handler import BackgroundCalls, HttpExchange
from nerite.transports.http.head import RequestHead
from nerite.transports.http.json_tensors import HALVES
from nerite.transports.http.openapi import (
    NO_SAMPLE,
    SampleInput,
    ServedModel,
    openapi_document,
    sample_inputs,
    sample_of,
    served_models,
)
from nerite.transports.http.reply import Reply
from nerite.transports.http.routes import ENDPOINT_DESCRIPTIONS
from nerite.transports.http.routes import ENDPOINTS as ROUTES

if TYPE_CHECKING:
    from nerite.server import InferenceServer

# The documentation: self-contained, with the models, sample commands for each, and every endpoint. It and the OpenAPI
# document are made on request, because models come and go.

_STYLE: Final = (Path(__file__).with_name("pages") / "docs" / "page.css").read_text(encoding="utf-8")
_SCRIPT: Final = (Path(__file__).with_name("pages") / "docs" / "page.js").read_text(encoding="utf-8")
_MAX_OPEN: Final = 3
"""Up to this many models are shown expanded."""


def _hash_source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


DOCS_POLICY: Final = (
    f"default-src 'none'; style-src {_hash_source(_STYLE)}; script-src {_hash_source(_SCRIPT)}; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
"""The page's Content-Security-Policy: only its own script and style, and requests only to its own server."""


def docs_page(
    name: str,
    served: Sequence[ServedModel],
    idle: Iterable[tuple[str, str, str]],
    key_headers: Mapping[str, str],
    url: str,
) -> str:
    """Return the page of the server called ``name``.

    ``idle`` has the model, version and state of versions that are not served; ``key_headers`` has the header that each
    restricted category needs.
    """
    key_header = key_headers.get("inference", "")
    opened = " open" if len({each.model for each in served}) <= _MAX_OPEN else ""
    models = "".join(_model(each, key_header, url, opened, number) for number, each in enumerate(served))
    rest = "".join(
        f"<tr><td>{escape(model)}<td>{escape(version)}<td class={state or 'none'}>{state or 'not loaded'}"
        for model, version, state in idle
    )
    if rest:
        rest = f"<h2>Not served</h2>{_table(('Model', 'Version', 'State'), rest)}"
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(name)}: models and endpoints</title>
<style>{_STYLE}</style>
<h1>{escape(name)}</h1>
<p class="muted">Nerite {__version__} at {escape(url)} · <a href="/v2/docs/openapi.json">OpenAPI document</a></p>
<main>
<h2>Models</h2>
{models or "<p>No model is served.</p>"}
{rest}
<h2>Endpoints</h2>
{_table(("Method", "Path", "Description", "Category"), _endpoints(key_headers))}
</main>
<script>{_SCRIPT}</script>
"""


def _model(each: ServedModel, key_header: str, url: str, opened: str, number: int) -> str:
    signature = each.signature
    batch = f"batches of up to {signature.max_batch_size}" if signature.max_batch_size else "no batching"
    tensors = "".join(
        f"<tr><td>{kind}<td><code>{escape(declared.name)}</code><td>{declared.datatype.name}"
        f"<td><code>{each.shape(declared)}</code>"
        for kind, declared in each.tensors()
    )
    return (
        f"<details{opened}><summary><strong>{escape(each.model)}</strong> <span>version {each.version}</span> "
        f'<span class="READY">READY</span> <small>{escape(each.platform)}, {batch}</small></summary><div>'
        f"{_table(('', 'Name', 'Type', 'Shape'), tensors)}{_example(each, key_header, url, number)}</div></details>\n"
    )


_LANGUAGES: Final = (("curl", "curl"), ("python", "Python"), ("cli", "Command line"))
"""Key and name of the languages in which a request is shown."""


def _example(each: ServedModel, key_header: str, url: str, number: int) -> str:
    """Return fields for the values of a request, the commands that send it, and a button that does.

    The script of the page keeps the commands in step with the fields; without it, there is the one for curl.
    """
    sample = sample_of(each.signature, decoupled=each.decoupled)
    if not each.paths:
        return "<p>The name of this model is not valid in a URL path: use gRPC.</p>"
    if sample is None:
        return f"<p>{NO_SAMPLE}</p>"
    path = each.paths[0]
    what = escape(f"{each.model}, version {each.version}")
    key = f'<label>{escape(key_header)} <input name="{escape(key_header)}"></label>' if key_header else ""
    data = {
        "model": each.model,
        "version": "" if each.latest else each.version,
        "url": url,
        "key": key_header,
        "streams": "yes" if sample.streams else "",
        "binary": "yes" if sample.binary else "",
        "batches": "yes" if each.signature.max_batch_size else "",
    }
    inputs = sample_inputs(each.signature, decoupled=each.decoupled)
    attributes = " ".join(f'data-{name}="{escape(value)}"' for name, value in data.items())
    tabs = "".join(_tab(language, name, number) for language, name in _LANGUAGES)
    return (
        f'<form action="{escape(path)}" {attributes}>'
        f"{''.join(_field(each, declared, inputs[declared.name]) for declared in each.signature.inputs.values())}"
        f'<div class="tabs" role="tablist" aria-label="Ways to send the request to {what}">{tabs}</div>'
        f'<div class="command"><pre tabindex="0" role="tabpanel" id="panel-{number}" '
        f'aria-labelledby="tab-{number}-curl">{escape(sample.curl(url + path, key_header))}</pre>'
        f'<button type="button" class="copy" aria-label="Copy the command for {what}">Copy</button></div>'
        f'{key}<button aria-label="Send the request to {what}">Send</button><output aria-live="polite"></output></form>'
    )


def _tab(language: str, name: str, number: int) -> str:
    chosen = language == _LANGUAGES[0][0]
    return (
        f'<button type="button" role="tab" data-language="{language}" id="tab-{number}-{language}" '
        f'aria-controls="panel-{number}" aria-selected="{str(chosen).lower()}" tabindex="{0 if chosen else -1}">'
        f"{name}</button>"
    )


def _field(each: ServedModel, declared: SignatureInput, sample: SampleInput) -> str:
    """Return the fields for shape and values of an input."""
    shape, text = sample
    open_sizes = len(shape) > len(declared.dims) or -1 in declared.dims
    name = escape(declared.name)
    shown = escape(each.shape(declared))
    empty = "Left out" if declared.optional else "Zeros"
    only = " readonly" if declared.datatype in HALVES else ""
    sizes = (
        f'<label>shape <input name="shape" size="14" spellcheck="false" value="{json.dumps(shape)}" '
        f'aria-label="Shape of {name}"></label>'
        if open_sizes
        else f'<input name="shape" type="hidden" value="{json.dumps(shape)}">'
    )
    return (
        f'<fieldset data-name="{name}" data-datatype="{declared.datatype.name}" '
        f'data-declared="{shown}"{" data-optional" if declared.optional else ""}>'
        f"<legend><code>{name}</code> {declared.datatype.name} {shown}</legend>{sizes}"
        f'<textarea name="data" rows="2" spellcheck="false" aria-label="Values of {name}" placeholder="{empty}"{only}>'
        f"{escape(text)}</textarea></fieldset>"
    )


def _endpoints(key_headers: Mapping[str, str]) -> str:
    rows = []
    for route in ROUTES:
        key = key_headers.get(route.category)
        needs = f"{route.category}, needs {escape(key)}" if key else route.category
        rows.append(
            f"<tr><td>{' '.join(route.methods)}<td><code>{escape(route.path)}</code>"
            f"<td>{ENDPOINT_DESCRIPTIONS[route.name].summary}<td>{needs}"
        )
    return "".join(rows)


def _table(titles: Iterable[str], rows: str) -> str:
    heads = "".join(f'<th scope="col">{title}' for title in titles)
    return f'<div class="wide"><table><thead><tr>{heads}<tbody>{rows}</table></div>'


CONSOLE_PATH: Final = "/ui"
NO_STORE: Final = b"Cache-Control: no-store\r\n"
_DOCS_HEADERS: Final = (
    b"Content-Security-Policy: %b\r\nX-Content-Type-Options: nosniff\r\n" % DOCS_POLICY.encode() + NO_STORE
)
_TO_DOCS: Final = Reply(302, content_type=reply.PLAIN, headers=b"Location: v2/docs\r\n")
_is_host = re.compile(r"[0-9A-Za-z.\-_]+(:[0-9]+)?|\[[0-9A-Fa-f:.]+\](:[0-9]+)?").fullmatch


class Documentation:
    """Answers the documentation endpoints. Each method is named after its endpoint (``routes``) and sends one reply."""

    def __init__(
        self, server: InferenceServer, locks: Mapping[str, Lock], *, metrics: bool = False, console: bool = False
    ) -> None:
        """``metrics``, ``console``: the port has these, too."""
        self._server = server
        self._links = {
            "documentation": "/v2/docs",
            "openapi": "/v2/docs/openapi.json",
            "server": "/v2",
            "health": "/v2/health/ready",
            "openai_models": "/v1/models",
            **({"metrics": "/metrics"} if metrics else {}),
            **({"console": CONSOLE_PATH} if console else {}),
        }
        self._background_calls = BackgroundCalls()
        self._key_headers = {category: lock.header for category, lock in locks.items()}

    def root(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
        """Send a browser to the documentation page, and others, such as load balancers' checks, the paths."""
        if "text/html" in head.headers.get("accept", ""):
            connection.send([_TO_DOCS.encode()])
        else:
            connection.send([reply.json_reply(self._links).encode()])

    def docs(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
        """Send the documentation page."""
        self._background_calls.start(connection, self._page(_url(connection, head)))

    def openapi(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
        """Send the OpenAPI document."""
        served = served_models(self._server.manager.records)
        made = openapi_document(served, self._key_headers, _url(connection, head))
        connection.send([reply.json_reply(made)._replace(headers=NO_STORE).encode()])

    async def _page(self, url: str) -> Reply:
        idle = await self._idle()
        served = served_models(self._server.manager.records)
        text = docs_page(str(self._server.metadata()["name"]), served, idle, self._key_headers, url)
        return Reply(200, text.encode(), "text/html; charset=utf-8", _DOCS_HEADERS)

    async def _idle(self) -> list[tuple[str, str, str]]:
        """Return the model, version and state of what is not served; nothing if listing the repository needs a key."""
        if "model-repository" in self._key_headers:
            return []
        index = await self._server.repository_index(False)
        idle = [entry for entry in index if entry.get("state") != "READY"]
        return [(entry["name"], entry.get("version", ""), entry.get("state", "")) for entry in idle]


def _url(connection: HttpExchange, head: RequestHead) -> str:
    """Return the URL of the server as the client sees it, from its request headers."""
    secure = connection.secure or head.headers.get("x-forwarded-proto") == "https"
    host = head.headers.get("host", "")
    return f"{'https' if secure else 'http'}://{host if _is_host(host) else 'localhost:8000'}"
