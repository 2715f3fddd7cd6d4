"""Models that are put together from others, loaded and unloaded by calls."""

from typing import Any

from conformance.exchange import Change, Eventually, get, infer, post, tensor
from conformance.exchanges.ensembles import BROKEN, rows
from conformance.exchanges.repository_explicit import edit, load, unload
from conformance.exchanges.scenes import ENSEMBLES_EXPLICIT

SCENE = ENSEMBLES_EXPLICIT
INDEX = post("/v2/repository/index", {"ready": True})


def gone() -> Eventually:
    """The index, once nothing is being unloaded any more."""
    return Eventually(post("/v2/repository/index"), lambda answer: "UNLOADING" not in str(answer["json"]))


def changed(model: str, old: str, new: str) -> Change:
    return Change(lambda models: edit(models / model / "config.pbtxt", old, new))


EXCHANGES: dict[str, Any] = {
    "its models come with it": [load("diamond"), INDEX, infer("diamond", rows(1))],
    "unload leaves its models": [unload("diamond"), gone(), INDEX, infer("twice", rows(1)), infer("diamond", rows(1))],
    "load again": [load("diamond"), INDEX],
    "unload with what it needs": [unload("diamond", unload_dependents=True), gone(), INDEX],
    "load after unload with what it needs": [load("diamond"), INDEX],
    "unload keeps what was asked for": [
        load("twice"),
        load("diamond"),
        unload("diamond", unload_dependents=True),
        gone(),
        INDEX,
        unload("twice"),
        gone(),
        INDEX,
    ],
    "unload keeps what was asked for later": [
        load("diamond"),
        load("twice"),
        unload("diamond", unload_dependents=True),
        gone(),
        INDEX,
        unload("twice"),
        gone(),
        INDEX,
    ],
    "unload keeps what another needs": [
        load("diamond"),
        load("chain"),
        unload("diamond", unload_dependents=True),
        gone(),
        INDEX,
        infer("chain", rows(1)),
        unload("chain", unload_dependents=True),
        gone(),
        INDEX,
    ],
    "nested": [
        load("outer"),
        INDEX,
        infer("outer", rows(1)),
        unload("chain"),
        gone(),
        INDEX,
        infer("outer", rows(1)),
        get("/v2/models/outer/ready"),
        get("/v2/health/ready"),
        load("outer"),
        INDEX,
        unload("outer", unload_dependents=True),
        gone(),
        INDEX,
    ],
    "a model goes": [
        load("diamond"),
        unload("twice"),
        gone(),
        infer("diamond", rows(1)),
        get("/v2/models/diamond/ready"),
        get("/v2/models/diamond"),
        infer("plus", rows(1, "A")),
    ],
    "a model comes back": [
        load("twice"),
        gone(),
        infer("diamond", rows(1)),
        get("/v2/health/ready"),
    ],
    "after that": [
        load("diamond"),
        gone(),
        infer("diamond", rows(1)),
        unload("diamond", unload_dependents=True),
        gone(),
    ],
    "a model goes with what it needs": [
        load("diamond"),
        unload("twice", unload_dependents=True),
        gone(),
        unload("diamond", unload_dependents=True),
        gone(),
    ],
    "a model changes": [
        load("chain"),
        changed("twice", "max_batch_size: 8", "max_batch_size: 4"),
        load("twice"),
        gone(),
        infer("chain", rows(1)),
        get("/v2/models/twice/config"),
        changed("twice", "max_batch_size: 4", "max_batch_size: 8"),
        load("twice"),
        gone(),
        infer("chain", rows(1)),
        load("chain"),
        gone(),
    ],
    "a model changes, in a way that fits": [
        changed("twice", "max_batch_size: 8", "max_batch_size: 9"),
        load("twice"),
        gone(),
        infer("chain", rows(1)),
        changed("twice", "max_batch_size: 9", "max_batch_size: 8"),
        load("chain"),
        get("/v2/models/twice/config"),
        unload("chain", unload_dependents=True),
        gone(),
    ],
    "with a configuration": [
        load(
            "made",
            config='{"platform":"ensemble","max_batch_size":2,'
            '"input":[{"name":"IN","data_type":"TYPE_INT32","dims":[2]}],'
            '"output":[{"name":"OUT","data_type":"TYPE_INT32","dims":[2]}],"ensemble_scheduling":{"step":['
            '{"model_name":"twice","model_version":-1,"input_map":{"IN":"IN"},"output_map":{"OUT":"OUT"}}]}}',
        ),
        load(
            "chain",
            config='{"platform":"ensemble","max_batch_size":2,'
            '"input":[{"name":"IN","data_type":"TYPE_INT32","dims":[2]}],'
            '"output":[{"name":"OUT","data_type":"TYPE_INT32","dims":[2]}],"ensemble_scheduling":{"step":['
            '{"model_name":"twice","model_version":-1,"input_map":{"IN":"IN"},"output_map":{"OUT":"OUT"}}]}}',
        ),
        infer("chain", rows(1)),
        unload("chain", unload_dependents=True),
        gone(),
    ],
    **{
        f"load {name}": [load(name), infer(name, tensor("IN", "INT32", [1], [1]))]
        for name in (*BROKEN, "two_streams", "two_apart", "stream_of_both")
    },
    "what is left": [INDEX, get("/v2/models/next/ready")],
}
