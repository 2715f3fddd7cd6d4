"""HTTP/1.1 on the wire: heads and bodies whose framing is doubtful, and pieces in which they come."""

from __future__ import annotations

import random
from typing import Final

from fuzz import tokens
from fuzz.mutators import octets

METHODS: Final = (
    b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"TRACE", b"CONNECT", b"PRI", b"get",
    b"M-SEARCH", b"FOO", b"", b"G\0T", b"PROPFIND", b"X" * 300,
)  # fmt: skip
VERSIONS: Final = (
    b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.2", b"http/1.1", b"HTTP/1.1 ", b"HTTP/11", b"",
    b"ICY/1.1",
)  # fmt: skip
LINES: Final = (
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked, chunked",
    b"Transfer-Encoding: identity", b"Transfer-Encoding:\tchunked", b"Transfer-Encoding : chunked",
    b"transfer-encoding: CHUNKED", b"Transfer-Encoding: xchunked", b"Content-Length: 0", b"Content-Length: -1",
    b"Content-Length: +3", b"Content-Length: 3, 3", b"Content-Length: 99999999999999999999999",
    b"Content-Length: 0x10", b"Content-Length: 70000000", b"Content-Length:", b"Content-Length: 1 1",
    b"Content-Length: 65537", b"Expect: 100-continue", b"Expect: 200-maybe", b"Connection: close",
    b"Connection: keep-alive", b"Connection: upgrade", b"Upgrade: h2c", b"Upgrade: websocket",
    b"Content-Encoding: gzip", b"Content-Encoding: br", b"Content-Encoding: deflate", b"Accept-Encoding: gzip",
    b"Accept-Encoding: gzip;q=0, *", b"Accept-Encoding: ,,,", b"Host: evil.example", b"Host:", b"Host: [::1]:80",
    b"Host: a b", b"Origin: http://evil.example", b"Origin: null", b"Sec-Fetch-Site: cross-site",
    b"Access-Control-Request-Method: POST", b"Inference-Header-Content-Length: 5",
    b"Inference-Header-Content-Length: -5", b"Inference-Header-Content-Length: 99999999999999999999",
    b"Inference-Header-Content-Length: a", b"Content-Type: application/octet-stream", b"Content-Type: image/png",
    b"Content-Type: multipart/form-data; boundary=x", b"Content-Type: multipart/form-data", b"Content-Type: \xff",
    b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", b"traceparent: 00-0-0-01",
    b"tracestate: =,=", b"Idempotency-Key: k", b"Idempotency-Key: \xff", b"x-tenant: small", b"x-tenant: \xff\xfe",
    b"triton_x: 1", b"endpoint-load-metrics-format: text", b"endpoint-load-metrics-format: json",
    b"endpoint-load-metrics-format: x", b" folded: value", b"no colon", b": no name", b"na me: value",
    b"n\0me: value", b"name: va\0lue", b"name: va\rlue", b"\xc3\xa9: value", b"name:" + b"v" * 9_000,
    b"n" * 9_000 + b": value", b"Range: bytes=0-1", b"If-None-Match: *", b"X-Y: " + b"\x80" * 40,
    b"Trailer: Content-Length", b"TE: trailers",
)  # fmt: skip
"""Lines of heads, good ones and others. A header that the server looks at is there at least once."""
CHUNKS: Final = (
    b"0\r\n\r\n", b"1;a=b\r\nx\r\n", b"5\r\nab", b"ffffffffffffffffff\r\n", b"-1\r\n", b"g\r\n", b"\r\n",
    b"0\r\nX: y\r\n\r\n", b"1\nx\n", b"00000000000000000000000001\r\nx\r\n", b"1 \r\nx\r\n",
    b"0;" + b"e" * 5_000 + b"\r\n\r\n", b"1\r\nxy\r\n",
)  # fmt: skip


