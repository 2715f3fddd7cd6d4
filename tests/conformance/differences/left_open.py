"""What the protocols leave open."""

from __future__ import annotations

from conformance.differences.difference import Difference, said

DIFFERENCES = (
    Difference(
        "Calls and responses from a process that a model forks",
        "Triton's processes share memory, which a fork may go on to use. Nerite's worker has a socket, of which two "
        "processes would take each other's messages: the fork gets an error at once. Threads may call and send.",
        {
            "calls/in a process that the model forks": (
                said("False"),
                said("A process that a model has forked cannot ask the server"),
            )
        },
    ),
    Difference(
        "Restricted keys that begin with @",
        "Behind `--http-restricted-api=<categories>:<header>=@` and `--grpc-restricted-protocol=<categories>:<key>=@` "
        "stands the path of a file with the keys. Where Triton's key itself begins with `@` the server does not start, "
        "and names the file that it misses: put the key into a file.",
        {},
    ),
    Difference(
        "JSON keys that stand twice",
        "JSON does not say what they mean. Triton takes the first, Nerite the last, as most programs do.",
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
        "Connections when the server stops",
        "From SIGINT or SIGTERM on, Triton leaves connections over HTTP open until their clients close them, or the "
        "exit timeout is over, and refuses what comes on a gRPC stream that is open. Nerite answers for a moment what "
        "comes on connections and streams that are open, tells clients to go elsewhere (`Connection: close`, GOAWAY), "
        "and then closes each connection as soon as nothing is under way on it.",
    ),
    Difference(
        "Limits of requests over HTTP",
        "A body has at most as many bytes as `--http-max-input-size` says, whatever is in it; Triton counts JSON, and "
        "a body that is one tensor, and not tensors behind the JSON. A request has at most 1,024 inputs, outputs and "
        "parameters, unless the model has more, and shapes have 64 dimensions; bodies of settings are 128 KiB. "
        "Triton has no limits, and takes the time. See [Plain HTTP](http.md#limits).",
    ),
    Difference(
        "The content type of errors that are found early",
        "Triton finds a string that is cut off when the model is to run, and calls the error text/plain as all errors "
        "of models. Nerite finds it before, as all other sizes that are wrong, and calls it JSON, which it is.",
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
        "Delays of gRPC for tests of clients",
        "The environment variables `TRITONSERVER_SERVER_DELAY_GRPC_RESPONSE_SEC`, `TRITONSERVER_DELAY_GRPC_PROCESS`, "
        "`…_PROCESS_ENTRY`, `…_COMPLETE`, `…_RESPONSE` and `TRITONSERVER_DELAY_RESPONSE_COMPLETION` and "
        "`…_COMPLETE_EXEC` delay a call as in Triton, where a thread sleeps, and what that thread would do next "
        "waits, too; here no other call waits. `…_NOTIFICATION` and `…_ENQUEUE` are about threads that meet, and "
        "have no effect. The log has a line of those that are set.",
    ),
    Difference(
        "A request on a stream that does not fit its sequence",
        "The error has the name of the model, and that it is the last response, as all that come from a model's queue.",
        {"sequences/on another stream": ("OK [end, inference", "OK [end, inference")},
    ),
    Difference(
        "Slots of sequences that end",
        "With the strategy direct, a slot is free when the request with END has run, in Triton when it begins to.",
    ),
    Difference(
        "Metrics of models on GPUs",
        "They count all instances of a model together, without the label `gpu_uuid`; Triton counts for each GPU.",
    ),
    Difference(
        "Sums of histograms",
        "`nv_inference_first_response_histogram_ms_sum` has fractions; Triton adds up whole milliseconds.",
    ),
    Difference(
        "Metrics of GPUs",
        "They are asked of NVML, through nvidia-ml-py, in the place of DCGM. What a GPU does not tell is left out; "
        "Triton says 0. See [GPUs](gpus.md).",
    ),
    Difference(
        "TensorRT",
        "Shape tensors are refused in models that make batches, and tensors that are not linear in all. CUDA graphs "
        "are captured for shapes that come twice, not while the model is loaded; `graph_spec` is not looked at. "
        "Whatever is about pinned memory has no effect. See [TensorRT](tensorrt.md).",
    ),
)
