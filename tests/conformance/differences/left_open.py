"""Differences where the protocols leave the behaviour open."""

from __future__ import annotations

from conformance.differences.difference import Difference, said

DIFFERENCES = (
    Difference(
        "Calls and responses from a process that a model forks",
        "Triton's processes share memory, which a fork can continue to use. Nerite's worker has a socket, on which "
        "two processes would take each other's messages: the fork gets an error at once. Threads may call and send.",
        {
            "calls/in a process that the model forks": (
                said("False"),
                said("A process that a model has forked cannot ask the server"),
            )
        },
    ),
    Difference(
        "Restricted keys that begin with @",
        "In `--http-restricted-api=<categories>:<header>=@` and `--grpc-restricted-protocol=<categories>:<key>=@`, "
        "the `@` is followed by the path of a file with the keys. If a key for Triton itself begins with `@`, the "
        "server does not start, and names the file that is missing: put the key into a file.",
        {},
    ),
    Difference(
        "Duplicate JSON keys",
        "JSON does not define what they mean. Triton takes the first, Nerite the last, as most programs do.",
        {
            "infer_json/keys twice": (
                '200 {"id": "a"',
                '200 {"id": "b"',
            ),
            "generate/a parameter twice": (
                '200 {"count"',
                '200 {"count"',
            ),
        },
    ),
    Difference(
        "Connections during shutdown",
        "From SIGINT or SIGTERM on, Triton leaves HTTP connections open until their clients close them, or the exit "
        "timeout is over, and refuses requests on open gRPC streams. Nerite keeps answering on open connections and "
        "streams for a moment, tells clients to go elsewhere (`Connection: close`, GOAWAY), and then closes each "
        "connection as soon as no request is in flight on it.",
    ),
    Difference(
        "Limits of requests over HTTP",
        "In Nerite a body has at most `--http-max-input-size` bytes, whatever is in it; Triton counts JSON, and a "
        "body that is one tensor, but not tensors behind the JSON. A request has at most 1,024 inputs, outputs and "
        "parameters, unless the model has more, and shapes have up to 64 dimensions; bodies of settings may have 128 "
        "KiB. Triton has no such limits, and takes the time. See [HTTP](http.md#limits).",
    ),
    Difference(
        "The content type of errors that are found early",
        "Triton detects a truncated string when the model is to run, and sends the error as text/plain, like all "
        "errors of models. Nerite detects it earlier, with all other wrong sizes, and sends JSON, which it is.",
        {
            "infer_binary/BYTES: half a text": (
                "400 incomplete string data for inference input 'IN'",
                "400 incomplete string data for inference input 'IN'",
            ),
            "infer_binary/BYTES: huge length": (
                "400 incomplete string data for inference input 'IN'",
                "400 incomplete string data for inference input 'IN'",
            ),
        },
    ),
    Difference(
        "gRPC delays for tests of clients",
        "The environment variables `TRITONSERVER_SERVER_DELAY_GRPC_RESPONSE_SEC`, `TRITONSERVER_DELAY_GRPC_PROCESS`, "
        "`…_PROCESS_ENTRY`, `…_COMPLETE`, `…_RESPONSE` and `TRITONSERVER_DELAY_RESPONSE_COMPLETION` and "
        "`…_COMPLETE_EXEC` delay a call as in Triton. There a thread sleeps, and its next work is delayed, too; in "
        "Nerite no other call waits. `…_NOTIFICATION` and `…_ENQUEUE` concern the synchronization of threads, and "
        "have no effect. The log lists those that are set.",
    ),
    Difference(
        "A request on a stream that does not fit its sequence",
        "The error has the name of the model, and the flag of the last response, like all errors from a model's queue.",
        {"sequences/on another stream": ("OK [end, inference", "OK [end, inference")},
    ),
    Difference(
        "Slots of sequences that end",
        "With the strategy direct, a slot becomes free when the request with END has run, in Triton when it begins to"
        " run.",
    ),
    Difference(
        "Metrics of models on GPUs",
        "They count all instances of a model together, without the label `gpu_uuid`; Triton counts for each GPU.",
    ),
    Difference(
        "Readiness of the server while a model is unloaded",
        "Triton is not ready until `finalize` of the model has run, although the request to unload it was answered. In "
        "Nerite versions that are being unloaded do not count.",
    ),
    Difference(
        "Readiness checks of models",
        "A probe waits half a second for `is_ready`; then, and while the instance executes, the last answer counts. A "
        "check of more than five seconds stands for not ready. See [Python models](python-models.md#coroutines).",
    ),
    Difference(
        "Sums of histograms",
        "`nv_inference_first_response_histogram_ms_sum` has fractions; Triton adds up whole milliseconds.",
    ),
    Difference(
        "Metrics of GPUs",
        "They come from NVML, through nvidia-ml-py, instead of DCGM. Values that a GPU does not report are left out; "
        "Triton reports 0. See [GPUs](gpus.md).",
    ),
    Difference(
        "TensorRT",
        "Nerite refuses shape tensors in models that batch, and tensors with non-linear formats in all models. CUDA "
        "graphs are captured for shapes that occur twice, not while the model is loaded; `graph_spec` is ignored. "
        "Settings of pinned memory have no effect. See [TensorRT](tensorrt.md).",
    ),
)
