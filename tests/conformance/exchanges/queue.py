"""A queue for one request: others find no place in it, and some wait in it too long."""

from typing import Any

from conformance.exchange import Grpc, Http, Together, grpc_infer, grpc_tensor, infer, tensor
from conformance.exchanges.scenes import GOOD

SCENE = GOOD


def sleep(seconds: float, **top: Any) -> Http:
    return infer("queue", tensor("SECONDS", "FP32", [1, 1], [seconds]), **top)


def called(seconds: float, **top: Any) -> Grpc:
    return grpc_infer("queue", grpc_tensor("SECONDS", "FP32", [1, 1], {"fp32_contents": [seconds]}), **top)


EXCHANGES = {
    "waits too long": Together((sleep(1.6), sleep(0, id="second"))),
    "gRPC: waits too long": Together((called(1.6), called(0, id="second"))),
    "waits too long by its own word": Together((sleep(0.6), sleep(0, parameters={"timeout": 50000}))),
    "gRPC: waits too long by its own word": Together((called(0.6), called(0, parameters={"timeout": 50000}))),
    "may not wait longer than the model allows": Together((sleep(1.6), sleep(0, parameters={"timeout": 5000000}))),
    "no place in the queue": Together((sleep(0.6), sleep(0), sleep(0, id="third"), called(0, id="fourth")), gap=0.04),
    # The second gives up, as Triton at times forgets whoever waited when somebody more urgent came.
    "more urgent, and no place in the queue": Together(
        (sleep(0.6), sleep(0, parameters={"timeout": 300000}), sleep(0, parameters={"priority": 1})), gap=0.05
    ),
    "priority out of range": sleep(0, parameters={"priority": 9}),
}
