"""Models of the same name in two repositories, told apart by ``--model-namespacing``. The order matters."""

import shutil
from typing import Any

from conformance.exchange import Change, Eventually, Grpc, Scrape, get, infer, post
from conformance.exchanges.repository_explicit import INDEX, ROW, gone, load, unload, write
from conformance.exchanges.scenes import NAMESPACES
from nerite.wire import grpc_service as pb

SCENE = NAMESPACES


ENSEMBLE = """
platform: "ensemble"
max_batch_size: 3
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 2 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 2 ] } ]
ensemble_scheduling { step [ {
  model_name: "echo" model_version: -1
  input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" }
} ] }
"""


def everything(model: str) -> list[object]:
    return [
        infer(model, ROW),
        get(f"/v2/models/{model}"),
        get(f"/v2/models/{model}/ready"),
        get(f"/v2/models/{model}/config"),
        get(f"/v2/models/{model}/stats"),
        Grpc("ModelMetadata", pb.ModelMetadataRequest(name=model)),
        Grpc("ModelReady", pb.ModelReadyRequest(name=model)),
        Grpc("ModelConfig", pb.ModelConfigRequest(name=model)),
    ]


def counted(answer: dict[str, Any]) -> bool:
    """Return whether the ensemble's request and that of its step are counted: counters may lag behind the answer."""
    return sum(answer["families"]["nv_inference_request_success"]["values"].values()) >= 2


EXCHANGES = {
    "at the start": [INDEX, get("/v2/health/ready")],
    "unknown": everything("none"),
    "not loaded": everything("echo"),
    "load one": [load("pair"), INDEX, get("/v2/models/pair"), get("/v2/models/pair/ready")],
    "load unknown": load("none"),
    "load both": [load("echo"), INDEX, get("/v2/health/ready")],
    "both": everything("echo"),
    "metrics": Scrape("nv_inference_request_success"),
    "statistics of all": get("/v2/models/stats"),
    "load both again": [load("echo"), INDEX],
    "an ensemble beside one of them": [
        write("beside/config.pbtxt", ENSEMBLE),
        write("beside/1/.keep", ""),
        load("beside"),
        infer("beside", ROW),
        get("/v2/models/beside/config"),
        Eventually(Scrape("nv_inference_request_success"), counted),
        unload("beside"),
        gone(),
        Change(lambda models: shutil.rmtree(models / "beside")),
    ],
    "unload both": [unload("echo"), gone()],
    "neither": everything("echo"),
    "unload the only one": [unload("pair"), gone(), infer("pair", ROW), get("/v2/models/pair")],
    "ready at the end": post("/v2/repository/index", {"ready": True}),
    "load the one that is left": [
        Change(lambda models: shutil.rmtree(models.with_name("second") / "echo")),
        load("echo"),
        INDEX,
        infer("echo", ROW),
    ],
    "gRPC: index": Grpc("RepositoryIndex", pb.RepositoryIndexRequest()),
}
