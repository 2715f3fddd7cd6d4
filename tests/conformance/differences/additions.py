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
        "OpenAI's API under /v1",
        "Models of text answer on the same port. Triton has a server of its own for it, and nothing there here.",
        {"http_routes/version 1 of the protocol": ("404", "404")},
    ),
    Difference(
        "OpenAI's API: limits",
        "Messages, parts, tools, choices, images, stop strings, biases and texts have a number, and chat templates a "
        "time: see [limits](openai.md#limits). Triton's frontend takes any number of most of them.",
    ),
    Difference(
        "Namespaces of the steps of an ensemble",
        "With `--model-namespacing` a step goes to the repository that its `model_namespace` names. Triton takes no "
        "notice of what is written there. Without it both take the model in the ensemble's own repository, or else the "
        "only one of that name.",
    ),
    Difference(
        "Backends: packages, and no shared libraries",
        "A Python package may offer a backend. What is in the backend directory is a `model.py`, as Triton's "
        "python-based backends are; where a shared library lies beside it, Triton takes that. Nerite runs none. "
        "The names of Nerite's own backends are not looked for there. See [backends of your own](custom-backends.md).",
    ),
    Difference(
        "Environments made of lists of packages",
        "`EXECUTION_ENV_PATH` may name a `requirements.txt`, `pyproject.toml` or `uv.lock`, and models of all "
        "frameworks may have one. Triton takes archives and directories of conda, for Python models alone. See "
        "[environments](environments.md).",
    ),
    Difference(
        "Calls of models: what they inherit",
        "A call has the id, the priority, what is left of the timeout, the trace and the cancellation of the request "
        "that it is made for, unless the model says something else. Triton's calls have nothing of it, but for the "
        "trace where the model passes it on.",
        {"calls/what it inherits": (said("[('OUT', [b\"('', 0, 0, 0,"), said("[('OUT', [b\"('', 0, 0, 5"))},
    ),
    Difference(
        "Calls of models: waits that would never end",
        "Where a call could only be answered by an instance that waits for it, it fails at once, with an error that "
        "names the models. In Triton all of them wait for ever.",
    ),
    Difference(
        "Calls of models: giving up",
        "A response iterator has `cancel()`, as in newer versions of Triton: the iteration goes on until the called "
        "model has ended it. One that is dropped ends its request, as a cancelled future of `async_exec` does; Triton "
        "waits there for all responses. A called model waits while its responses are not read; the iterator keeps "
        "none of them to give them once more.",
        {
            "calls/answers once more": (
                said("[('OUT', [0.0])]\n[]\nagain\n[('OUT', [0.0])]"),
                said("[('OUT', [0.0])]\n[]\nagain") + '"',
            )
        },
    ),
    Difference(
        "Frameworks that were built for CPUs alone",
        "On a machine with GPUs `KIND_AUTO` means the CPU for them, so that a model need not say so. Triton's "
        "frameworks are all built for GPUs.",
    ),
    Difference(
        "PyTorch: what is completed",
        "An exported program (`torch.export`) completes its configuration, as an ONNX model does: Triton's backend for "
        "PyTorch completes nothing, and does not read these programs. The other kinds are refused with what to write, "
        "where their inputs or outputs are not given. See [PyTorch](pytorch.md).",
    ),
    Difference(
        "PyTorch: names",
        "Names of arguments, positions and ways into nested structures may be mixed, and used for controls and states, "
        "too. Results may be dictionaries. Where only the order in the configuration is left to go by, it is refused "
        "if a name that the program has would mean another tensor: Triton swaps the two without a word.",
    ),
    Difference(
        "PyTorch: compiled packages",
        "Packages of AOTInductor may have batches and sequences. Shapes and types that they were not compiled for are "
        "refused.",
    ),
    Difference(
        "PyTorch: modules in Python",
        "They run in the server's process, with weights in .safetensors, too. `torch.compile` is used where "
        "`TORCH_COMPILE_OPTIONAL_PARAMETERS` is given, in Triton always. Inputs and outputs go by name; in Triton by "
        "order.",
    ),
    Difference(
        "PyTorch: weights and modes",
        "Instances on a CPU share the weights of a program that does not change itself, unless "
        "`ENABLE_WEIGHT_SHARING` is false. TorchScript that was saved in training mode is served in evaluation mode. "
        "`INTRA_OP_THREAD_COUNT` is each model's own; in Triton the first model's is everybody's. Unsigned integers of "
        "16 to 64 bits and BF16 pass.",
    ),
    Difference(
        "TensorFlow: what is completed",
        "Frozen graphs (GraphDef) are completed from their placeholders and ends, and tensors of any operation may be "
        "outputs (`name:1`); Triton wants all of it written. Scalars are completed, too. Without `TF_SIGNATURE_DEF` a "
        "model of several signatures has to have `serving_default`; Triton takes any. Models may have states. See "
        "[TensorFlow](tensorflow.md).",
    ),
    Difference(
        "TensorFlow: sessions and accelerators",
        "Each instance has a process and a session of its own, so that a model that is unloaded gives back all that it "
        "took; `MAX_SESSION_SHARE_COUNT` has no effect. The accelerator `tensorrt` is refused, which TensorFlow no "
        "longer has.",
    ),
    Difference(
        "States of Python models",
        "A Python model leaves a state by returning it as an output with the name that `output_name` says, also with a "
        "request that is to run again. In Triton it can read its states, and leave none. See "
        "[Sequences](sequences.md).",
    ),
    Difference(
        "Sequences that wait for a slot when the server stops",
        "They are refused at once, if all slots have sequences whose last request has not come. In Triton they wait "
        "until those were idle for too long, or the exit timeout is over.",
    ),
    Difference(
        "A resource that becomes global, or stops being so, in a reload",
        "Where no other model names it the reload is done, and instances of before and after do not execute at the "
        "same time. Triton refuses it, because both are there for a while.",
    ),
    Difference(
        "The response cache: equal requests at the same time",
        "While one of them is computed the others wait for its answer, and count as hits. Triton computes each.",
    ),
    Difference(
        "The response cache: Redis that is slow or gone",
        "Triton's cache waits for an answer of Redis without end, unless socket_timeout says otherwise. Nerite waits "
        "100 ms; then, and until Redis can be reached again, models compute, and nobody waits for it. Entries belong "
        "to the content of a model's files, and what somebody else has written there is not believed.",
    ),
    Difference(
        "The response cache: settings that there are not",
        "A setting of --cache-config that a cache does not have is refused, with the name that was meant. So is a size "
        "with something behind the number. Triton ignores both. A model that enables the cache on a server without one "
        "gets a warning in the log.",
    ),
    Difference(
        "Queues have a bound",
        "A queue that goes on growing refuses requests with status 503, `Retry-After` and, over gRPC, "
        "`grpc-retry-pushback-ms`, which a full `max_queue_size` and a server that stops have as well. In Triton a "
        "queue without `max_queue_size` grows until the memory is full. `--max-queue-seconds=0 "
        "--max-queued-requests=0` lifts the bound. See [Overload](overload.md).",
        {"queue/no place in the queue#3": (FULL, FULL)},
    ),
    Difference(
        "Inputs of an iterative model are not copied for each turn",
        "They are the same memory in each turn. A large one is for reading only: a model that changes it in place "
        "copies it first. Triton copies the inputs for each turn.",
    ),
    Difference(
        "Tensors between the steps of an ensemble are not copied",
        "A step gets what the step before has made, in the memory where it was made, and may write there. A large "
        "tensor that another step or the client takes too is for reading only: a model that changes it in place "
        "copies it first. Triton copies each tensor for each step.",
    ),
    Difference(
        "Warming up with recorded requests",
        "The parameter `WARMUP_REQUESTS` of a model names a file with requests, which each instance answers before it "
        "is ready. See [Model repositories](repositories.md).",
    ),
    Difference(
        "Strings in base64",
        'In JSON an element of BYTES may be `{"b64": "…"}`, so that it may be any bytes, and outputs are written like '
        "this where a request asks for it: with the parameter `base64` of an output, or `base64_output` of the "
        "request. A model does not see these parameters. See [Plain HTTP](http.md).",
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
        "Triton does not look at the content type. Without `Inference-Header-Content-Length`, a body of type "
        "`image/…`, `audio/…`, `video/…` or `application/pdf` is a file, and one of type `multipart/form-data` has a "
        "part for each input. All other types mean what they mean to Triton. See [Plain HTTP](http.md).",
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
        "Instances in Triton start as many threads as there are cores, each. In Nerite a worker is told its share, "
        "unless the environment or the model's parameter `INTRA_OP_THREAD_COUNT` says otherwise. See "
        "[Instances](instances.md).",
    ),
    Difference(
        "OpenVINO models: batches, types, properties",
        "Triton compiles a model for batches of `max_batch_size`, and refuses smaller ones unless "
        "`ENABLE_BATCH_PADDING` fills them up. In Nerite the batch is free, and filling up is a choice. A batch "
        "dimension that is free in the model is one for the auto-completion, without a layout. A parameter may be any "
        "property of OpenVINO; one that is nearly such a name is refused, where Triton ignores it, and so is a value "
        "that is neither YES nor NO. Instances have a stream each, and share the cores. See [OpenVINO](openvino.md).",
    ),
    Difference(
        "OpenVINO models: a state inside the model",
        "A model with `ReadValue` and `Assign` begins each request with its initial state. In Triton an instance goes "
        "on with what the last request left, whoever sent it.",
    ),
    Difference(
        "Half precision in JSON",
        "With `--http-json-half-precision=true` FP16 and BF16 are numbers in JSON, as other types are. Without it "
        "Nerite refuses them as Triton does.",
    ),
    Difference(
        "Logs for machines, with request ids",
        "`--log-format json` makes every line an object, `--access-log=true` gives each request and call a line, and "
        "what a model says while it executes a request with an id has that id. See [Logs](logs.md).",
    ),
    Difference(
        "Trace files that can be read while the server runs",
        "They are JSON at any time. Triton's is complete when the server stops.",
    ),
    Difference(
        "Spans of the wait, and what calls are under",
        "Each execution has a span `queue` before its `compute`, which says how many requests were executed together. "
        "A model's calls to others are under its `compute`, as is what it notes itself; Triton's are beside it. Spans "
        "are sent as protobuf, compressed if `OTEL_EXPORTER_OTLP_COMPRESSION` says so; requests that "
        "failed have spans that say so.",
    ),
)
