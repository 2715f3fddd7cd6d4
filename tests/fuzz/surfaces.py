"""What the fuzzer sends, and where: of each surface how an input is made, what its parts are, and its share of a run.

An input of most surfaces over HTTP is well formed as far as framing goes: the first part is a line with method and
path and lines of headers, the second the body. The server owes an answer to each of these. An input of ``http`` and
``http2`` is bytes, sent in pieces on a connection of its own; the server owes an end of that connection. An input of
gRPC is a line with the path and lines of metadata, and then what DATA frames carry; what is owed is an end of the call.
An input of ``batches`` is a head, a file, the batch that runs it, and what is done to that; what is owed is its end.
"""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from fuzz import administration, configurations, forms, inference, picking, routed, stored, tokens
from fuzz.administration import Request
from fuzz.case import Case
from fuzz.mutators import documents, fields, frames, heads, octets

KEPT, LOADS, PIECES, CALLS, FRAMES, LOCAL = "kept", "loads", "pieces", "calls", "frames", "local"
RUNS = "runs"
"""How inputs are sent: see ``lanes``, and ``batch_runs``. ``local``: not at all, they are read in this process."""
Parts = tuple[bytes, ...]


class Surface(NamedTuple):
    """A part of the server that reads what others wrote."""

    lane: str
    share: int
    """Of a hundred inputs of a run over all surfaces."""
    make: Callable[[random.Random], Parts]
    fixed: int = 2
    """So many parts, from the first, are needed for an input to be one. If any are, the first is a head of lines."""


def head(rng: random.Random, method: str, path: str, *lines: str) -> bytes:
    """Return the first part of a request over HTTP; at times with headers that nobody asked for."""
    made = [f"{method} {path}".encode(), *(line.encode(errors="surrogateescape") for line in lines)]
    if rng.random() < 0.06:
        made.append(b"Transfer-Encoding: chunked")
    if rng.random() < 0.06:
        name = rng.choice(
            (b"Content-Type", b"Accept-Encoding", b"traceparent", b"Idempotency-Key", b"x-tenant", b"X-Own")
        )
        made.append(name + b": " + heads.value(rng))
    if rng.random() < 0.02:
        made.append(rng.choice((b"Expect: 100-continue", b"Connection: close", b"Accept-Encoding: gzip")))
    return b"\n".join(made)


def _path(rng: random.Random, model: str, verb: str) -> str:
    place = f"/v2/models/{model}"
    if rng.random() < 0.05:
        place += f"/versions/{rng.choice(('1', '1', '2', '0', '01', '99999999999999999999'))}"
    return f"{place}/{verb}"


def _json(rng: random.Random) -> Parts:
    asked = inference.asked(rng)
    verbs = ("infer", "infer", "generate", "generate_stream")
    verb = rng.choice(verbs[1:] * 4 + verbs[:1] if inference.MODELS[asked.model].decoupled else verbs)
    document = inference.document(rng, asked) if verb == "infer" else inference.generated(rng, asked)
    body = documents.mutated(rng, document) if rng.random() < 0.95 else documents.dumped(document)
    path = _path(rng, asked.model, verb)
    if rng.random() > 0.04:
        return head(rng, "POST", path), body
    coding, packed = rng.choice((("gzip", gzip.compress(body, 1)), ("deflate", zlib.compress(body, 1))))
    if rng.random() < 0.5:
        packed = octets.mutated(rng, packed)
    return head(rng, "POST", path, f"Content-Encoding: {coding}"), packed


def _binary(rng: random.Random) -> Parts:
    return _in_binary(rng, inference.asked(rng, decoupled=rng.random() < 0.05))


def _bytes(rng: random.Random) -> Parts:
    asked = inference.asked(rng, rng.choice(("text", "text", "text", "types", "ratings", "vectors", "words")))
    if rng.random() < 0.6:
        return _in_binary(rng, asked)
    verb = rng.choice(("infer", "generate"))
    document = inference.document(rng, asked) if verb == "infer" else inference.generated(rng, asked)
    return head(rng, "POST", _path(rng, asked.model, verb)), documents.mutated(rng, document)


