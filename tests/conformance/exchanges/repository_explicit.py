"""Models that are loaded and unloaded by calls. The order matters: each exchange leaves its models as it says."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

from conformance.exchange import Change, Eventually, Grpc, Http, get, infer, post, tensor
from conformance.exchanges.scenes import EXPLICIT
from conformance.repositories import repository, source
from conformance.repositories import write as write_model
from nerite.wire import grpc_service as pb

SCENE = EXPLICIT

ROW = tensor("IN", "INT32", [1, 2], [1, 2])
ONE = tensor("IN", "INT32", [1, 1], [0])
ECHO = {
    "backend": "python",
    "max_batch_size": 3,
    "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": [2]}],
    "output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": [2]}],
}
STRICT = json.dumps(ECHO)[:-1]
LENIENT = (
    f"{STRICT}, 'max_batch_size': 2}}",
    f'{STRICT},\v"version_policy": {{"all": {{}},}}, }}',
    f'{STRICT}, "parameters": {{"a": {{"string_value": "tab\t\\q\\x6f\\u00e9"}}}}}}',
    f"{STRICT}, parameters: {{_a$1: {{string_value: 'it\\'s'}}}}, max_batch_size: 4.}}",
)
NO_JSON = tuple(
    f"{STRICT}, {text}"
    for text in (
        ", max_batch_size: 4}",
        "/* four */ max_batch_size: 4}",
        "max_batch_size: 04}",
        "max_batch_size: 0x4}",
        "max_batch_size: +4}",
        "name: echo}",
        "parameters: {1: {string_value: 'a'}}}",
        "parameters: {null: {string_value: 'a'}}}",
        "max_batch_size: 4} x",
        "max_batch_size: 4",
    )
)
MODEL = source("echo").encode()


def load(model: str, **parameters: Any) -> Http:
    return post(f"/v2/repository/models/{model}/load", {"parameters": parameters} if parameters else b"")


def sent(config: str) -> Http:
    """A load of a model that comes with it."""
    return load("uploaded", config=config, **{"file:1/model.py": base64.b64encode(MODEL).decode()})


def unload(model: str, **parameters: Any) -> Http:
    return post(f"/v2/repository/models/{model}/unload", {"parameters": parameters} if parameters else b"")


def called(model: str, **parameters: Any) -> Grpc:
    request = pb.RepositoryModelLoadRequest(model_name=model)
    for name, (kind, value) in parameters.items():
        setattr(request.parameters[name], kind, value)
    return Grpc("RepositoryModelLoad", request)


def gone() -> Eventually:
    """The index, once nothing is being unloaded any more."""
    return Eventually(post("/v2/repository/index"), lambda answer: "UNLOADING" not in str(answer["json"]))


def copy(group: str, model: str, target: str) -> Change:
    return Change(lambda models: write_model(repository(group)[model], models / target))


def write(path: str, text: str) -> Change:
    return Change(lambda models: write_file(models / path, text))


def write_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def remove(path: str) -> Change:
    return Change(lambda models: shutil.rmtree(models / path))


def edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def broken(name: str) -> list[Any]:
    return [
        copy("broken", name, name),
        load(name),
        gone(),
        get(f"/v2/models/{name}/ready"),
        get("/v2/health/ready"),
        remove(name),
    ]


INDEX = post("/v2/repository/index")
BROKEN = ("badfield", "half", "noversion", "othername", "raises", "zerodims")

EXCHANGES = {
    "at the start": [INDEX, get("/v2/health/ready"), get("/v2/models/pair/ready"), get("/v2/models/echo/ready")],
    "ready ones at the start": post("/v2/repository/index", {"ready": True}),
    "not loaded": [
        infer("echo", ROW),
        get("/v2/models/echo"),
        get("/v2/models/echo/config"),
        get("/v2/models/echo/stats"),
    ],
    "load": [load("echo"), get("/v2/models/echo/ready"), infer("echo", ROW), INDEX],
    "load again": [load("echo"), infer("echo", ROW)],
    "load all versions": [load("versions"), INDEX, get("/v2/models/versions")],
    "load unknown": load("none"),
    "load by a path": [load(".."), load("%2e%2e%2fetc"), load("a%2Fb")],
    "load with an empty body": post("/v2/repository/models/echo/load", {}),
    "load with empty parameters": post("/v2/repository/models/echo/load", {"parameters": {}}),
    "load with bad JSON": post("/v2/repository/models/echo/load", b"{"),
    "load with parameters as an array": post("/v2/repository/models/echo/load", {"parameters": []}),
    "load with parameters as null": post("/v2/repository/models/echo/load", {"parameters": None}),
    "load with a body that is an array": post("/v2/repository/models/echo/load", [1]),
    "load from a repository": post("/v2/repository/other/models/echo/load"),
    "load with an unknown parameter": [load("echo", colour="red"), load("echo", colour=1)],
    "load with a configuration": [
        load("echo", config=json.dumps(ECHO)),
        get("/v2/models/echo/config"),
        infer("echo", tensor("IN", "INT32", [4, 2], [0] * 8)),
    ],
    "load without it again": [load("echo"), get("/v2/models/echo/config")],
    "load with a bad configuration": [
        load("echo", config="{"),
        load("echo", config=""),
        load("echo", config="{}"),
        load("echo", config='{"max_batch":3}'),
        load("echo", config='{"max_batch_size":"many"}'),
        load("echo", config=json.dumps({**ECHO, "name": "other"})),
        load("echo", config=json.dumps({**ECHO, "backend": "abacus"})),
        load("echo", config=5),
        load("echo", config=True),
        infer("echo", ROW),
        INDEX,
    ],
    "load with files": [
        load("uploaded", config=json.dumps(ECHO), **{"file:1/model.py": base64.b64encode(MODEL).decode()}),
        infer("uploaded", ROW),
        get("/v2/models/uploaded"),
        INDEX,
        unload("uploaded"),
        gone(),
    ],
    "load with files by paths that begin with a slash": [
        load("uploaded", config=json.dumps(ECHO), **{"file:/1/model.py": base64.b64encode(MODEL).decode()}),
        infer("uploaded", ROW),
        load("uploaded", config=json.dumps(ECHO), **{"file:/../x": base64.b64encode(MODEL).decode()}),
        unload("uploaded"),
        gone(),
    ],
    "load with a configuration in lenient JSON": [
        *(step for text in LENIENT for step in (sent(text), get("/v2/models/uploaded/config"))),
        unload("uploaded"),
        gone(),
    ],
    "load with a configuration in what is no JSON": [load("echo", config=text) for text in NO_JSON],
    "load with files and no configuration": load("echo", **{"file:1/model.py": base64.b64encode(MODEL).decode()}),
    "load with a file outside": load(
        "uploaded", config=json.dumps(ECHO), **{"file:../../x": base64.b64encode(MODEL).decode()}
    ),
    "load with a file as number": load("uploaded", config=json.dumps(ECHO), **{"file:1/model.py": 5}),
    "unload": [
        unload("echo"),
        gone(),
        infer("echo", ROW),
        get("/v2/models/echo/ready"),
        get("/v2/models/echo/versions/1/ready"),
        get("/v2/models/echo"),
        get("/v2/models/echo/versions/1"),
        get("/v2/models/echo/config"),
        get("/v2/models/echo/stats"),
        Eventually(get("/v2/health/ready"), lambda answer: answer["status"] == 200),
    ],
    "unload again": unload("echo"),
    "unload unknown": [unload("none"), INDEX],
    "unload with dependents": [unload("pair", unload_dependents=True), gone()],
    "unload with dependents as text": unload("pair", unload_dependents="yes"),
    "unload with an unknown parameter": unload("pair", colour=1),
    "unload with bad JSON": post("/v2/repository/models/pair/unload", b"{"),
    "unload with parameters as an array": post("/v2/repository/models/pair/unload", {"parameters": []}),
    "load after unload": [load("echo"), infer("echo", ROW), INDEX],
    "a new version": [write("versions/4/model.py", source("version")), load("versions"), infer("versions", ONE), INDEX],
    "a version less": [remove("versions/4"), load("versions"), infer("versions", ONE), gone()],
    "a version policy in the configuration": [
        Change(lambda models: edit(models / "versions" / "config.pbtxt", "all { }", "specific { versions: [ 1 ] }")),
        load("versions"),
        gone(),
        infer("versions", ONE),
        infer("versions/versions/3", ONE),
    ],
    "a reload that fails": [
        write("echo/1/model.py", "raise RuntimeError('half written')\n"),
        load("echo"),
        infer("echo", ROW),
        INDEX,
        get("/v2/models/echo/ready"),
    ],
    "a model that vanishes": [
        remove("echo"),
        load("echo"),
        infer("echo", ROW),
        gone(),
        post("/v2/repository/index", {"ready": True}),
    ],
    **{f"load {name}": broken(name) for name in BROKEN},
    "gRPC: load": [called("arguments"), Grpc("RepositoryIndex", pb.RepositoryIndexRequest())],
    "gRPC: load unknown": called("none"),
    "gRPC: load nothing": called(""),
    "gRPC: load a blank": called(" "),
    "gRPC: load a path with blanks": called(" .. "),
    "gRPC: load names that are unusual": [called(name) for name in ("...", ".", "model;test", "a b", "a..b", "~")],
    "gRPC: load from a repository": Grpc(
        "RepositoryModelLoad", pb.RepositoryModelLoadRequest(repository_name="r", model_name="arguments")
    ),
    "gRPC: load with an unknown parameter": called("arguments", colour=("string_param", "red")),
    "gRPC: load with a configuration of another type": called("arguments", config=("int64_param", 1)),
    "gRPC: load with a file of another type": called(
        "arguments", **{"config": ("string_param", json.dumps(ECHO)), "file:1/model.py": ("string_param", "x")}
    ),
    "gRPC: load with files": [
        called("sent", **{"config": ("string_param", json.dumps(ECHO)), "file:1/model.py": ("bytes_param", MODEL)}),
        infer("sent", ROW),
    ],
    "gRPC: unload": [
        Grpc("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="arguments")),
        gone(),
        Grpc("ModelReady", pb.ModelReadyRequest(name="arguments")),
        Grpc("ModelMetadata", pb.ModelMetadataRequest(name="arguments")),
    ],
    "gRPC: unload unknown": Grpc("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="none")),
    "gRPC: unload nothing": Grpc("RepositoryModelUnload", pb.RepositoryModelUnloadRequest()),
    "gRPC: unload with an unknown parameter": Grpc(
        "RepositoryModelUnload",
        pb.RepositoryModelUnloadRequest(
            model_name="arguments", parameters={"colour": pb.ModelRepositoryParameter(int64_param=1)}
        ),
    ),
    "gRPC: unload with dependents as text": Grpc(
        "RepositoryModelUnload",
        pb.RepositoryModelUnloadRequest(
            model_name="arguments", parameters={"unload_dependents": pb.ModelRepositoryParameter(string_param="x")}
        ),
    ),
    # Last, because with Triton it leaves a model that keeps the server from being ready.
    "load with files that are no base64": load("uploaded", config=json.dumps(ECHO), **{"file:1/model.py": "%%%"}),
}
