"""Models that come and go with their files. The order matters."""

import shutil
from typing import Any

from conformance.exchange import Change, Eventually, get, infer, post, tensor
from conformance.exchanges.scenes import POLL
from conformance.repositories import Files, repository, source, write

SCENE = POLL

ONE = tensor("IN", "INT32", [1, 1], [0])
INDEX = post("/v2/repository/index")


def ready(path: str) -> Eventually:
    return Eventually(get(f"/v2/models/{path}/ready"), lambda answer: answer["status"] == 200)


def gone(path: str) -> Eventually:
    return Eventually(get(f"/v2/models/{path}/ready"), lambda answer: answer["status"] != 200)


def added(path: str, files: Files) -> Change:
    return Change(lambda models: write(files, models / path))


def edited(answer: dict[str, Any]) -> bool:
    return bool(answer["json"]["max_batch_size"] == 2)


EXCHANGES = {
    "at the start": INDEX,
    "load": post("/v2/repository/models/echo/load"),
    "unload": post("/v2/repository/models/echo/unload"),
    "a new model": [added("pair", repository(POLL.repository)["pair"]), ready("pair"), INDEX],
    "a new version": [
        added("versions/5", {"model.py": source("version")}),
        ready("versions/versions/5"),
        infer("versions", ONE),
    ],
    "a version less": [
        Change(lambda models: shutil.rmtree(models / "versions" / "5")),
        gone("versions/versions/5"),
        infer("versions", ONE),
        infer("versions/versions/5", ONE),
    ],
    "another configuration": [
        Change(
            lambda models: (models / "echo" / "config.pbtxt").write_text(
                (models / "echo" / "config.pbtxt").read_text().replace("max_batch_size: 8", "max_batch_size: 2")
            )
        ),
        Eventually(get("/v2/models/echo/config"), edited),
    ],
    "a model less": [
        Change(lambda models: shutil.rmtree(models / "pair")),
        gone("pair"),
        Eventually(INDEX, lambda answer: "UNLOADING" not in str(answer["json"])),
        get("/v2/models/pair"),
        # Not while the model is being unloaded, which the index does not tell of a model without a directory.
        Eventually(get("/v2/health/ready"), lambda answer: answer["status"] == 200),
    ],
}