def _in_binary(rng: random.Random, asked: inference.Asked) -> Parts:
    document, tail = inference.binary(asked)
    kind = rng.randrange(8)
    body = documents.mutated(rng, document, 2) if kind < 3 else documents.dumped(document)
    size = str(len(body))
    if 3 <= kind <= 5:
        tail = octets.mutated(rng, tail)
    if kind == 5 or rng.random() < 0.1:
        wrong = (
            len(body) - 1,
            len(body) + 1,
            0,
            -1,
            len(body) + len(tail),
            len(body) + len(tail) + 1,
            tokens.number(rng),
        )
        size = rng.choice((*map(str, wrong), "", "a", " 5", "5 ", "+5", "0x5", "5.0", "\u0665"))
    if kind == 6:  # the whole body is one tensor
        return head(rng, "POST", _path(rng, asked.model, "infer"), "Inference-Header-Content-Length: 0"), tail
    lines = [f"Inference-Header-Content-Length: {size}"]
    if kind == 7:
        lines.append(rng.choice(("Content-Type: image/png", "Content-Type: multipart/form-data; boundary=x", lines[0])))
    return head(rng, "POST", _path(rng, asked.model, "infer"), *lines), (body + tail)[: octets.LARGEST]


def _http(rng: random.Random) -> Parts:
    asked = inference.asked(rng)
    body = documents.dumped(inference.document(rng, asked))
    method, target = b"POST", f"/v2/models/{asked.model}/infer".encode()
    if rng.random() < 0.5:
        method, target, body = rng.choice((b"GET", b"HEAD", b"POST", b"OPTIONS")), heads.target(rng), b""
    lines = [b"Host: localhost", b"Content-Length: %d" % len(body)]
    if rng.random() < 0.03:
        return tuple(heads.pieces(rng, rng.randbytes(rng.choice((1, 9, 24, 200, 5_000)))))
    return tuple(heads.mutated(rng, method, target, lines, body)) or (b"\0",)


def _paths(rng: random.Random) -> Parts:
    """Return a request for something odd, well framed."""
    method = rng.choice(("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"))
    target = heads.target(rng).replace(b"\r", b"").replace(b"\n", b"").replace(b" ", b"%20") or b"/"
    body = documents.dumped(tokens.scalar(rng)) if method != "GET" and rng.random() < 0.5 else b""
    lines = rng.sample(heads.LINES, rng.randrange(3))
    plain = [line for line in lines if not line.lower().startswith((b"content-length", b"transfer-encoding", b" "))]
    return b"\n".join([method.encode() + b" " + target[:8_000], *(line.replace(b"\r", b"") for line in plain)]), body


def _request(make: Callable[[random.Random], Request], least: float = 0.1) -> Callable[[random.Random], Parts]:
    """Return what makes inputs of valid requests. ``least``: so many of them stay as they are."""

    def parts(rng: random.Random) -> Parts:
        method, path, document = make(rng)
        if document is None:
            return head(rng, method, path), b""
        body = documents.dumped(document) if rng.random() < least else documents.mutated(rng, document)
        return head(rng, method, path), body

    return parts


def _form(rng: random.Random) -> Parts:
    made = forms.form(rng)
    first = head(rng, "POST", made.path)
    return first + b"\nContent-Type: " + made.content_type, made.body


def _load(rng: random.Random) -> Parts:
    kind = rng.random()
    if kind < 0.3:
        return _request(configurations.load_with_changed_config, 1.0)(rng)
    if kind < 0.5:
        path = f"/v2/repository/models/{administration.models.ON_DISK}/{rng.choice(('load', 'load', 'load', 'unload'))}"
        return head(rng, "POST", path), b"", configurations.config_for_load(rng)
    if kind < 0.8:
        return _request(administration.load, 1.0)(rng)
    method, path, document = administration.load(rng)
    # What a program says is not changed by chance: it runs.
    parameters = document.get("parameters", {}) if isinstance(document, dict) else {}
    programs = {name: parameters.pop(name) for name in list(parameters) if name.startswith("file:")}
    parameters.pop("config", None)
    body = documents.mutated(rng, document)
    if programs and rng.random() < 0.5:
        body = documents.dumped({"parameters": {"config": "{}", **dict.fromkeys(programs, "AA=A")}})
    return head(rng, method, path), body


def _rollout(rng: random.Random) -> Parts:
    if rng.random() < 0.7:
        return _request(stored.rollout)(rng)
    name = rng.choice(("rollout.toml", "route.toml"))
    text = configurations.rollout(rng) if name == "rollout.toml" else configurations.route(rng)
    look, text, place = stored.declared(rng, name, text)
    return head(rng, look.method, look.path), b"", text, place.encode()


def _batch(rng: random.Random) -> Parts:
    first = b"POST /v1/files" if rng.random() < 0.95 else b"POST /v1/files\nx-tenant: small"
    return (first, *stored.run(rng))


def _named(rng: random.Random) -> Parts:
    (method, path, document), lines = stored.named(rng)
    body = documents.dumped(document) if rng.random() < 0.7 else documents.mutated(rng, document)
    return head(rng, method, path, *lines), body


