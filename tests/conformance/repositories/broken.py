"""Models that do not load, each for a reason of its own, and one that does.

Errors in a configuration are reported with line and column, so the lines stand here as they are in the file.
"""

from __future__ import annotations

from conformance.repositories import Files, source

PYTHON = 'backend: "python"'
IN = 'input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]'
OUT = 'output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]'


def lines(*config: str, model: str = "echo") -> Files:
    """Return a model with these lines of configuration."""
    return {"config.pbtxt": "\n".join(config) + "\n", "1/model.py": source(model)}


MODELS = {
    "badfield": lines(PYTHON, "max_batch: 4", IN, OUT),
    "badtype": lines(PYTHON, 'input [ { name: "IN" data_type: TYPE_INT31 dims: [ 1 ] } ]'),
    "batchbad": lines(PYTHON, "max_batch_size: -1", IN, OUT),
    "fine": lines(PYTHON, IN, OUT),
    "half": {**lines(PYTHON, "version_policy { all { } }", IN, OUT), "2/model.py": source("raises")},
    "imports": lines(PYTHON, IN, OUT, model="imports"),
    "noclass": lines(PYTHON, IN, OUT, model="noclass"),
    "noexecute": lines(PYTHON, IN, OUT, model="noexecute"),
    "noversion": {"config.pbtxt": f"{PYTHON}\n{IN}\n{OUT}\n"},
    "otheragent": lines(
        PYTHON,
        "max_batch_size: 0",
        IN,
        OUT,
        "instance_group [ { kind: KIND_CPU } ]",
        'model_repository_agents { agents [ { name: "decrypt" } ] }',
    ),
    "otherbackend": lines('backend: "abacus"', IN, OUT),
    "othername": lines('name: "someothername"', PYTHON, IN, OUT),
    "priorities": lines(
        PYTHON,
        "max_batch_size: 2",
        "dynamic_batching { priority_levels: 2 default_priority_level: 3 }",
        IN,
        OUT,
    ),
    "priority_zero": lines(
        PYTHON,
        "max_batch_size: 2",
        "dynamic_batching { priority_levels: 3 default_priority_level: 1 "
        "priority_queue_policy { key: 0 value { max_queue_size: 3 } } }",
        IN,
        OUT,
    ),
    "raises": lines(PYTHON, IN, OUT, model="raises"),
    "specific": lines(PYTHON, "version_policy { specific { versions: [ 1, 5 ] } }", IN, OUT),
    "stream": lines(
        PYTHON,
        "model_transaction_policy { decoupled: true }",
        "input [",
        '  { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }',
        "]",
        "output [",
        '  { name: "INDEX" data_type: TYPE_INT32 dims: [ 1 ] }',
        "]",
        model="stream",
    ),
    "zerodims": lines(PYTHON, 'input [ { name: "IN" data_type: TYPE_INT32 dims: [ 0 ] } ]', OUT),
}
