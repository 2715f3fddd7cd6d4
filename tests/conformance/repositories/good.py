"""Models that load: each kind of tensor, shape and mistake in a request has one."""

from conformance.repositories import python, source

INTEGERS = [f"{sign}INT{bits}" for sign in ("U", "") for bits in (8, 16, 32, 64)]
DATATYPES = ("BOOL", *INTEGERS, "FP16", "FP32", "FP64", "STRING")
_RESHAPED = (
    "SQUARE INT32 2 2 reshape { shape: [ 4 ] }; "
    "FREE INT32 1 -1 3 -1 reshape { shape: [ -1, 3, 1, -1 ] }; "
    "SCALAR INT32 1 reshape { shape: [ ] }; "
)
_LABELS = 'label_filename: "labels.txt"'

MODELS = {
    "arguments": python(
        "arguments",
        "KEY STRING 1",
        "VALUE STRING 1",
        """\
parameters { key: "greeting" value { string_value: "hello" } }
instance_group { count: 1 kind: KIND_CPU }
metric_tags { key: "team" value: "blue" }""",
    ),
    "batch": python("batch", "A FP32 2; B FP32 -1", "A_OUT FP32 2; B_OUT FP32 -1", "dynamic_batching { }", batch=4),
    "classes": python(
        "classes",
        "IN FP32 4",
        f"SCORES FP32 4 {_LABELS}; COUNTS INT32 4 {_LABELS}; TEXTS STRING 4; PLAIN FP64 4; HALF FP16 4",
        batch=4,
    )
    | {
        "labels.txt": """\
cat
dog
red fox
"""
    },
    "echo": python("echo", "IN INT32 2", "OUT INT32 2", batch=8),
    "free": python(
        "free",
        "A INT32 1 optional: true; B INT32 1 optional: true",
        "GIVEN STRING 1",
        "instance_group [ { kind: KIND_CPU } ]",
        batch=4,
    ),
    "grid": python("echo", "IN FP32 -1 -1", "OUT FP32 -1 -1"),
    "line": python("echo", "IN FP64 2 -1", "OUT FP64 2 -1"),
    "noconfig": {"1/model.py": source("noconfig")},
    "options": python(
        "options", "NEEDED INT32 1; ALSO_NEEDED INT32 1; MAYBE INT32 1 optional: true", "NAMES STRING -1"
    ),
    "pair": python("sum_and_difference", "A INT32 4; B INT32 4", "SUM INT32 4; DIFFERENCE INT32 4"),
    "queue": python(
        "queue",
        "SECONDS FP32 1",
        "SECONDS_OUT FP32 1",
        """\
dynamic_batching {
  priority_levels: 2
  default_priority_level: 2
  default_queue_policy { allow_timeout_override: true default_timeout_microseconds: 1000000 max_queue_size: 1 }
}""",
        batch=1,
    ),
    "ragged": python(
        "echo",
        "IN FP32 -1 allow_ragged_batch: true",
        "OUT FP32 -1",
        "dynamic_batching { max_queue_delay_microseconds: 1000 }",
        batch=4,
    ),
    "request": python("request", "IN INT32 1", "REQUEST STRING 1"),
    "reshaped": python(
        "reshaped",
        _RESHAPED + "AS_IT_IS INT32 2 optional: true",
        _RESHAPED + "SEEN STRING 1",
        batch=4,
    ),
    "reshaped_whole": python(
        "reshaped_whole",
        "IN FP32 2 -1 3 reshape { shape: [ 1, 2, -1, 3 ] }",
        "OUT FP32 2 -1 3 1 reshape { shape: [ 1, 2, -1, 3 ] }; SEEN STRING 1",
    ),
    "scalar": python("echo", "IN FP32 1 reshape { shape: [ ] }", "OUT FP32 1 reshape { shape: [ ] }", batch=4),
    "text": python("echo", "IN STRING 1", "OUT STRING 1", batch=4),
    "texts": python("echo", "IN STRING -1", "OUT STRING -1"),
    "trouble": python("trouble", "KIND STRING 1", "X INT32 2; Y INT32 2"),
    "types": python(
        "types",
        "; ".join(f"IN_{name} {name} -1 optional: true" for name in DATATYPES),
        "; ".join(f"OUT_{name} {name} -1" for name in DATATYPES),
    ),
    "versions": python("version", "IN INT32 1", "VERSION INT32 1", "version_policy { all { } }", batch=2)
    | {"007/model.py": source("version"), "3/model.py": source("version"), "later/model.py": source("version")},
}