def _metadata(rng: random.Random) -> list[tuple[bytes, bytes]]:
    made = []
    if rng.random() < 0.1:
        made.append(
            (
                b"grpc-timeout",
                rng.choice((b"1n", b"5m", b"10S", b"99999999H", b"0S", b"-1S", b"x", b"", b"1", b"999999999S")),
            )
        )
    if rng.random() < 0.1:
        made.append((b"grpc-encoding", rng.choice((b"gzip", b"deflate", b"identity", b"snappy", b"", b"gzip,deflate"))))
    if rng.random() < 0.1:
        made.append((b"grpc-accept-encoding", rng.choice((b"gzip", b"deflate, gzip", b"identity", b",", b""))))
    if rng.random() < 0.05:
        name = rng.choice(
            (b"traceparent", b"idempotency-key", b"x-tenant", b"x-own", b"x-bin", b"triton_x", b"authorization")
        )
        made.append((name, heads.value(rng)[:2_000]))
    return made


def _call_head(path: str | bytes, metadata: list[tuple[bytes, bytes]], *, end: bytes = b"") -> bytes:
    first = path if isinstance(path, bytes) else path.encode()
    lines = [name + b": " + value for name, value in metadata]
    return b"\n".join([first, *lines, *((b":end " + end,) if end else ())])


def _framed(rng: random.Random, message: bytes, metadata: list[tuple[bytes, bytes]]) -> bytes:
    """Return a message behind its five bytes, which may be wrong."""
    flag, size = 0, len(message)
    encoding = dict(metadata).get(b"grpc-encoding", b"")
    if encoding in (b"gzip", b"deflate") and rng.random() < 0.8:
        flag, message = 1, gzip.compress(message, 1) if encoding == b"gzip" else zlib.compress(message, 1)
        if rng.random() < 0.3:
            message = octets.mutated(rng, message)
        size = len(message)
    if rng.random() < 0.06:
        size = rng.choice((0, 1, size + 1, size - 1, 2**31 - 1, 2**31, 2**32 - 1)) % 2**32
    if rng.random() < 0.03:
        flag = rng.choice((1, 2, 255))
    return bytes((flag,)) + size.to_bytes(4, "big") + message


def _cut(rng: random.Random, body: bytes) -> list[bytes]:
    if rng.random() < 0.85:
        return [body]
    return heads.pieces(rng, body) if rng.random() < 0.8 else [body, b""]


def _grpc(rng: random.Random) -> Parts:
    metadata = _metadata(rng)
    if rng.random() < 0.65:
        path = b"/inference.GRPCInferenceService/ModelInfer"
        message = inference.message(rng, inference.asked(rng))
    else:
        name = rng.choice(tuple(administration.METHODS))
        path, message = name.encode(), administration.METHODS[name](rng).SerializeToString()
        if name.endswith("RepositoryModelLoad"):
            return (_call_head(path, metadata), *_cut(rng, _framed(rng, message, metadata)))
    if rng.random() < 0.03:
        path = octets.mutated(rng, path, 2).replace(b"\n", b"").replace(b": ", b"")[:4_000] or b"/"
    if rng.random() < 0.9:
        message = fields.mutated(rng, message) if rng.random() < 0.85 else octets.mutated(rng, message)
    body = _framed(rng, message, metadata)
    if rng.random() < 0.03:
        body = octets.mutated(rng, body) if rng.random() < 0.5 else body * 2
    return (_call_head(path, metadata), *_cut(rng, body))


def _stream(rng: random.Random) -> Parts:
    metadata = [each for each in _metadata(rng) if each[0] != b"grpc-timeout"]
    if rng.random() < 0.1:
        metadata.append((b"triton_grpc_error", rng.choice((b"true", b"1", b"false"))))
    only = ("counts", "counts", "direct", "worker", "words", "turns", "text", "wrong", "engine", "pipeline")
    bodies = []
    for _ in range(rng.choice((0, 1, 1, 2, 3, 12))):
        message = inference.message(rng, inference.asked(rng, rng.choice(only)))
        if rng.random() < 0.4:
            message = fields.mutated(rng, message)
        bodies.append(_framed(rng, message, metadata))
    return _of_stream(rng, "/inference.GRPCInferenceService/ModelStreamInfer", bodies, metadata)


def _of_stream(rng: random.Random, path: str, bodies: list[bytes], metadata: list[tuple[bytes, bytes]]) -> Parts:
    body = b"".join(bodies)[: octets.LARGEST]
    pieces = bodies if rng.random() < 0.5 else heads.pieces(rng, body)
    if pieces and rng.random() < 0.15:
        pieces[-1] = pieces[-1][: rng.randrange(len(pieces[-1]) + 1)]
    end = rng.choice((b"", b"", b"", b"", b"reset", b"trailers"))
    return (_call_head(path, metadata, end=end), *pieces)


