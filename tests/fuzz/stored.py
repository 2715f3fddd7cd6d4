"""Valid requests about what outlives a request: files, batches, usage, stored responses, routes and rollouts."""

from __future__ import annotations

import json
import random
from typing import Any, Final
from urllib.parse import quote

from fuzz import inference, models, tokens
from fuzz.administration import Request
from fuzz.mutators import documents, octets, words

FILE: Final = "file-" + "0" * 32
BATCH: Final = "batch_" + "0" * 32
RESPONSE: Final = "resp_" + "0" * 32
"""Stand for the ids of a file, a batch and a response that are there."""
_NOWHERE: Final = ("file-1", "batch_1", "resp_1", "..", "%2e%2e", "%00", "%ff", "a%2fb", "x" * 1_100, "%F0%9F%98%80")
_PURPOSES: Final = ("batch", "user_data", "assistants", "batch_output", "")
WINDOW: Final = "3s"
"""After which a batch has ended, whatever its items do."""
_LABELS: Final = {"metadata": {"a": "b", "é": "\ud83d\ude00"}}
_EXPIRING: Final = {"output_expires_after": {"anchor": "created_at", "seconds": 3_600}}


def file(rng: random.Random) -> Request:
    """Return a request about files or batches."""
    kind = rng.randrange(10)
    if kind == 0:
        return Request("GET", f"/v1/files{_query(rng, _LISTS)}")
    if kind == 1:
        return Request("GET", f"/v1/batches{_query(rng, _LISTS)}")
    if kind <= 3:
        name = FILE if rng.random() < 0.7 else rng.choice(_NOWHERE)
        return Request(rng.choice(("GET", "GET", "GET", "DELETE")), f"/v1/files/{name}{rng.choice(('', '/content'))}")
    if kind <= 5:
        name = BATCH if rng.random() < 0.7 else rng.choice(_NOWHERE)
        return Request(*rng.choice((("GET", f"/v1/batches/{name}"), ("POST", f"/v1/batches/{name}/cancel", {}))))
    return Request("POST", "/v1/batches", _batch(rng, "/v2/models/inside/infer"))


def _batch(rng: random.Random, endpoint: str) -> dict[str, Any]:
    made = {"input_file_id": FILE, "endpoint": endpoint, "completion_window": WINDOW}
    return made | rng.choice(({}, {}, _LABELS, _EXPIRING))


_LISTS: Final = (
    ("limit", ("1", "20", "0", "10000", "-1", "1e3")), ("after", (FILE, BATCH, "x")), ("order", ("asc", "desc")),
    ("purpose", _PURPOSES),
)  # fmt: skip
_OF_USAGE: Final = (
    ("start", ("2026-11-01", "0", "1e9", "2026-11-01T00:00:00Z", "9" * 12)), ("end", ("2030-01-01", "9999999999")),
    ("group_by", (
        "model", "model,ending", "day", "tenant", "class", "route", "arm", "origin", "version", "source", "pool",
        "member", ",", "model,model",
    )),
)  # fmt: skip


