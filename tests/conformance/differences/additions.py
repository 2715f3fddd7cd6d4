"""What Nerite does where Triton refuses, or does nothing."""

from __future__ import annotations

from conformance.differences.difference import Difference, said

NO_STRING = "500 Unable to parse JSON bytes array: attempt to access JSON non-string as string"
A_TEXT = '200 {"model_name": "texts", "model_version": "1", "outputs": [{"name": "OUT", "datatype": "BYTES"'
SAID = '"model_name": "prompt", "model_version": "1", "said": '
FULL = "503 [request id: third] Exceeds maximum queue size"
"""What only our headers say is not here."""
DIFFERENCES = (
    Difference(
        "The OpenAI API under /v1",
        "Text models answer it on the HTTP port. Triton has a separate server for it, and nothing at these paths.",
        {"http_routes/version 1 of the protocol": ("404", "404")},
    ),
    Difference(
        "Endpoints of other servers",
        "The HTTP port has vLLM's `/health`, `/ping` and `/version`, the metrics, and links at `/`, for gateways and "
        "load balancers that ask there: see [metrics](metrics.md#on-the-serving-port). Triton has nothing at these "
        "paths.",
        {
            "http_routes/root": ("404", "200"),
            "http_routes/health without version": ("404", "200"),
            "http_routes/metrics on the HTTP port": ("404", "200"),
            "sagemaker/the paths of SageMaker on the HTTP port": ("404", "200"),
            "vertex_ai/the paths of Vertex AI on the HTTP port": ("404", "200"),
        },
    ),
    Difference(
        "OpenAI API: limits",
        "The numbers of messages, parts, tools, choices, images, stop strings, biases and texts are limited, and so "
        "is the time of chat templates: see [limits](openai.md#limits). Triton's frontend accepts any number of most "
        "of them.",
    ),
    Difference(
        "Namespaces of the steps of an ensemble",
        "With `--model-namespacing` a step uses the repository that its `model_namespace` names, which Triton "
        "ignores. Without that field both use the model in the ensemble's own repository, or else the only one of "
        "that name.",
    ),
    Difference(
        "Backends: packages, and no shared libraries",
        "A Python package may provide a backend. The backend directory contains `model.py` files, like Triton's "
        "python-based backends; if a shared library lies beside one, Triton prefers it, and Nerite never loads one. "
        "Nerite's own backend names are not looked up there. See [custom backends](custom-backends.md).",
    ),
    Difference(
        "Environments from requirements",
        "`EXECUTION_ENV_PATH` may name a `requirements.txt`, `pyproject.toml` or `uv.lock`, and models of all "
        "frameworks may have one. Triton accepts conda archives and directories, for Python models only. See "
        "[environments](environments.md).",
    ),
    Difference(
        "BLS calls: inheritance",
        "A call inherits the id, the priority, the remaining timeout, the trace and the cancellation of the request "
        "that it is made for, unless the model sets them. Triton's calls inherit only the trace, if the model passes "
        "it on.",
        {"calls/what it inherits": (said("[('OUT', [b\"('', 0, 0, 0,"), said("[('OUT', [b\"('', 0, 0, 5"))},
    ),
    Difference(
        "BLS calls: deadlocks",
        "A call that could only be answered by an instance that waits for it fails at once, with an error that names "
        "the models. In Triton all of them wait forever.",
    ),
    Difference(
        "BLS calls: cancellation",
        "A response iterator has `cancel()`, as in newer versions of Triton: the iteration continues until the called"
        " model has ended it. Dropping an iterator ends its request, as cancelling a future of `async_exec` does; "
        "Triton waits for all responses in that case. A called model pauses while its responses are not read; the "
        "iterator does not keep them for a second iteration.",
        {
            "calls/answers once more": (
                said("[('OUT', [0.0])]\n[]\nagain\n[('OUT', [0.0])]"),
                said("[('OUT', [0.0])]\n[]\nagain") + '"',
            )
        },
    ),
    Difference(
        "CPU builds of frameworks",
        "On a machine with GPUs, `KIND_AUTO` means the CPU for a CPU build, so that models need not say so. Triton's "
        "frameworks are all built for GPUs.",
    ),
    Difference(
        "PyTorch: auto-completion",
        "An exported program (`torch.export`) completes its configuration, like an ONNX model. Triton's PyTorch "
        "backend completes nothing, and does not read these programs. Other kinds without inputs or outputs in the "
        "configuration are refused, with what to write. See [PyTorch](pytorch.md).",
    ),
    Difference(
        "PyTorch: names",
        "Names of arguments, positions and paths into nested structures may be mixed, and used for controls and "
        "states, too. Results may be dictionaries. If tensors can be matched only by their order in the "
        "configuration, the load is refused if a name of the program would mean another tensor: Triton silently swaps"
        " the two.",
    ),
    Difference(
        "PyTorch: compiled packages",
        "AOTInductor packages may have batches and sequences. Shapes and types that they were not compiled for are "
        "refused.",
    ),
    Difference(
        "PyTorch: modules in Python",
        "They run in the server's process, also with weights in .safetensors. `torch.compile` is used if "
        "`TORCH_COMPILE_OPTIONAL_PARAMETERS` is given, in Triton always. Inputs and outputs are matched by name; in "
        "Triton by order.",
    ),
    Difference(
        "PyTorch: weights and modes",
        "Instances on a CPU share the weights of a program that does not modify itself, unless "
        "`ENABLE_WEIGHT_SHARING` is false. TorchScript that was saved in training mode is served in evaluation mode. "
        "`INTRA_OP_THREAD_COUNT` applies to each model; in Triton the first model's applies to all. Unsigned integers"
        " of 16 to 64 bits and BF16 are supported.",
    ),
    Difference(
        "TensorFlow: auto-completion",
        "Frozen graphs (GraphDef) are completed from their placeholders and leaves, and tensors of any operation may "
        "be outputs (`name:1`); Triton requires all of it in the configuration. Scalars are completed, too. Without "
        "`TF_SIGNATURE_DEF` a model of several signatures must have `serving_default`; Triton takes any. Models may "
        "have states. See [TensorFlow](tensorflow.md).",
    ),
    Difference(
        "TensorFlow: sessions and accelerators",
        "Each instance has its own process and session, so that unloading a model frees all of its memory; "
        "`MAX_SESSION_SHARE_COUNT` has no effect. The accelerator `tensorrt`, which TensorFlow no longer has, is "
        "refused.",
    ),
    Difference(
        "States of Python models",
        "A Python model returns a state as an output with the name of `output_name`, also with a request that it "
        "reschedules. In Triton it can read states, but not return any. See [Sequences](sequences.md).",
    ),
    Difference(
        "Sequences that wait for a slot during shutdown",
        "They are refused at once, if all slots have sequences whose last request has not arrived. In Triton they "
        "wait until those reach their idle timeout, or the exit timeout is over.",
    ),
    Difference(
        "A resource that becomes global, or device-local, in a reload",
        "If no other model names it the reload succeeds, and old and new instances do not execute at the same time. "
        "Triton refuses it, because both exist for a while.",
    ),
    Difference(
        "Response cache: concurrent equal requests",
        "While one of them is computed the others wait for its response, and count as hits. Triton computes each.",
    ),
    Difference(
        "Response cache: Redis that is slow or down",
        "Triton's cache waits for Redis without limit, unless socket_timeout is set. Nerite waits 100 ms; then, and "
        "until Redis can be reached again, models compute without waiting for it. Keys include a hash of the model's "
        "files, and data that others have written is not trusted.",
    ),
    Difference(
        "Response cache: unknown settings",
        "Nerite refuses a setting of --cache-config that a cache does not have, and suggests the intended name. It "
        "also refuses a size with something after the number. Triton ignores both. A model that enables the cache on "
        "a server without one gets a warning in the log.",
    ),
    Difference(
        "Queues are bounded",
        "A queue that keeps growing rejects requests with status 503, `Retry-After` and, over gRPC, "
        "`grpc-retry-pushback-ms`, as do a full `max_queue_size` and a server that shuts down. In Triton a queue "
        "without `max_queue_size` grows until memory is full. `--max-queue-seconds=0 --max-queued-requests=0` removes"
        " the bound. See [Overload](overload.md).",
        {"queue/no place in the queue#3": (FULL, FULL)},
    ),
    Difference(
        "Inputs of an iterative model are not copied for each iteration",
        "They are the same memory in each iteration. A large one is read-only: a model that changes it in place must "
        "copy it first. Triton copies the inputs for each iteration.",
    ),
    Difference(
        "Tensors between the steps of an ensemble are not copied",
        "A step gets the outputs of the step before in the memory where they were made, and may write there. A large "
        "tensor that another step or the client uses, too, is read-only: a model that changes it in place must copy "
        "it first. Triton copies each tensor for each step.",
    ),
    Difference(
        "Warm-up with recorded requests",
        "The parameter `WARMUP_REQUESTS` of a model names a file with requests, which each instance answers before it"
        " is ready. See [Model repositories](repositories.md#warm-up).",
    ),
    Difference(
        "Base64 strings",
        'In JSON an element of BYTES may be `{"b64": "…"}`, so that it may be any bytes. Outputs are written like '
        "this if a request asks for it, with the parameter `base64` of an output or `base64_output` of the request. "
        "Models do not see these parameters. See [HTTP](http.md#binary-data-in-json-base64).",
        {
            "infer_json/BYTES in base64": (NO_STRING, '200 {"model_name":"texts"'),
            "infer_json/BYTES in base64 that is none": (
                NO_STRING,
                "400 element 0 of input 'IN' is not valid base64: Incorrect padding.",
            ),
            "infer_json/base64 for an output": (
                f'{A_TEXT}, "shape": [1], "data": ["a"]',
                f'{A_TEXT}, "shape": [1], "data": [{{"b64": "YQ=="}}]',
            ),
            "infer_json/base64 for all outputs": (
                f'{A_TEXT}, "shape": [1], "data": ["a"]',
                f'{A_TEXT}, "shape": [1], "data": [{{"b64": "YQ=="}}]',
            ),
            "generate/a text in base64": (
                NO_STRING,
                f'200 {{"count": 42, {SAID}"[{{\\"text\\": [[1, 1], [\\"hello\\"]]',
            ),
            "generate/base64 for the outputs": (
                f'200 {{"count": 63, {SAID}"[{{\\"text\\"',
                f'200 {{"count": 42, {SAID}{{"b64": "W3sid',
            ),
        },
    ),
    Difference(
        "Files and forms",
        "Triton ignores the content type. Without `Inference-Header-Content-Length`, a body of type `image/…`, "
        "`audio/…`, `video/…` or `application/pdf` is a file, and one of type `multipart/form-data` has a part for "
        "each input. All other types mean what they mean to Triton. See [HTTP](http.md#files).",
        {
            "infer_binary/a file": ("500 failed to parse the request JSON buffer", '200 {"model_name":"text"'),
            "infer_binary/a form": ("500 failed to parse the request JSON buffer", '200 {"model_name": "text"'),
            "infer_binary/JSON as an image": (
                "400 [request id: <id_unknown>] expected 1 inputs but got 0 inputs for model 'text'.",
                '200 {"model_name": "text"',
            ),
        },
    ),
    Difference(
        "Threads of libraries in Python models",
        "In Triton each instance starts as many threads as there are cores. In Nerite a worker is limited to its "
        "share, unless the environment or the model's parameter `INTRA_OP_THREAD_COUNT` says otherwise. See "
        "[Instances](instances.md#threads).",
    ),
    Difference(
        "OpenVINO models: batches, types, properties",
        "Triton compiles a model for batches of `max_batch_size`, and refuses smaller ones unless "
        "`ENABLE_BATCH_PADDING` pads them. In Nerite the batch dimension is dynamic, and padding is optional. "
        "Auto-completion takes a dynamic first dimension for the batch dimension, without a layout. A parameter may "
        "be any property of OpenVINO. A name that resembles a property is refused, where Triton ignores it, and so is"
        " a value that is neither YES nor NO. Each instance has one stream, and they share the cores. See "
        "[OpenVINO](openvino.md).",
    ),
    Difference(
        "OpenVINO models: a state inside the model",
        "A model with `ReadValue` and `Assign` begins each request with its initial state. In Triton an instance "
        "continues with what the last request left, whichever client sent it.",
    ),
    Difference(
        "One answer of a language model",
        "Language models are decoupled, but a request that does not set `stream` gets one response. So `infer` and "
        "`ModelInfer` take such requests; Triton refuses them for any decoupled model.",
    ),
    Difference(
        "Half precision in JSON",
        "With `--http-json-half-precision=true` FP16 and BF16 are numbers in JSON, like other types. Without it "
        "Nerite refuses them, as Triton does.",
    ),
    Difference(
        "Structured logs with request ids",
        "`--log-format json` makes every line an object, `--access-log=true` logs each request and call, and log "
        "messages of a model that executes a request with an id have that id. See [Logs](logs.md).",
    ),
    Difference(
        "Trace files that can be read while the server runs",
        "They are valid JSON at any time. Triton's are complete only after shutdown.",
    ),
    Difference(
        "Attributes of spans, and parents of calls",
        "The span `compute` has the number of requests that were executed together. A model's calls to others, and its "
        "own spans, are children of its `compute`; Triton's are siblings. Spans are sent as protobuf, compressed if "
        "`OTEL_EXPORTER_OTLP_COMPRESSION` is set; failed requests have spans with an error status.",
    ),
)