def _picker(rng: random.Random) -> Parts:
    odd = rng.random() < 0.3
    messages = [each.SerializeToString() for each in picking.session(rng)]
    metadata = _metadata(rng) if odd else []
    bodies = [_framed(rng, fields.mutated(rng, each) if odd else each, metadata) for each in messages]
    return _of_stream(rng, picking.PROCESS, bodies, metadata)


def _http2(rng: random.Random) -> Parts:
    path = rng.choice(
        (b"/inference.GRPCInferenceService/ModelInfer", b"/inference.GRPCInferenceService/ModelStreamInfer")
    )
    metadata = _metadata(rng)
    body = _framed(
        rng, inference.message(rng, inference.asked(rng, rng.choice(("worker", "text", "inside")))), metadata
    )
    made = frames.mutated(rng, frames.session(rng, path, metadata, body))
    preface = frames.PREFACE if rng.random() < 0.97 else octets.mutated(rng, frames.PREFACE)
    return (preface, *made)


def _answers(rng: random.Random) -> Parts:
    body = rng.randbytes(rng.choice((0, 5, 200, 20_000)))
    made = frames.answers(rng, rng.randint(1, 4), body)
    return tuple(frames.mutated(rng, made) if rng.random() < 0.9 else made)


def _config(rng: random.Random) -> Parts:
    if rng.random() < 0.3:
        return b"json", configurations.config_document(rng)
    return b"text", configurations.config(rng)


SURFACES: Final[Mapping[str, Surface]] = {
    "json": Surface(KEPT, 10, _json),
    "binary": Surface(KEPT, 8, _binary),
    "bytes": Surface(KEPT, 6, _bytes),
    "paths": Surface(KEPT, 3, _paths),
    "http": Surface(PIECES, 8, _http, 0),
    "metrics": Surface(PIECES, 1, _http, 0),
    "grpc": Surface(CALLS, 9, _grpc, 1),
    "streams": Surface(CALLS, 6, _stream, 1),
    "http2": Surface(FRAMES, 7, _http2, 0),
    "openai": Surface(KEPT, 7, _request(administration.openai)),
    "forms": Surface(KEPT, 3, _form),
    "regions": Surface(KEPT, 3, _request(administration.region, 0.3)),
    "settings": Surface(KEPT, 3, _request(administration.setting)),
    "loads": Surface(LOADS, 1, _load),
    "files": Surface(KEPT, 2, _request(stored.file, 0.4)),
    "batches": Surface(RUNS, 2, _batch, 3),
    "usage": Surface(KEPT, 1, _request(stored.usage, 0.4)),
    "chains": Surface(KEPT, 1, _request(stored.chain, 0.5)),
    "names": Surface(KEPT, 2, _named),
    "steering": Surface(LOADS, 1, _rollout),
    "picker": Surface(CALLS, 1, _picker, 1),
    "config": Surface(LOCAL, 3, _config),
    "answers": Surface(LOCAL, 2, _answers, 0),
    "policy": Surface(LOCAL, 2, lambda rng: (configurations.policy(rng),), 0),
    "batch": Surface(LOCAL, 2, lambda rng: (configurations.batch(rng),), 0),
    "routes": Surface(LOCAL, 1, lambda rng: (configurations.route(rng),), 0),
    "rollouts": Surface(LOCAL, 1, lambda rng: (configurations.rollout(rng),), 0),
    "cluster": Surface(LOCAL, 1, routed.cluster, 0),
    "members": Surface(LOCAL, 1, routed.members, 0),
    "responses": Surface(LOCAL, 2, routed.response, 0),
}
"""All there are."""
OF_PICKER: Final = ("picker", "http2", "metrics")
"""Those that are sent to an endpoint picker, which answers nothing else."""


def of_profile(profile: str, names: list[str]) -> list[str]:
    """Return which of these surfaces what is started with a profile has."""
    return [name for name in names if (name in OF_PICKER if profile == "picker" else name != "picker")]


def case(surface: str, seed: int, number: int) -> Case:
    """Return an input. Equal arguments make equal inputs."""
    rng = random.Random(f"{seed}/{surface}/{number}")
    return Case(surface, SURFACES[surface].make(rng), number)


def draw(seed: int, names: list[str], first: int, count: int) -> list[Case]:
    """Return some inputs of a run over these surfaces, by their shares."""
    chance = random.Random(f"{seed}/shares/{first}")
    shares = [SURFACES[name].share for name in names]
    return [case(name, seed, first + at) for at, name in enumerate(chance.choices(names, shares, k=count))]
