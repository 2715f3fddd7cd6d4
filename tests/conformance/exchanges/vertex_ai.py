"""The Vertex AI port: health, prediction, and other endpoints by redirection."""

import gzip
import struct
from dataclasses import replace

from conformance.exchange import Http, Session, dumped, get, infer, post, tensor
from conformance.exchanges.scenes import VERTEX

SCENE = VERTEX

BINARY = "application/vnd.vertex-ai-triton.binary+json;json-header-size="
ROW = tensor("IN", "INT32", [1, 2], [1, 2])
PLAIN = infer("echo", ROW).body
PAIR = infer("pair", tensor("A", "INT32", [4], [1, 2, 3, 4]), tensor("B", "INT32", [4], [4, 3, 2, 1])).body
HEAD = dumped(
    {"inputs": [tensor("IN", "INT32", [1, 2], binary_data_size=8)], "parameters": {"binary_data_output": True}}
)
BODY = HEAD + struct.pack("<2i", 5, 6)


def there(request: Http) -> Http:
    """The same request, to Vertex AI's port."""
    return replace(request, port="cloud")


def predicted(body: bytes = PLAIN, content_type: str = "", **headers: str) -> Http:
    if content_type:
        headers["Content_Type"] = content_type
    return there(post("/predict", body, **headers))


def redirected(to: str, body: bytes = b"", **headers: str) -> Http:
    return predicted(body, X_Vertex_Ai_Triton_Redirect=to, **headers)


EXCHANGES = {
    "health": there(get("/health")),
    "health by POST": there(post("/health", b"")),
    "health with a slash": there(get("/health/")),
    "predict": predicted(),
    "predict by GET": there(get("/predict")),
    "predict with a slash": there(post("/predict/", PLAIN)),
    "predict with a question": there(post("/predict?now", PLAIN)),
    "binary": predicted(BODY, f"{BINARY}{len(HEAD)}"),
    "binary, with the header of HTTP": predicted(BODY, Inference_Header_Content_Length=str(len(HEAD))),
    "binary, size is no number": predicted(BODY, f"{BINARY}many"),
    "binary, size begins as a number": predicted(BODY, f"{BINARY}{len(HEAD)}; charset=utf-8"),
    "binary, size is empty": predicted(BODY, BINARY),
    "binary, size is negative": predicted(BODY, f"{BINARY}-1"),
    "binary, size is too large": predicted(BODY, f"{BINARY}{len(BODY) + 1}"),
    "binary, something in front": predicted(BODY, f"text/plain, {BINARY}{len(HEAD)}"),
    "raw": predicted(struct.pack("<2i", 5, 6), f"{BINARY}0"),
    "empty": predicted(b""),
    "broken": predicted(b"{"),
    "a wrong input": predicted(infer("echo", tensor("NO", "INT32", [1, 2], [1, 2])).body),
    "gzip in": predicted(gzip.compress(PLAIN), Content_Encoding="gzip"),
    "gzip said, and not so": predicted(PLAIN, Content_Encoding="gzip"),
    "br said": predicted(PLAIN, Content_Encoding="br"),
    "gzip out": predicted(PLAIN, Accept_Encoding="gzip"),
    "a model raises": redirected(
        "v2/models/trouble/infer", infer("trouble", tensor("KIND", "BYTES", [1], ["raise"])).body
    ),
    "redirect: infer": redirected("v2/models/echo/infer", PLAIN),
    "redirect: infer of a version": redirected("v2/models/echo/versions/1/infer", PLAIN),
    "redirect: infer of an unknown version": redirected("v2/models/echo/versions/8/infer", PLAIN),
    "redirect: infer of another model": redirected("v2/models/pair/infer", PAIR),
    "redirect: infer of an unknown model": redirected("v2/models/none/infer", PLAIN),
    "redirect: infer, binary": redirected("v2/models/echo/infer", BODY, Content_Type=f"{BINARY}{len(HEAD)}"),
    "redirect: with a slash in front": redirected("/v2/models/echo/infer", PLAIN),
    "redirect: with a slash behind": redirected("v2/models/echo/infer/", PLAIN),
    "redirect: by GET": there(get("/predict", X_Vertex_Ai_Triton_Redirect="v2/health/ready")),
    "redirect: by PUT": there(Http("PUT", "/predict", headers=(("X-Vertex-Ai-Triton-Redirect", "v2/health/ready"),))),
    "redirect: nothing": redirected(""),
    "redirect: nonsense": redirected("v2/nonsense"),
    "redirect: generate": redirected("v2/models/echo/generate", b"{}"),
    "redirect: live": redirected("v2/health/live"),
    "redirect: ready": redirected("v2/health/ready"),
    "redirect: other health": redirected("v2/health/other"),
    "redirect: server": redirected("v2"),
    "redirect: server, with a slash": redirected("v2/"),
    "redirect: model": redirected("v2/models/echo"),
    "redirect: model's version": redirected("v2/models/echo/versions/1"),
    "redirect: unknown model": redirected("v2/models/none"),
    "redirect: model ready": redirected("v2/models/echo/ready"),
    "redirect: unknown model ready": redirected("v2/models/none/ready"),
    "redirect: configuration": redirected("v2/models/echo/config"),
    "redirect: statistics": redirected("v2/models/none/stats"),
    "redirect: index": redirected("v2/repository/index", b""),
    "redirect: index of the ready": redirected("v2/repository/index", b'{"ready":true}'),
    "redirect: index of a repository": redirected("v2/repository/one/index", b""),
    "redirect: load": redirected("v2/repository/models/echo/load", b""),
    "redirect: unload": redirected("v2/repository/models/none/unload", b""),
    "redirect: regions": redirected("v2/systemsharedmemory/status"),
    "redirect: an unknown region": redirected("v2/systemsharedmemory/region/r/status"),
    "redirect: register a region": redirected("v2/systemsharedmemory/region/r/register", b"{}"),
    "redirect: unregister a region": redirected("v2/systemsharedmemory/region/r/unregister", b""),
    "redirect: CUDA regions": redirected("v2/cudasharedmemory/status"),
    "redirect: unregister a CUDA region": redirected("v2/cudasharedmemory/region/r/unregister", b""),
    "redirect: log settings": redirected("v2/logging"),
    "redirect: trace settings": redirected("v2/trace/setting"),
    "redirect: gzip in": redirected("v2/models/echo/infer", gzip.compress(PLAIN), Content_Encoding="gzip"),
    "redirect on the way to health": there(get("/health", X_Vertex_Ai_Triton_Redirect="v2")),
    "other paths": Session(
        (
            there(get("/")),
            there(get("/v2")),
            there(get("/v2/health/ready")),
            there(post("/v2/models/echo/infer", PLAIN)),
        )
    ),
    "requests on one connection": Session(
        (there(get("/health")), predicted(), predicted(b"{"), redirected("v2"), predicted(BODY, f"{BINARY}{len(HEAD)}"))
    ),
    "the paths of Vertex AI on the HTTP port": Session((get("/health"), post("/predict", PLAIN))),
}
