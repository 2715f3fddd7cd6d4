"""A model of the same name in two repositories, which is a mistake. The order matters."""

import shutil

from conformance.exchange import Change, get, infer, post
from conformance.exchanges.repository_explicit import INDEX, ROW, gone, load, unload
from conformance.exchanges.scenes import SEVERAL

SCENE = SEVERAL

EXCHANGES = {
    "at the start": [INDEX, get("/v2/health/ready"), get("/v2/models/echo/ready")],
    "load what is in both": [load("echo"), INDEX, infer("echo", ROW), get("/v2/models/echo"), get("/v2/health/ready")],
    "load what is in the first": [load("pair"), INDEX, get("/v2/models/pair/ready")],
    "load what is in the second": [load("versions"), INDEX, get("/v2/models/versions")],
    "index of what is ready": post("/v2/repository/index", {"ready": True}),
    "unload what is in both": [unload("echo"), INDEX],
    "unload what is in the second": [unload("versions"), gone()],
    "load what is no longer in both": [
        Change(lambda models: shutil.rmtree(models.with_name("second") / "echo")),
        load("echo"),
        infer("echo", ROW),
        INDEX,
    ],
}
