"""What Triton does since the release that takes the exam with us."""

from __future__ import annotations

from conformance.differences.difference import Difference

_RESERVED = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
_OTHER_KIND = "sequence batching control 'CORRID' data-type is"

DIFFERENCES = (
    Difference(
        "An output that is requested twice",
        "Newer versions of Triton refuse it, as they do an input.",
        {
            "infer_json/output twice": ("200", "400 [request id: <id_unknown>] output 'SUM' already exists in request"),
            "infer_json/output twice and input missing": (
                "400 [request id: me] expected 2 inputs but got 1 inputs",
                "400 [request id: me] output 'SUM' already exists in request",
            ),
            "grpc_infer/output twice": (
                "OK",
                "INVALID_ARGUMENT [request id: <id_unknown>] output 'OUT' already exists in request",
            ),
        },
    ),
    Difference(
        "Headers and metadata that would be forwarded under a reserved name",
        "Newer versions of Triton refuse names that begin with `triton_`, and those of a request's own parameters.",
        {
            "parameters/reserved header": ("200", "400 Header 'triton_thing' is reserved"),
            "parameters/gRPC: reserved metadata": ("OK", "INVALID_ARGUMENT Header 'triton_thing' is reserved"),
            **{
                f"parameters/{what}: {name}": (fine, f"{refused} Header '{name}' is reserved for Triton usage")
                for what, fine, refused in (
                    ("reserved header", "200", "400"),
                    ("gRPC: reserved metadata", "OK", "INVALID_ARGUMENT"),
                )
                for name in _RESERVED
            },
        },
    ),
    Difference(
        "JSON data that is nested a hundred levels deep",
        "Newer versions of Triton refuse it.",
        dict.fromkeys(
            ("infer_json/data nested too deep", "infer_json/texts nested too deep", "generate/nested too deep"),
            ("200", "400 JSON nesting depth exceeds maximum allowed limit (100)"),
        ),
    ),
    Difference(
        "A correlation id of another type than its control input",
        "Newer versions of Triton refuse a string for a number, where older ones pass uninitialized memory to the "
        "model, and a number for a string. The tested version also refuses the correct type for a string.",
        {
            **{
                f"sequences/a text for a control that is a number#{number}": (
                    theirs,
                    f"400 [request id: <id_unknown>] {_OTHER_KIND} 'BYTES', but model 'direct' expects 'UINT64'",
                )
                for number, theirs in enumerate(
                    (
                        '200 {"model_name": "direct"',
                        "400 inference request to model 'direct' must specify a non-zero or non-empty correlation ID",
                        "400 inference request to model 'direct' must specify batch-size 1",
                    ),
                    1,
                )
            },
            "sequences/a text for a control that is a number#4": (
                "OK",
                f"INVALID_ARGUMENT [request id: <id_unknown>] {_OTHER_KIND} 'BYTES', but model 'direct' expects",
            ),
            "sequences/a number for a control that is a text#1": (
                "400 unexpected number of string elements 2 for inference input 'CORRID', expecting 1",
                f"400 [request id: <id_unknown>] {_OTHER_KIND} 'UINT64', but model 'texts' expects 'BYTES'",
            ),
            "sequences/a number for a control that is a text#2": (
                "400 inference request to model 'texts' must specify a non-zero or non-empty correlation ID",
                f"400 [request id: <id_unknown>] {_OTHER_KIND} 'UINT64', but model 'texts' expects 'BYTES'",
            ),
            "sequences/a number for a control that is a text#3": (
                "INVALID_ARGUMENT unexpected number of string elements 2 for inference input 'CORRID', expecting 1",
                f"INVALID_ARGUMENT [request id: <id_unknown>] {_OTHER_KIND} 'UINT64', but model 'texts' expects",
            ),
            "sequences/a text for a control that is a text#1": (
                "400 unexpected number of string elements 2 for inference input 'CORRID', expecting 1",
                '200 {"model_name": "texts"',
            ),
            "sequences/an id that is 0 or empty#2": (
                "400 inference request to model 'direct' must specify a non-zero or non-empty correlation ID",
                f"400 [request id: <id_unknown>] {_OTHER_KIND} 'BYTES', but model 'direct' expects 'UINT64'",
            ),
        },
    ),
    Difference(
        "Requests in flight in an ensemble",
        "Newer versions of Triton have `max_inflight_requests` in the configuration of an ensemble, and so does "
        "Nerite.",
        {
            "ensembles/configuration": (
                '200 {"name": "chain", "platform": "ensemble"',
                '200 {"name": "chain", "platform": "ensemble"',
            ),
            "ensembles/configuration of one with several responses": (
                '200 {"name": "stream", "platform": "ensemble"',
                '200 {"name": "stream", "platform": "ensemble"',
            ),
            "namespaces/an ensemble beside one of them#3": (
                '200 {"name": "beside", "platform": "ensemble"',
                '200 {"name": "beside", "platform": "ensemble"',
            ),
        },
    ),
    Difference(
        "Registering CUDA memory on a machine without GPUs",
        "Nerite answers like a newer Triton without GPU support.",
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
        "Memory of the Python backend, and permission to register client memory",
        "A newer Triton refuses keys that its Python backend uses, and invalid ones, and registers nothing unless it "
        "is started with `--allow-client-shm=true`.",
        {
            "shared_memory/a reserved key#2": (
                "500 Unable to open shared memory region: 'triton_python_backend_shm_region_1'",
                "400 cannot register shared memory region 'r' with key 'triton_python_backend_shm_region_1'",
            ),
            "shared_memory/nothing but slashes#2": (
                "500 Unable to open shared memory region: '//'",
                "400 cannot register shared memory region 'r' - invalid shm key '//'",
            ),
            "shared_memory/an empty key#2": (
                "500 Unable to open shared memory region: ''",
                "400 cannot register shared memory region 'r' - invalid shm key ''",
            ),
        },
    ),
    Difference(
        "Regions that are unregistered while a request uses them",
        "In newer versions of Triton they stay, and are listed in the status, until the request is answered.",
    ),
    Difference(
        "Errors about invalid names and values",
        "Newer versions of Triton say what is wrong: that a model's name is empty or a path, and that 'ready' of an "
        "index request is not a boolean. So does Nerite.",
        {
            "repository_explicit/load by a path#1": (
                "500 failed to load '..', failed to poll from model repository",
                "400 invalid model name '..', model name must not contain path traversal characters",
            ),
            "repository_explicit/gRPC: load nothing": (
                "INTERNAL failed to load '', failed to poll from model repository",
                "INVALID_ARGUMENT Model name cannot be empty. Please enter a valid name to deploy.",
            ),
            "repository_explicit/gRPC: load a blank": (
                "INTERNAL failed to load ' ', failed to poll from model repository",
                "INVALID_ARGUMENT Model name cannot be empty. Please enter a valid name to deploy.",
            ),
            "repository_explicit/gRPC: load a path with blanks": (
                "INTERNAL failed to load ' .. ', failed to poll from model repository",
                "INVALID_ARGUMENT invalid model name ' .. ', model name must not contain path traversal characters",
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
        "Newer versions of Triton accept bool, int and str, and so does Nerite.",
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
    Difference(
        "A SageMaker or Vertex AI content type without a number",
        "Newer versions of Triton refuse it, instead of taking the body for the bytes of a tensor.",
        {
            f"{topic}/binary, size is {what}": (
                "400 [request id: <id_unknown>] input byte size mismatch for input 'raw_input' for model 'echo'.",
                "400 Unable to parse inference header size, got:",
            )
            for topic in ("sagemaker", "vertex_ai")
            for what in ("no number", "empty")
        },
    ),
    Difference(
        "Redirects of Vertex AI requests",
        "Newer versions of Triton let the header lead only to endpoints that read: not to those that load and unload "
        "models or register memory. Nerite also says so in the error.",
        {
            f"vertex_ai/redirect: {what}": (theirs, "403 /v2/")
            for what, theirs in (
                ("load", "200"),
                ("unload", "200"),
                ("register a region", "400 Shared memory register request has no 'key' field"),
                ("unregister a region", "200"),
                ("unregister a CUDA region", "200"),
            )
        },
    ),
    Difference(
        "Keys on the ports of SageMaker and Vertex AI",
        "Newer versions of Triton require the keys of `--http-restricted-api` there, too, and so does Nerite.",
    ),
    Difference(
        "Paths of SageMaker models",
        "Newer versions of Triton load nothing from /dev, /proc and /sys, and report normalized paths.",
        {
            **{
                f"sagemaker_models/url in {where}": (
                    "400 failed to load 'a', failed to poll from model repository",
                    "400 Invalid URL: ",
                )
                for where in ("/proc", "/dev", "/sys, by a detour")
            },
            **{
                f"sagemaker_models/{what}#2": ('200 {"modelName": "hash", "modelUrl": "/', '200 {"modelName": "hash"')
                for what in ("a folder with a slash", "a folder by a detour")
            },
        },
    ),
)
