"""Models that stream their responses, and one that does not."""

from conformance.repositories import python

MODELS = {
    "many": python("many", "KIND STRING 1", "X INT32 1", "model_transaction_policy { decoupled: true }"),
    "one": python("one", "KIND STRING 1", "X INT32 1"),
    "prompt": python(
        "prompt",
        "text STRING 1; numbers FP32 -1 optional: true; grid INT32 2 -1 optional: true; "
        "half FP16 1 optional: true; flag BOOL 1 optional: true; small INT8 1 optional: true",
        "said STRING 1; words STRING -1; count INT32 1",
        batch=8,
    ),
}
