"""Schedulers that start nothing before enough requests wait: the hooks that test tools for Triton rely on."""

from conformance.exchange import Together
from conformance.exchanges.scenes import SEQUENCES_HELD
from conformance.exchanges.sequences import BOTH, END, START, http

SCENE = SEQUENCES_HELD

EXCHANGES = {
    "the oldest": [
        Together((http("oldest", 1, **START), http("oldest", 1, **END), http("oldest", 2, **BOTH))),
        http("oldest", 3, **BOTH),
    ],
    "with a backlog": [
        Together((http("plain", 1, **START), http("plain", 1), http("plain", 2, **BOTH), http("plain", 1, **END))),
        http("plain", 3, **BOTH),
    ],
    "in their slots": Together(
        (
            *(http("direct", number, **START) for number in range(1, 5)),
            http("direct", 5, **BOTH),
            http("direct", 1, **END),
        )
    ),
}