def whole(method: bytes, target: bytes, lines: list[bytes], body: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    """Return a request as it stands on the wire."""
    return b"\r\n".join([b" ".join((method, target, version)), *lines, b"", body])


def chunked(rng: random.Random, body: bytes) -> bytes:
    """Return a body in chunks of any size, in good order."""
    out = []
    while body:
        size = rng.randint(1, max(1, len(body)))
        spelled = b"%x" % size if rng.random() < 0.7 else b"%06X;x=%d" % (size, size)
        out += [spelled, b"\r\n", body[:size], b"\r\n"]
        body = body[size:]
    return b"".join([*out, b"0\r\n", rng.choice((b"", b"Trailing: x\r\n")), b"\r\n"])


def mutated(rng: random.Random, method: bytes, target: bytes, lines: list[bytes], body: bytes) -> list[bytes]:
    """Return a request with something wrong with its framing, in the pieces in which it is to be sent."""
    version = b"HTTP/1.1"
    lines = list(lines)
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(9)
        if kind == 0:
            method = rng.choice(METHODS)
        elif kind == 1:
            version = rng.choice(VERSIONS)
        elif kind <= 4:
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(LINES))
        elif kind == 5 and lines:
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
        elif kind == 6 and lines:
            del lines[rng.randrange(len(lines))]
        elif kind == 7:
            lines = [line for line in lines if not line.lower().startswith(b"content-length")]
            lines.append(b"Transfer-Encoding: chunked")
            body = chunked(rng, body)
            if rng.random() < 0.6:
                at = rng.randrange(len(body) + 1)
                body = body[:at] + rng.choice(CHUNKS) + body[at:]
        else:
            lines += [b"X-%d: %d" % (number, number) for number in range(rng.choice((50, 300, 3_000)))]
    raw = whole(method, target, lines, body, version)
    if rng.random() < 0.3:
        raw = raw.replace(b"\r\n", rng.choice((b"\n", b"\r", b"\r\n\r\n", b"\n\r")), rng.choice((1, 2, -1)))
    if rng.random() < 0.3:
        raw = octets.mutated(rng, raw)
    if rng.random() < 0.2:
        raw *= rng.choice((2, 3, 20))
    return pieces(rng, raw[: octets.LARGEST])


def pieces(rng: random.Random, raw: bytes) -> list[bytes]:
    """Cut bytes in one to four pieces."""
    cuts = sorted(rng.randrange(len(raw) + 1) for _ in range(rng.choice((0, 0, 1, 3))))
    return [raw[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(raw)], strict=True) if stop > start]


def target(rng: random.Random) -> bytes:
    """Return a target that is special."""
    return rng.choice(TARGETS) if rng.random() < 0.7 else b"/" + octets.mutated(rng, rng.choice(TARGETS)[1:])


def value(rng: random.Random) -> bytes:
    """Return what a header of a well-formed head may say: any text without an end of line."""
    text = tokens.text(rng)[:4_000].encode(errors="surrogatepass")
    return bytes(byte for byte in text if byte == 9 or 32 <= byte != 127).strip()


TARGETS: Final = (
    b"*", b"/", b"//", b"/..", b"/%2e%2e/", b"/%ff", b"/%00", b"/v2", b"/v2/", b"/v2?a=%ff", b"/v2/health/live",
    b"/v2/health/ready", b"/v2/models/worker", b"/v2/models/worker/ready", b"/v2/models/worker/versions/1/ready",
    b"/v2/models/worker/versions/99999999999999999999/ready", b"/v2/models/%ff/ready", b"/v2/models/../ready",
    b"/v2/models/worker/config", b"/v2/models/worker/stats", b"/v2/models/stats", b"/v2/models//infer",
    b"/v2/models/nowhere/infer", b"/v2/repository/index", b"/v2/repository/x/index", b"/v2/logging",
    b"/v2/trace/setting", b"/v2/models/worker/trace/setting", b"/v2/systemsharedmemory/status",
    b"/v2/cudasharedmemory/status", b"/v2/quota", b"/v2/docs", b"/v2/docs/openapi.json", b"/ui", b"/ui/",
    b"/ui/%2e%2e/x", b"/ui/console.js", b"/ui/history?seconds=9", b"/ui/log?model=%ff&after=-1", b"/metrics",
    b"/v1/models", b"/v1/models/words", b"/v1/models/%ff",
    b"/v1/nowhere", b"http://localhost/v2/health/live", b"https://x:1/v2", b"HTTP://localhost/", b"localhost:80",
    b"/#x", b"/v2/models/" + b"a" * 3_000 + b"/ready", b"/" + b"a" * 60_000,
    b"/v2/models/worker/versions/" + b"9" * 5_000 + b"/infer", b"/v2/models/w%6frker/ready",
    b"/v2/models/worker/infer ",
)  # fmt: skip
"""What can be asked without changing anything, and what cannot be asked."""
