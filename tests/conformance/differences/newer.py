"""What Triton does since the release that takes the exam with us."""

from __future__ import annotations

from conformance.differences.difference import Difference

DIFFERENCES = (
    Difference(
        "Registering CUDA memory",
        "As a newer Triton without GPU support answers.",
        {
            "shared_memory/CUDA#3": (
                "400 'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t",
                "501 failed to register CUDA shared memory region: 'r', GPUs not supported",
            ),
            "shared_memory/gRPC: CUDA#2": (
                "ALREADY_EXISTS shared memory region 'r' already in manager",
                "UNIMPLEMENTED failed to register CUDA shared memory region: 'r', GPUs not supported",
            ),
        },
    ),
    Difference(
        "Memory that belongs to the Python backend, and permission to register any",
        "A newer Triton refuses keys that its Python backend uses, and registers nothing unless it is started with "
        "`--allow-client-shm=true`.",
        {
            "shared_memory/a reserved key#2": (
                "500 Unable to open shared memory region: 'triton_python_backend_shm_region_1'",
                "400 cannot register shared memory region 'r' with key 'triton_python_backend_shm_region_1'",
            )
        },
    ),
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
