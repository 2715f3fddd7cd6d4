"""Texts that are worded otherwise."""

from __future__ import annotations

from conformance.differences.difference import Difference

DIFFERENCES = (
    Difference(
        "A region of shared memory without bytes",
        "Triton shows what the system says of an empty mapping.",
        {
            "shared_memory/no bytes#2": (
                "400 failed to register shared memory region 'r': unable to process address spaceInvalid argument",
                "400 failed to register shared memory region 'r': invalid args",
            )
        },
    ),
    Difference(
        "Names of classes and files in the errors of Python models",
        "They are the names of Triton's C++ module and of Python's import machinery; Nerite shows its own class, and "
        "of a traceback the part that belongs to the model.",
        {
            "python_models/not a list": (
                "500 Failed to process the request(s) for model 'trouble_0', message: Expected a list",
                "500 Failed to process the request(s) for model 'trouble_0', message: Expected a list",
            ),
            "python_models/gRPC: not a list": (
                "INTERNAL Failed to process the request(s) for model 'trouble_0', message: Expected a list",
                "INTERNAL Failed to process the request(s) for model 'trouble_0', message: Expected a list",
            ),
            "repository_explicit/a reload that fails#1": (
                "400 load failed for model 'echo': version 1 is at UNAVAILABLE state: Internal: RuntimeError",
                "400 load failed for model 'echo': version 1 is at UNAVAILABLE state: Internal: RuntimeError",
            ),
        },
    ),
)
