"""Compressed bodies, both ways."""

import gzip
import struct
import zlib

from conformance.exchange import Grpc, Http, dumped, get, grpc_tensor, infer, infer_message, post, tensor
from conformance.exchanges.scenes import GOOD

SCENE = GOOD

PLAIN = infer("echo", tensor("IN", "INT32", [8, 2], list(range(16)))).body
HEAD = dumped(
    {"inputs": [tensor("IN", "INT32", [1, 2], binary_data_size=8)], "parameters": {"binary_data_output": True}}
)
BINARY = HEAD + struct.pack("<2i", 5, 6)
PATH = "/v2/models/echo/infer"


def sent(body: bytes, encoding: str, **headers: str) -> Http:
    return post(PATH, body, content_encoding=encoding, **headers)


def raw_deflate(data: bytes) -> bytes:
    """Without zlib's frame."""
    worker = zlib.compressobj(wbits=-15)
    return worker.compress(data) + worker.flush()


LENGTH = {"Inference_Header_Content_Length": str(len(HEAD))}

EXCHANGES = {
    "gzip in": sent(gzip.compress(PLAIN), "gzip"),
    "deflate in": sent(zlib.compress(PLAIN), "deflate"),
    "deflate without a frame": sent(raw_deflate(PLAIN), "deflate"),
    "gzip called deflate": sent(gzip.compress(PLAIN), "deflate"),
    "deflate called gzip": sent(zlib.compress(PLAIN), "gzip"),
    "gzip in capitals": sent(gzip.compress(PLAIN), "GZIP"),
    "x-gzip": sent(gzip.compress(PLAIN), "x-gzip"),
    "identity": sent(PLAIN, "identity"),
    "empty encoding": sent(PLAIN, ""),
    "br": sent(PLAIN, "br"),
    "two encodings": sent(gzip.compress(zlib.compress(PLAIN)), "deflate, gzip"),
    "gzip that is not": sent(PLAIN, "gzip"),
    "gzip cut off": sent(gzip.compress(PLAIN)[:-10], "gzip"),
    "gzip with something behind it": sent(gzip.compress(PLAIN) + b"more", "gzip"),
    "gzip in two members": sent(gzip.compress(PLAIN[:20]) + gzip.compress(PLAIN[20:]), "gzip"),
    "gzip of nothing": sent(gzip.compress(b""), "gzip"),
    "gzip and an empty body": sent(b"", "gzip"),
    "gzip of a binary request": sent(gzip.compress(BINARY), "gzip", **LENGTH),
    "deflate of a binary request": sent(zlib.compress(BINARY), "deflate", **LENGTH),
    "gzip of a binary request, length of the compressed": sent(
        gzip.compress(BINARY), "gzip", Inference_Header_Content_Length="10"
    ),
    "gzip out": post(PATH, PLAIN, accept_encoding="gzip"),
    "deflate out": post(PATH, PLAIN, accept_encoding="deflate"),
    "anything out": post(PATH, PLAIN, accept_encoding="*"),
    "either out": post(PATH, PLAIN, accept_encoding="deflate, gzip"),
    "either out, gzip first": post(PATH, PLAIN, accept_encoding="gzip, deflate"),
    "better and worse": post(PATH, PLAIN, accept_encoding="gzip;q=0.5, deflate;q=0.8"),
    "identity preferred": post(PATH, PLAIN, accept_encoding="gzip;q=0.5, identity;q=1"),
    "gzip refused": post(PATH, PLAIN, accept_encoding="gzip;q=0"),
    "br out": post(PATH, PLAIN, accept_encoding="br"),
    "br or gzip out": post(PATH, PLAIN, accept_encoding="br, gzip"),
    "what browsers send": post(PATH, PLAIN, accept_encoding="gzip, deflate, br, zstd"),
    "out in capitals": post(PATH, PLAIN, accept_encoding="GZIP"),
    "malformed": post(PATH, PLAIN, accept_encoding="gzip;q=x;;,"),
    "empty accept": post(PATH, PLAIN, accept_encoding=""),
    "binary out, compressed": post(PATH, BINARY, accept_encoding="gzip", **LENGTH),
    "error, compressed": post(PATH, b"{", accept_encoding="gzip"),
    "unknown model, compressed": post("/v2/models/none/infer", PLAIN, accept_encoding="gzip"),
    "metadata, compressed": get("/v2/models/echo", accept_encoding="gzip"),
    "statistics, compressed": get("/v2/models/none/stats", accept_encoding="gzip"),
    "compressed body for an index": post(
        "/v2/repository/index", gzip.compress(b'{"ready":true}'), content_encoding="gzip"
    ),
    "gRPC: compressed message": Grpc(
        "ModelInfer",
        # A short message is sent as it is.
        infer_message("echo", grpc_tensor("IN", "INT32", [1, 2], {"int_contents": [1, 2]}), id="long" * 200),
        compressed=True,
    ),
}