def _query(rng: random.Random, known: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    """Return a query of some of these parameters, with values that they may have or with any."""
    pairs = []
    for name, values in rng.sample(known, rng.randint(0, len(known))):
        odd = rng.random()
        value = rng.choice(values) if odd < 0.7 else quote(tokens.text(rng)[:2_000], errors="replace")
        pairs.append(f"{name}={value}" if odd < 0.95 else quote(tokens.text(rng)[:200], errors="replace"))
    return f"?{rng.choice('&&&;').join(pairs)}" if pairs else ""


def usage(rng: random.Random) -> Request:
    """Return a question for what was used, what is left, or what background work has set aside."""
    kind = rng.randrange(12)
    if kind == 0:
        return Request("GET", "/v2/quota")
    if kind == 1:
        return Request("GET", "/v2/background")
    if kind == 2:
        loop = rng.choice(("batches", "ledger", "webhooks", "rollouts", "%ff", ".."))
        body = {"unit": rng.choice((BATCH, "", "x" * 2_000, "é"))}
        return Request("POST", f"/v2/background/{loop}/{rng.choice(('retry', 'discard'))}", body)
    return Request("GET", f"/{rng.choice(('v1', 'v1', 'v2'))}/usage{_query(rng, _OF_USAGE)}")


def chain(rng: random.Random) -> Request:
    """Return a response that continues another and is kept, or a request about one that was kept."""
    name = RESPONSE if rng.random() < 0.8 else rng.choice(_NOWHERE)
    kind = rng.randrange(5)
    if kind == 0:
        return Request(rng.choice(("GET", "GET", "DELETE")), f"/v1/responses/{name}")
    if kind == 1:
        listed = (("limit", ("1", "100", "0")), ("after", ("x",)), ("order", ("asc", "desc")), ("include", ("a",)))
        return Request("GET", f"/v1/responses/{name}/input_items{_query(rng, listed)}")
    made = {"model": "words", "input": rng.choice(("a", [{"role": "user", "content": "b"}])), "max_output_tokens": 2}
    kept = {"store": rng.random() < 0.8, "stream": rng.random() < 0.2, "previous_response_id": name}
    return Request("POST", "/v1/responses", made | kept | rng.choice(({}, {"metadata": {"a": "b"}}, {"user": "é"})))


def named(rng: random.Random) -> tuple[Request, tuple[str, ...]]:
    """Return a request in which model, version, tenant or class may be any text, and the lines of its head."""
    model = rng.choice(("words", "inside", "vectors")) if rng.random() < 0.4 else _name(rng)
    place = quote(model, safe="", errors="replace") or "x"
    version = "" if rng.random() < 0.7 else f"/versions/{rng.choice(('1', '2', '0' * 50, '9' * 30))}"
    request = rng.choice((
        Request("POST", "/v1/completions", {"model": model, "prompt": "a", "max_tokens": 1}),
        Request("POST", "/v1/chat/completions", {"model": model, "messages": [], "user": _name(rng)}),
        Request("POST", "/v1/embeddings", {"model": model, "input": "a"}),
        Request("POST", f"/v2/models/{place}{version}/infer", inference.document(rng, inference.asked(rng, "inside"))),
        Request("POST", f"/v2/models/{place}{version}/generate", {"text_input": "a"}),
    ))  # fmt: skip
    senders = ("x-tenant", "x-nerite-class", "x-nerite-tenant", "x-nerite-request", "Authorization", "Idempotency-Key")
    lines = []
    for sender in rng.sample(senders, rng.choice((0, 1, 2))):
        text = "".join(char for char in _name(rng) if char not in "\r\n\0").strip()
        lines.append(f"{sender}: {text.encode(errors='replace').decode('latin-1')}")
    return request, tuple(lines)


def _name(rng: random.Random) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        return "a" + chr(rng.choice((0, 1, 9, 10, 13, 27, 127, 0x85, 0x200B, 0x2028, 0xFEFF, 0x10FFFF))) + "b"
    return tokens.text(rng) if kind < 3 else f"model-{rng.randrange(10**6)}"


# Batches that are run

_ODD_URLS: Final = (
    "/v2/models/{}\r\nX: y/infer", "/v2/models/{} a/infer", "/v2/models/{}?a=b/infer", "/v2/models/{}%2f/infer",
    "/v2/models/../infer", "/v2/models/{}/versions/99999999999999999999/infer", "/v2/models/{}\0/infer",
    "/v1/batches", "/v1//completions", "/v2/models/nowhere/infer",
)  # fmt: skip


def run(rng: random.Random) -> tuple[bytes, ...]:
    """Return an input file, the batch that runs it, and what is done to that, if anything."""
    model = rng.choice(("words", "vectors", "inside", "worker", "types", "counts", "wrong", "text", "engine"))
    openai = {"vectors": "/v1/embeddings", "words": rng.choice(("/v1/completions", "/v1/chat/completions"))}
    url = openai.get(model, f"/v2/models/{model}/infer")
    if rng.random() < 0.1:
        url = rng.choice(_ODD_URLS).format(model)
    odd = rng.random()
    lines = []
    for number in range(rng.choice((1, 1, 2, 3, 8, 40))):
        custom_id = f"{number}" if rng.random() < 0.9 else f"{number}{tokens.text(rng)[:1_000]}"
        document = _item(rng, model, url)
        body = documents.mutated(rng, document, 1) if odd < 0.6 and not number else documents.dumped(document)
        envelope = documents.dumped({"custom_id": custom_id, "method": "POST", "url": url})
        lines.append(envelope[:-1] + b',"body":' + body.replace(b"\n", b" ") + b"}")
    text = b"\n".join([*lines, b""])
    if odd > 0.9:
        text = octets.mutated(rng, text, 2)
    elif odd > 0.8:
        text = words.mutated(rng, text.decode("latin-1"), ("custom_id", "body", "null", "true"))
    made = _batch(rng, url)
    batch = documents.mutated(rng, made, 1) if rng.random() < 0.1 else documents.dumped(made)
    return text[: octets.LARGEST], batch, *rng.choice(((), (), (), (b"cancel",)))


def _item(rng: random.Random, model: str, url: str) -> dict[str, Any]:
    if url == "/v1/embeddings":
        return {"model": model, "input": rng.choice(("a", ["a", "b"]))}
    if url == "/v1/chat/completions":
        return {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    if url == "/v1/completions":
        return {"model": model, "prompt": rng.choice(inference.PROMPTS), "max_tokens": 2}
    asked = inference.asked(rng, model)
    return inference.document(rng, asked)


# Routes and rollouts

_HOOKS: Final = (
    "http://a..b/x", "http://127.0.0.1:1/", "http://[::1]:1/x", "https://127.0.0.1:1", "http://127.0.0.1:99999/x",
    "http://u:p@127.0.0.1:1/?q#f", "http://" + "a" * 64 + ".invalid/", "http://[::1", "ftp://x", "http://%00/", "x",
    "http://xn--a.invalid/", "http://127.0.0.1:1/%0d%0aX: y",
)  # fmt: skip
_COMMANDS: Final = ("pause", "resume", "promote", "abort", "clear", "abort", "clear", "follow", "nothing")


def rollout(rng: random.Random) -> Request:
    """Return the start of a rollout, a command for it, a look at it, or the same of a route."""
    place = f"/v2/models/{rng.choice((models.ROLLED, models.ROLLED, models.ROLLED, 'worker', 'nowhere'))}"
    kind = rng.randrange(10)
    if kind == 0:
        return Request("GET", rng.choice(("/v2/rollouts", *(f"{place}/rollout{each}" for each in _LOOKS))))
    if kind <= 2:
        return Request("POST", f"{place}/rollout/{rng.choice(_COMMANDS)}", rng.choice(({}, {"force": True})))
    if kind == 3:
        return Request("POST", f"{place}/rollout/{rng.choice(('check', 'analysis'))}", {"from": "1", "to": "2"})
    if kind == 4:
        arms = [{"version": 1, "weight": 90}, {"model": models.ROLLED, "version": 2, "weight": 10.5}]
        shadow = {"version": 2, "share": "10%", "tolerance": 0.001, "timeout": 3, "concurrency": 2}
        made = {"arm": arms, "sticky": ["header:x-user", "tenant"], "salt": "a"}
        # Not of a model that is asked after each round: the route stays until that is unloaded.
        return Request("POST", f"/v2/models/{models.ROLLED}/route", made | rng.choice(({}, {"shadow": shadow})))
    return Request("POST", f"{place}/rollout", _rollout(rng))


_LOOKS: Final = ("", "/history", "/analysis")


def _rollout(rng: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {"to": "2", "from": "1", "steps": [50, 100], "hold": "1s", "requests": 1, "deadline": "5s"}
    more = (
        ("webhook", rng.choice(_HOOKS)), ("gate", ["errors", "p99=+10%"]), ("sticky", "header:x-user"),
        ("shadow", "10%"), ("record", True), ("force", True), ("at-deadline", "rollback"),
    )  # fmt: skip
    return made | dict(rng.sample(more, rng.randint(0, 4)))


def declared(rng: random.Random, name: str, text: bytes) -> tuple[Request, bytes, str]:
    """Return a request that reads a file in the repository, the content of the file and where it is."""
    model = models.ROLLED if name == "rollout.toml" else models.ARMS
    if name == "rollout.toml" and rng.random() < 0.4:
        pairs = [f"{key} = {json.dumps(value)}" for key, value in _rollout(rng).items()]
        text = words.mutated(rng, "\n".join(pairs), ("webhook", "http://", "..", "2", "1"))
    look = Request("POST", f"/v2/repository/models/{model}/load", {})
    if name == "rollout.toml":  # it is read once a second
        look = Request("GET", f"/v2/models/{model}/rollout")
    return look, text, f"{model}/{name}"


SETTLED: Final = (
    *(Request("POST", f"/v2/models/{models.ROLLED}/rollout/{each}", {}) for each in ("abort", "clear")),
    Request("POST", f"/v2/repository/models/{models.ARMS}/unload", {}),
    Request("POST", f"/v2/repository/models/{models.ROLLED}/load", {}),
)
"""What ends rollouts, and has a model have its first version alone. Each may be refused."""
