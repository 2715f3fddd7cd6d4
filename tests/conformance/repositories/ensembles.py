"""Ensembles, the models of their steps, and ensembles that do not load."""

from conformance.repositories import ensemble, python, source, step

MODELS = {
    "bad_batch": ensemble("IN INT32 2", "OUT INT32 2", step("twice", {"IN": "IN"}, {"OUT": "OUT"}), batch=9),
    "bad_batch_flat": ensemble("IN INT32 2", "OUT INT32 2", step("flat", {"IN": "IN"}, {"OUT": "OUT"}), batch=1),
    "bad_between": ensemble(
        "COUNT INT32 1",
        "OUT INT32 2",
        step("next", {"IN": "COUNT"}, {"OUT": "number"}),
        step("twice", {"IN": "number"}, {"OUT": "OUT"}),
    ),
    "bad_circle": ensemble("IN INT32 1", "OUT INT32 1", step("bad_circle_back", {"IN": "IN"}, {"OUT": "OUT"})),
    "bad_circle_back": ensemble("IN INT32 1", "OUT INT32 1", step("bad_circle", {"IN": "IN"}, {"OUT": "OUT"})),
    "bad_inner": ensemble("IN INT32 2", "OUT INT32 2", step("bad_model", {"IN": "IN"}, {"OUT": "OUT"})),
    "bad_input": ensemble("IN INT32 2", "OUT INT32 2", step("twice", {"INN": "IN"}, {"OUT": "OUT"}), batch=8),
    "bad_model": ensemble("IN INT32 2", "OUT INT32 2", step("none", {"IN": "IN"}, {"OUT": "OUT"})),
    "bad_output": ensemble("IN INT32 2", "OUT INT32 2", step("twice", {"IN": "IN"}, {"OUTT": "OUT"}), batch=8),
    "bad_output_type": ensemble("IN INT32 2", "OUT FP32 2", step("twice", {"IN": "IN"}, {"OUT": "OUT"}), batch=8),
    "bad_part": ensemble(
        "IN INT32 1",
        "OUT INT32 1",
        step("next", {"IN": "IN"}, {"OUT": "one"}),
        step("unloadable", {"IN": "one"}, {"OUT": "OUT"}),
    ),
    "bad_reshape": ensemble(
        "IN INT32 2 2 reshape { shape: [ 4 ] }",
        "OUT INT32 2 2",
        step("shaped_step", {"IN": "IN"}, {"OUT": "OUT"}),
        batch=8,
    ),
    "bad_self": ensemble("IN INT32 1", "OUT INT32 1", step("bad_self", {"IN": "IN"}, {"OUT": "OUT"})),
    "bad_shape": ensemble("IN INT32 3", "OUT INT32 2", step("twice", {"IN": "IN"}, {"OUT": "OUT"}), batch=8),
    "bad_type": ensemble("IN FP32 2", "OUT INT32 2", step("twice", {"IN": "IN"}, {"OUT": "OUT"}), batch=8),
    "bad_unmapped": ensemble("B INT32 2", "SUM INT32 2", step("plus", {"B": "B"}, {"SUM": "SUM"}), batch=8),
    "bad_version": ensemble("IN INT32 1", "OUT INT32 1", step("numbered", {"IN": "IN"}, {"OUT": "OUT"}, version=2)),
    "batched_end": ensemble("IN INT32 2", "OUT INT32 2", step("twice", {"IN": "IN"}, {"OUT": "OUT"})),
    "branches": ensemble(
        "IN INT32 2",
        "LEFT INT32 2; RIGHT INT32 2; TEXT STRING 1",
        step("twice", {"IN": "IN"}, {"OUT": "LEFT"}),
        step("plus", {"A": "IN"}, {"SUM": "RIGHT"}),
        step("told", {"IN": "RIGHT"}, {"TEXT": "TEXT"}),
        batch=8,
    ),
    "chain": ensemble(
        "IN INT32 2",
        "OUT INT32 2",
        step("twice", {"IN": "IN"}, {"OUT": "one"}),
        step("twice", {"IN": "one"}, {"OUT": "two"}),
        step("twice", {"IN": "two"}, {"OUT": "OUT"}),
        batch=8,
    ),
    "classes": ensemble("IN INT32 2", "SCORES FP32 3", step("named", {"IN": "IN"}, {"SCORES": "SCORES"}), batch=8),
    "classes_outer": ensemble(
        "IN INT32 2", "SCORES FP32 3", step("classes", {"IN": "IN"}, {"SCORES": "SCORES"}), batch=8
    ),
    "diamond": ensemble(
        "IN INT32 2",
        "SUM INT32 2; MORE INT32 2",
        step("plus", {"A": "doubled", "B": "MORE"}, {"SUM": "SUM"}),
        step("twice", {"IN": "IN"}, {"OUT": "doubled", "EXTRA": "MORE"}),
        batch=4,
    ),
    "expanded": ensemble("IN INT32 2", "OUT INT32 2", step("whole_step", {"IN": "IN"}, {"OUT": "OUT"}), batch=4),
    "failing": ensemble(
        "KIND STRING 1",
        "OUT INT32 2",
        step("wild", {"KIND": "KIND"}, {"OUT": "made"}),
        step("flat", {"IN": "made"}, {"OUT": "OUT"}),
    ),
    "failing_batch": ensemble(
        "KIND STRING 1",
        "OUT INT32 2",
        step("wild", {"KIND": "KIND"}, {"OUT": "made"}),
        step("twice", {"IN": "made"}, {"OUT": "OUT"}),
    ),
    "failing_end": ensemble("KIND STRING 1", "OUT INT32 2", step("wild", {"KIND": "KIND"}, {"OUT": "OUT"})),
    "failing_outer": ensemble("KIND STRING 1", "OUT INT32 2", step("failing", {"KIND": "KIND"}, {"OUT": "OUT"})),
    "flat": python("flat", "IN INT32 2", "OUT INT32 2"),
    "flat_rows": ensemble("IN INT32 2", "OUT INT32 2", step("flat", {"IN": "IN"}, {"OUT": "OUT"}), batch=4),
    "named": python("named", "IN INT32 2", 'SCORES FP32 3 label_filename: "labels.txt"', batch=8)
    | {
        "labels.txt": """\
red
green
blue
"""
    },
    "needed": ensemble(
        "A INT32 2 optional: true; B INT32 2",
        "SUM INT32 2",
        step("plus", {"A": "A", "B": "B"}, {"SUM": "SUM"}),
        batch=8,
    ),
    "next": python("next", "IN INT32 1", "OUT INT32 1"),
    "numbered": python("numbered", "IN INT32 1", "OUT INT32 1", "version_policy { all { } }")
    | {"3/model.py": source("numbered")},
    "optional": ensemble(
        "A INT32 2; B INT32 2 optional: true",
        "SUM INT32 2",
        step("plus", {"A": "A", "B": "B"}, {"SUM": "SUM"}),
        batch=8,
    ),
    "outer": ensemble(
        "IN INT32 2",
        "SUM INT32 2",
        step("chain", {"IN": "IN"}, {"OUT": "eightfold"}),
        step("plus", {"A": "eightfold", "B": "IN"}, {"SUM": "SUM"}),
        batch=2,
    ),
    "over_flat": ensemble(
        "IN INT32 2",
        "OUT INT32 2",
        step("flat", {"IN": "IN"}, {"OUT": "one"}),
        step("twice", {"IN": "one"}, {"OUT": "two"}),
        step("flat", {"IN": "two"}, {"OUT": "OUT"}),
    ),
    "pair": python("pair", "A INT32 1; B INT32 1", "OUT INT32 1"),
    "passes": ensemble("IN INT32 2", "TEXT STRING 1", step("told", {"IN": "IN"}, {"TEXT": "TEXT"}), batch=8),
    "plus": python("plus", "A INT32 2; B INT32 2 optional: true", "SUM INT32 2", batch=8),
    "repeat": python("repeat", "COUNT INT32 1", "OUT INT32 1", "model_transaction_policy { decoupled: true }"),
    "reshaped": ensemble(
        "IN INT32 4 reshape { shape: [ 2, 2 ] }",
        "OUT INT32 1 4 reshape { shape: [ 2, 2 ] }",
        step("shaped_step", {"IN": "IN"}, {"OUT": "OUT"}),
        batch=8,
    ),
    "rows": ensemble("IN INT32 -1 2", "OUT INT32 -1 2", step("twice", {"IN": "IN"}, {"OUT": "OUT"})),
    "shaped_step": python("next", "IN INT32 2 2", "OUT INT32 2 2", batch=8),
    "stream": ensemble(
        "COUNT INT32 1",
        "OUT INT32 1",
        step("repeat", {"COUNT": "COUNT"}, {"OUT": "number"}),
        step("next", {"IN": "number"}, {"OUT": "OUT"}),
    ),
    "stream_and_input": ensemble(
        "COUNT INT32 1",
        "OUT INT32 1",
        step("repeat", {"COUNT": "COUNT"}, {"OUT": "number"}),
        step("pair", {"A": "COUNT", "B": "number"}, {"OUT": "OUT"}),
    ),
    "stream_and_one": ensemble(
        "COUNT INT32 1",
        "OUT INT32 1; ONE INT32 1",
        step("repeat", {"COUNT": "COUNT"}, {"OUT": "OUT"}),
        step("next", {"IN": "COUNT"}, {"OUT": "ONE"}),
    ),
    "stream_of_both": ensemble(
        "COUNT INT32 1",
        "OUT INT32 1",
        step("repeat", {"COUNT": "COUNT"}, {"OUT": "number"}),
        step("repeat", {"COUNT": "number"}, {"OUT": "inner"}),
        step("pair", {"A": "number", "B": "inner"}, {"OUT": "OUT"}),
    ),
    "stream_of_streams": ensemble(
        "COUNT INT32 1",
        "OUT INT32 1",
        step("repeat", {"COUNT": "COUNT"}, {"OUT": "number"}),
        step("repeat", {"COUNT": "number"}, {"OUT": "OUT"}),
    ),
    "stream_outer": ensemble(
        "COUNT INT32 1",
        "OUT INT32 1",
        step("stream", {"COUNT": "COUNT"}, {"OUT": "number"}),
        step("next", {"IN": "number"}, {"OUT": "OUT"}),
    ),
    "stream_two_ways": ensemble(
        "COUNT INT32 1",
        "OUT INT32 1; ONE INT32 1",
        step("repeat", {"COUNT": "COUNT"}, {"OUT": "OUT"}),
        step("next", {"IN": "OUT"}, {"OUT": "ONE"}),
    ),
    "told": python("told", "IN INT32 2", "TEXT STRING 1", batch=8),
    "twice": python("twice", "IN INT32 2", "OUT INT32 2; EXTRA INT32 2", batch=8),
    "two_apart": ensemble(
        "COUNT INT32 1",
        "ONE INT32 1; TWO INT32 1",
        step("repeat", {"COUNT": "COUNT"}, {"OUT": "ONE"}),
        step("repeat", {"COUNT": "COUNT"}, {"OUT": "TWO"}),
    ),
    "two_streams": ensemble(
        "COUNT INT32 1",
        "OUT INT32 1",
        step("repeat", {"COUNT": "COUNT"}, {"OUT": "one"}),
        step("repeat", {"COUNT": "COUNT"}, {"OUT": "two"}),
        step("pair", {"A": "one", "B": "two"}, {"OUT": "OUT"}),
    ),
    "unloadable": python("unloadable", "IN INT32 1", "OUT INT32 1"),
    "versions": ensemble(
        "IN INT32 1",
        "OLD INT32 1; NEW INT32 1",
        step("numbered", {"IN": "IN"}, {"OUT": "OLD"}, version=1),
        step("numbered", {"IN": "IN"}, {"OUT": "NEW"}),
    ),
    "whole_step": python("next", "IN INT32 -1 2", "OUT INT32 -1 2"),
    "wild": python("wild", "KIND STRING 1", "OUT INT32 2"),
}
