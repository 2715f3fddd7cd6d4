"""The SageMaker port: several models, registered and removed while the server runs."""

from dataclasses import replace

from conformance.exchange import Http, dumped, get, infer, post, tensor
from conformance.exchanges.sagemaker import BINARY, BODY, HEAD, PLAIN, there
from conformance.exchanges.scenes import SAGEMAKER
from conformance.repositories import ARCHIVES

SCENE = SAGEMAKER

INDEX = post("/v2/repository/index")


def load(name: str, archive: str, target: str = "", **more: object) -> Http:
    return named(post("/models", {"model_name": name, "url": f"{ARCHIVES}/{archive}", **more}), target)


def unload(name: str, target: str = "") -> Http:
    return named(Http("DELETE", f"/models/{name}"), target)


def invoke(name: str, body: bytes = PLAIN, target: str = "", content_type: str = "") -> Http:
    request = post(f"/models/{name}/invoke", body, **({"Content_Type": content_type} if content_type else {}))
    return named(request, target)


def named(request: Http, target: str) -> Http:
    """To SageMaker's port, with the name of the archive that the caller of SageMaker asked for."""
    headers = (*request.headers, ("X-Amzn-SageMaker-Target-Model", target)) if target else request.headers
    return replace(there(request), headers=headers)


LIST = there(get("/models"))


EXCHANGES = {
    "list of none": LIST,
    "list with a slash": there(get("/models/")),
    "unknown: get": there(get("/models/nobody")),
    "unknown: delete": unload("nobody"),
    "unknown: invoke": invoke("nobody"),
    "delete all": there(Http("DELETE", "/models")),
    "put": there(Http("PUT", "/models/a")),
    "get invoke": there(get("/models/a/invoke")),
    "post to a name": there(post("/models/a", {"model_name": "a", "url": "/nowhere"})),
    "another action": there(post("/models/a/other")),
    "a model, from load to unload": [
        load("hash", "one"),
        LIST,
        there(get("/models/hash")),
        there(get("/models/hash/")),
        invoke("hash"),
        invoke("hash", BODY, content_type=f"{BINARY}{len(HEAD)}"),
        invoke("hash", b"{"),
        invoke("hash", BODY, content_type=f"{BINARY}1000"),
        invoke("hash", infer("echo", tensor("NO", "INT32", [1, 2], [1, 2])).body),
        get("/v2/models/hash"),
        get("/v2/models/hash/config"),
        INDEX,
        there(get("/ping")),
        unload("hash"),
        LIST,
        invoke("hash"),
        get("/v2/models/hash"),
        INDEX,
        unload("hash"),
    ],
    "loaded twice": [load("hash", "one"), load("hash", "one"), load("more", "one"), LIST, unload("hash")],
    "loaded under the name of another archive": [load("hash", "one"), load("hash", "named"), LIST, unload("hash")],
    "loaded, unloaded, loaded": [
        load("hash", "one"),
        unload("hash"),
        load("hash", "one"),
        invoke("hash"),
        unload("hash"),
    ],
    "a target": [
        load("hash", "one", "team/model.tar.gz"),
        LIST,
        there(get("/models/hash")),
        invoke("hash", target="team/model.tar.gz"),
        invoke("hash"),
        INDEX,
        unload("hash", "team/model.tar.gz"),
        INDEX,
    ],
    "a configuration with a name": [load("hash", "named"), invoke("hash"), unload("hash")],
    "no such archive": [load("hash", "nowhere"), LIST, INDEX],
    "an archive without a model": [load("hash", "nothing"), LIST, INDEX],
    "an archive that is a model": [load("hash", "flat/model"), invoke("hash"), unload("hash")],
    "an archive that is a file": [load("hash", "one/echo/config.pbtxt"), LIST],
    "a model that cannot start": [load("hash", "failing"), LIST, INDEX, load("hash", "one"), unload("hash")],
    "a model that is too large": [load("hash", "memory"), LIST],
    "a model that has no memory left": [
        load("hash", "hungry"),
        invoke("hash"),
        invoke("hash", infer("", tensor("IN", "INT32", [1, 2], [-1, 0])).body),
        invoke("hash", infer("", tensor("IN", "INT32", [1, 2], [0, 0])).body),
        unload("hash"),
    ],
    "a folder that is relative": load("hash", "../nowhere/at/all"),
    "a folder with a slash": [load("hash", "one/"), there(get("/models/hash")), unload("hash")],
    "a folder by a detour": [load("hash", "nothing/../one"), there(get("/models/hash")), unload("hash")],
    "url in /proc": there(post("/models", {"model_name": "a", "url": "/proc/self"})),
    "url in /dev": there(post("/models", {"model_name": "a", "url": "/dev/shm"})),
    "url in /sys, by a detour": there(post("/models", {"model_name": "a", "url": "/tmp/../sys/kernel"})),
    "body: nothing": there(post("/models", b"")),
    "body: broken": there(post("/models", b"{")),
    "body: a list": there(post("/models", b"[]")),
    "body: an empty object": there(post("/models", {})),
    "body: no url": there(post("/models", {"model_name": "a"})),
    "body: no name": [load("", "one"), LIST],
    "body: a number as name": there(post("/models", dumped({"model_name": 1, "url": str(ARCHIVES / "one")}))),
    "body: a number as url": there(post("/models", {"model_name": "a", "url": 1})),
    "body: more": [load("hash", "one", other=1), unload("hash")],
    # Last, because Triton does not find its way back from here.
    "the name of a model that is there": load("echo", "one"),
}
