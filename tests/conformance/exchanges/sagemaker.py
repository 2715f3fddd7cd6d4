"""The SageMaker port: one model behind /invocations."""

import gzip
import struct
from dataclasses import replace

from conformance.exchange import Http, Session, dumped, get, infer, post, tensor
from conformance.exchanges.scenes import SAGEMAKER

SCENE = SAGEMAKER

BINARY = "application/vnd.sagemaker-triton.binary+json;json-header-size="
ROW = tensor("IN", "INT32", [1, 2], [1, 2])
PLAIN = infer("echo", ROW).body
HEAD = dumped(
    {"inputs": [tensor("IN", "INT32", [1, 2], binary_data_size=8)], "parameters": {"binary_data_output": True}}
)
BODY = HEAD + struct.pack("<2i", 5, 6)


def there(request: Http) -> Http:
    """The same request, to SageMaker's port."""
    return replace(request, port="cloud")


def invoked(body: bytes, content_type: str = "", **headers: str) -> Http:
    if content_type:
        headers["Content_Type"] = content_type
    return there(post("/invocations", body, **headers))


EXCHANGES = {
    "ping": there(get("/ping")),
    "ping by POST": there(post("/ping", b"")),
    "ping by HEAD": there(Http("HEAD", "/ping")),
    "ping with a slash": there(get("/ping/")),
    "ping with a question": there(get("/ping?now")),
    "invoke": invoked(PLAIN),
    "invoke by GET": there(get("/invocations")),
    "invoke by PUT": there(Http("PUT", "/invocations", PLAIN)),
    "invoke as JSON": invoked(PLAIN, "application/json"),
    "invoke with a slash": there(post("/invocations/", PLAIN)),
    "binary": invoked(BODY, f"{BINARY}{len(HEAD)}"),
    "binary in, JSON out": invoked(
        dumped({"inputs": [tensor("IN", "INT32", [1, 2], binary_data_size=8)]}) + struct.pack("<2i", 5, 6),
        f"{BINARY}{len(dumped({'inputs': [tensor('IN', 'INT32', [1, 2], binary_data_size=8)]}))}",
    ),
    "JSON in, binary out": invoked(dumped({"inputs": [ROW], "parameters": {"binary_data_output": True}})),
    "binary, with the header of HTTP": invoked(BODY, Inference_Header_Content_Length=str(len(HEAD))),
    "binary, with both": invoked(BODY, f"{BINARY}{len(HEAD)}", Inference_Header_Content_Length="3"),
    "binary, size is no number": invoked(BODY, f"{BINARY}many"),
    "binary, size begins as a number": invoked(BODY, f"{BINARY}{len(HEAD)}; charset=utf-8"),
    "binary, size is empty": invoked(BODY, BINARY),
    "binary, size is negative": invoked(BODY, f"{BINARY}-1"),
    "binary, size is too large": invoked(BODY, f"{BINARY}{len(BODY) + 1}"),
    "binary, size is beyond 32 bits": invoked(BODY, f"{BINARY}99999999999"),
    "binary, size is wrong": invoked(BODY, f"{BINARY}{len(HEAD) - 1}"),
    "binary, something in front": invoked(BODY, f"text/plain, {BINARY}{len(HEAD)}"),
    "binary, in capitals": invoked(BODY, f"{BINARY}{len(HEAD)}".upper()),
    "binary, with a space": invoked(BODY, f"{BINARY}{len(HEAD)}".replace(";", "; ")),
    "Vertex AI's type": invoked(BODY, f"application/vnd.vertex-ai-triton.binary+json;json-header-size={len(HEAD)}"),
    "raw": invoked(struct.pack("<2i", 5, 6), f"{BINARY}0"),
    "raw of the wrong size": invoked(b"123", f"{BINARY}0"),
    "empty": invoked(b""),
    "empty, with a size": invoked(b"", f"{BINARY}1"),
    "broken": invoked(b"{"),
    "broken, with a size": invoked(b"{", f"{BINARY}1"),
    "a wrong input": invoked(infer("echo", tensor("NO", "INT32", [1, 2], [1, 2])).body),
    "gzip in": invoked(gzip.compress(PLAIN), Content_Encoding="gzip"),
    "gzip said, and not so": invoked(PLAIN, Content_Encoding="gzip"),
    "br said": invoked(PLAIN, Content_Encoding="br"),
    "gzip out": invoked(PLAIN, Accept_Encoding="gzip"),
    "chunked": there(
        Http(
            "POST",
            "/invocations",
            b"%x\r\n%s\r\n0\r\n\r\n" % (len(PLAIN), PLAIN),
            (("Transfer-Encoding", "chunked"),),
        )
    ),
    "chunked and binary": there(
        Http(
            "POST",
            "/invocations",
            b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
            (("Transfer-Encoding", "chunked"), ("Content-Type", f"{BINARY}{len(HEAD)}")),
        )
    ),
    "custom attributes": invoked(PLAIN, X_Amzn_SageMaker_Custom_Attributes="a=b"),
    "the paths of HTTP": Session(
        (
            there(get("/v2/health/ready")),
            there(get("/v2")),
            there(post("/v2/models/echo/infer", PLAIN)),
            there(get("/")),
            there(get("/metrics")),
        )
    ),
    "the paths of SageMaker on the HTTP port": Session((get("/ping"), post("/invocations", PLAIN))),
    "requests on one connection": Session(
        (there(get("/ping")), invoked(PLAIN), invoked(b"{"), invoked(BODY, f"{BINARY}{len(HEAD)}"), invoked(PLAIN))
    ),
    "the default model is unloaded": [
        post("/v2/repository/models/echo/unload"),
        invoked(PLAIN),
        invoked(b"{"),
        post("/v2/repository/models/echo/load"),
        invoked(PLAIN),
    ],
}
