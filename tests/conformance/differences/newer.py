"""What Triton does since the release that takes the exam with us."""

from __future__ import annotations

from conformance.differences.difference import Difference

DIFFERENCES = (
    Difference(
        "What is told of a name or a value that cannot be",
        "Newer versions of Triton say what is wrong: that a model's name is empty or a path, and that 'ready' of an "
        "index is no boolean. Nerite does as they do.",
        {
            "repository_explicit/load by a path#1": (
                "500 failed to load '..', failed to poll from model repository",
                "400 invalid model name '..', model name must not contain path traversal characters",
            ),
            "repository_explicit/gRPC: load nothing": (
                "INTERNAL failed to load '', failed to poll from model repository",
                "INVALID_ARGUMENT Model name cannot be empty. Please enter a valid name to deploy.",
            ),
            "repository_fixed/index with ready as text": (
                "500 attempt to access JSON non-boolean as boolean",
                "400 Invalid value for 'ready': expected a boolean",
            ),
            "repository_fixed/index with ready as null": (
                "500 attempt to access JSON non-boolean as boolean",
                "400 Invalid value for 'ready': expected a boolean",
            ),
        },
    ),
    Difference(
        "Parameters of a Python model's response",
        "Newer versions of Triton take bool, int and str; Nerite does as they do.",
        {
            "python_models/parameters": (
                "500 Failed to process the request(s) for model 'trouble_0', message: TypeError",
                '200 {"model_name": "trouble", "model_version": "1", "parameters"',
            ),
            "python_models/gRPC: parameters": (
                "INTERNAL Failed to process the request(s) for model 'trouble_0', message: TypeError",
                'OK {"model_name": "trouble", "model_version": "1", "parameters"',
            ),
        },
    ),
)
