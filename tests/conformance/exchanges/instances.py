"""Instances: what they need to execute, in which order they do, which never do, and on which cores they run."""

from conformance.exchange import Http, Together, get, infer, tensor
from conformance.exchanges.repository_explicit import load, unload
from conformance.exchanges.scenes import LIMITED

SCENE = LIMITED


def sleep(model: str, milliseconds: int = 50) -> Http:
    return infer(model, tensor("MILLISECONDS", "INT32", [1], [milliseconds]))


EXCHANGES = {
    "two models that share a resource": Together((sleep("often", 300), sleep("seldom"))),
    "instances of one model that share a resource": Together((sleep("several", 300), sleep("several"))),
    # The one that executes is asked for last: nobody has to wait for a second thing.
    "priorities": Together(
        (sleep("often", 600), sleep("seldom"), sleep("seldom"), sleep("often"), sleep("often")), gap=0.06
    ),
    "who needs nothing, while others wait": Together((sleep("often", 500), sleep("seldom", 100), sleep("free"))),
    "more than there is": load("large"),
    "on another device": load("elsewhere"),
    "what nobody has": load("nowhere"),
    "global, and a device's elsewhere": load("everywhere"),
    "global and a device's": load("both"),
    "ready with passive instances alone": [load("idle"), get("/v2/models/idle/ready"), get("/v2/models/idle/stats")],
    "a request to passive instances": sleep("idle"),
    "unload of passive instances": unload("idle"),
    "a passive instance among others": [
        load("partly"),
        Together((sleep("partly", 300), sleep("partly"))),
        get("/v2/models/partly/config"),
    ],
    "cores of a policy": [load("pinned"), sleep("pinned")],
    "cores of a policy that there is not": [load("unpinned"), sleep("unpinned")],
    "cores that there are not": load("nocores"),
    "cores that are no range": load("norange"),
    "a node that there is not": load("nonode"),
}
