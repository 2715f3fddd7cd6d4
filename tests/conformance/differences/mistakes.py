"""Mistakes of Triton that are not repeated."""

from __future__ import annotations

from conformance.differences.difference import NEVER, Difference, said

PAIR_AND_VERSIONS = ", ".join(
    (
        '{"name": "pair", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}',
        '{"name": "versions", "version": "1", "state": "READY"}',
        '{"name": "versions", "version": "3", "state": "UNAVAILABLE", "reason": "unloaded"}',
        '{"name": "versions", "version": "4", "state": "UNAVAILABLE", "reason": "unloaded"}',
    )
)
ONCE = (
    '200 {"model_name": "shapes", "model_version": "1", "outputs": [{"name": "SUM", "datatype": "INT32", "shape": [1], '
    '"data": [10]}, {"name": "ASKED", "datatype": "INT32", "shape": [1], "data": [1]}]}'
)
TWICE = ONCE.replace('"data": [1]}]', '"data": [2]}]')


def turn(model: str, number: int) -> str:
    """The answer of a model that tells whose turn it was."""
    outputs = f'"outputs": [{{"name": "TURN", "datatype": "INT32", "shape": [3], "data": [{number},'
    return f'200 {{"model_name": "{model}", "model_version": "1", {outputs}'


REFUSED = "TritonModelException Failed to load model: Failed to process the request for model 'lab_0_0', message: "
DIFFERENCES = (
    Difference(
        "Counts with `--metrics-config=counter_latencies=false`",
        "With Triton the metrics of requests and executions are there and stay at 0. They count, and the durations are "
        "left out.",
        {
            "metrics_config/of requests": (
                "metrics: nv_inference_compute_infer_summary_us",
                "metrics: nv_inference_compute_infer_summary_us",
            )
        },
    ),
    Difference(
        "Requests that web pages of other sites have browsers send",
        "Triton answers them, a load that brings a program along included. Nerite refuses those that can change "
        "something with 403 on every port that speaks HTTP, and on a loopback address those under a name that is not "
        "the server's. See [access](access.md#web-pages-from-other-origins-cors).",
    ),
    Difference(
        "Files in loads by anybody",
        "While a port lets other machines load models without a key, a load that brings files is refused with 403 or "
        "PERMISSION_DENIED; Triton runs them. `--model-load-files=any` has them taken. See "
        "[access](access.md#loading-a-model-runs-its-code).",
    ),
    Difference(
        "Requests to a model whose instances are all passive",
        "They end Triton's process. Nerite refuses them.",
        {"instances/a request to passive instances": (NEVER, "503 all instances of the model are passive")},
    ),
    Difference(
        "Names and ids that are not UTF-8, or of any length",
        "Triton takes them over HTTP, and gives them to models, files and clients that cannot read them. Nerite "
        "refuses text that is not UTF-8 everywhere but in the data of BYTES tensors, and names and ids of more than "
        "1,024 characters, by the name of the field.",
        {
            "infer_json/id that is not UTF-8": ("200", "400 member 'id' is not valid UTF-8 at character 2."),
            "infer_json/member that is not UTF-8": ("200", "400 member 'more' is not valid UTF-8 at character 0."),
            "infer_json/id of 5,000 characters": ("200", "400 'id' is 5000 characters long, more than the 1024"),
        },
    ),
    Difference(
        "gRPC messages of any size, number of fields and duration",
        "Triton takes messages of 2 GiB, packed ones too, and waits for what was announced as long as the "
        "connection lives. Nerite takes 256 MiB after decompression: larger tensors are better sent in shared "
        "memory or in several requests, and `--grpc-max-message-size` takes up to 2 GiB. A message that does not "
        "come on for a minute is ended (`--grpc-upload-timeout`). A request has at most 5,000 fields, 1,024 inputs, "
        "outputs, parameters or dimensions, and 4 MiB beside its tensors. See "
        "[overload](overload.md#connections-and-request-bodies).",
    ),
    Difference(
        "Connections and bytes under way",
        "Triton has no bound for either, and ends where the system does. Nerite closes the longest idle connections "
        "when there are as many as `--max-connections` allows, or after 15 minutes without a request, and refuses "
        "requests beyond `--max-bytes-in-flight` with 429 or RESOURCE_EXHAUSTED.",
    ),
    Difference(
        "Long texts in calls between models",
        "Triton passes on what a model puts into a `pb_utils.InferenceRequest`, of any length. In Nerite the limits "
        "are those of clients: a name or an id of more than 1,024 characters, or a parameter of more than 1 MiB, is "
        "refused by the name of the field, in the answer to the call.",
    ),
    Difference(
        "A verbosity beyond 32 bits",
        "Triton takes what is left of it by 2^32, so that a large one may switch details off.",
        {"logging_settings/details beyond 32 bits": ("200", "400 'log_verbose_level' must be from 0 to 4294967295")},
    ),
    Difference(
        "Instances held up by what does not concern them",
        "With `--rate-limit=execution_count` Triton starts nobody while the first in line waits, not even who needs "
        "something else, or nothing. In Nerite an instance is held up by those that need what it needs, and by nobody "
        "else.",
        {
            f"instances/who needs nothing, while others wait#{number}": (turn(model, theirs), turn(model, ours))
            for number, model, theirs, ours in ((2, "seldom", 11, 12), (3, "free", 12, 11))
        },
    ),
    Difference(
        "Requests that wait for resources",
        "In Triton they have left the queue: they cannot be cancelled, do not expire, and join no batch. In Nerite a "
        "batch is put together when its instance has what it needs.",
    ),
    Difference(
        "Warm-up and the rate limiter",
        "Triton warms instances up when the resources that they need are free, so that a load may have to wait for "
        "requests to other models. In Nerite a load does not wait.",
    ),
    Difference(
        "Requests that end Triton's process",
        "A request must never end the server. It is refused like any other mistake.",
        {
            "classification/of texts": (NEVER, "400 class result not available for output"),
            "classification/gRPC: of texts": (NEVER, "INVALID_ARGUMENT class result not available for output"),
            "classification/of no elements": (NEVER, "200"),
            "infer_json/dimension of 2^63 - 1": (NEVER, "400"),
            "infer_json/elements beyond 64 bits": (NEVER, "400"),
            "infer_json/bytes beyond 64 bits": (NEVER, "400"),
            "sagemaker_models/body: broken": (NEVER, "400 failed to parse the request JSON buffer: Missing a name"),
            "sagemaker_models/body: a list": (NEVER, "400 failed to register '', repository not found"),
            "sagemaker_models/body: a number as name": (NEVER, "400 attempt to access JSON non-string as string"),
            "sagemaker_models/body: a number as url": (NEVER, "400 attempt to access JSON non-string as string"),
            "calls/load an unknown model": (
                NEVER,
                said(f"{REFUSED}failed to load 'nobody', failed to poll from model"),
            ),
            "calls/load no name": (NEVER, said(REFUSED)),
            "calls/load a path": (NEVER, said(REFUSED)),
            "calls/load with a broken configuration": (NEVER, said(REFUSED)),
            "calls/load files without a configuration": (NEVER, said(REFUSED)),
            "calls/a version that is none": (NEVER, said("False")),
        },
    ),
    Difference(
        "Calls of models: errors",
        "Triton's error has the code INTERNAL whatever the called model said, and one among several responses is lost: "
        "it is a response without outputs. Here both arrive as they are.",
        {
            "calls/an error among the answers": (
                said("[('OUT', [0.0])]\n[('OUT', [1.0])]\n[('OUT', [2.0])]\n[]"),
                said("[('OUT', [0.0])]\n[('OUT', [1.0])]\n[('OUT', [2.0])]\nerror: three"),
            )
        },
    ),
    Difference(
        "Names of Python models that are not UTF-8",
        "Triton takes the bytes, and the model gets an exception later, when it reads them back, or the error that "
        "quotes them. Here the function that is given them refuses them, and says which argument it was.",
        {
            f"argument_types/our own: {what}": (said(f"{given} -> {theirs}"), said(f"{given} -> TypeError"))
            for what, given, theirs in (
                ("the name of a tensor", "b'\\xff'", "UnicodeDecodeError"),
                ("the id of a request", "b'\\xff'", "taken"),
                ("the name of a model", "b'\\xff'", "taken"),
                ("names of outputs", "[b'\\xff']", "taken"),
            )
        },
    ),
    Difference(
        "Messages of Python models that are not UTF-8",
        "What a model logs, or answers as an error, arrives with what is not UTF-8 escaped. Triton passes such bytes "
        "on, and raises `TypeError` for half a character.",
        {
            "argument_types/our own: messages": (
                said("b'a\\xff' -> UnicodeDecodeError"),
                said("b'a\\xff' -> 'a\\\\xff'"),
            ),
            "argument_types/our own: lines of the log": (
                said("b'\\xff' -> taken\n'\\ud800' -> TypeError"),
                said("b'\\xff' -> taken\n'\\ud800' -> taken"),
            ),
        },
    ),
    Difference(
        "Arguments of Python models that the binding cannot convert",
        "Triton raises `RuntimeError`, about a cast in C++. Here it is the error that other mistakes in the same "
        "argument get, with the reason.",
        {
            f"argument_types/our own: {what}": (said(f"{given} -> RuntimeError"), said(f"{given} -> {ours}"))
            for what, given, ours in (
                ("correlation ids", "-1", "TritonModelException"),
                ("buckets", "['a']", "TritonModelException"),
                ("paths of files", "{5: b'x'}", "TypeError"),
            )
        },
    ),
    Difference(
        "One response of a batch that cannot be sent",
        "Where `execute` returns something else for a request than a response, Triton fails all requests of the batch. "
        "Here the others are answered.",
    ),
    Difference(
        "Answers of Python models that leave Triton waiting for ever",
        "None in place of a response is a mistake of the model; its caller is told at once.",
        {
            "python_models/none": (NEVER, "500"),
            "python_models/nothing": (NEVER, "500"),
            "python_models/gRPC: none": (NEVER, "INTERNAL"),
            "python_models/gRPC: nothing": (NEVER, "INTERNAL"),
        },
    ),
    Difference(
        "Iterative sequences: END before the last turn",
        "A request with START and END that its model wants once more is lost in Triton, and its caller waits for ever. "
        "So is one of a model whose sequences are not iterative; with us it fails, in the words of Triton's log.",
        {"iterative/END in two turns": (NEVER, "200")},
    ),
    Difference(
        "Iterative sequences: statistics",
        "Triton counts a request as often as it ran. Here it is one inference, when it is over; each turn is an "
        "execution.",
    ),
    Difference(
        "Initial states that are wrong: a file missing or too short, two of them, other dimensions",
        "Now and then Triton does not survive such a load. Here it fails with the text that Triton has for it.",
        {
            f"iterative/states: {name}": (
                NEVER,
                f"400 load failed for model '{model}': version 1 is at UNAVAILABLE state: {why}",
            )
            for name, model, why in (
                ("a file that is too short", "shortfile", "Invalid argument: initial_state setting expects 12 bytes"),
                ("a file that is not there", "nofile", "Internal: failed to open text file for read"),
                ("two beginnings", "two", "Invalid argument: initial_state field for state input 'FILE' must contain"),
                ("other dimensions", "otherdims", "Invalid argument: "),
            )
        },
    ),
    Difference(
        "States with initial values of a size of their own",
        "Where a state may have any size, Triton writes all of its initial state into memory for one of size 1, and "
        "may end of it. The model gets all of it, in the shape that `initial_state` has.",
    ),
    Difference(
        "States without an initial state",
        "Triton gives the first request of a sequence whatever is in memory; here it gets zeros.",
    ),
    Difference(
        "Tensors of sequences that are two things at once",
        "A control or a state with the name of an input, of another control or of another state is refused when the "
        "model is loaded, as are states without names or type, and one tensor for two kinds of control. Triton takes "
        "them, and gives the model one of the two tensors, or ends at the first request.",
    ),
    Difference(
        "The response cache: failures",
        "Triton keeps a failure as an answer without outputs, and gives it with status 200 to whoever asks again. Only "
        "what a model has answered is kept.",
        {
            "response_cache/an error#2": (
                '200 {"model_name": "fails", "model_version": "1", "outputs": []}',
                "500 too",
            ),
            "response_cache/an exception#2": (
                '200 {"model_name": "fails", "model_version": "1", "outputs": []}',
                "500 Failed to process the request(s) for model 'fails_0_0', message: ValueError: too much",
            ),
        },
    ),
    Difference(
        "The response cache: requests that are not the same",
        "Triton's key is a hash of 64 bits of the names and bytes of the inputs, so that an answer is given to "
        "requests of another shape, for other outputs, and with other parameters. All of that belongs to ours, of "
        "256 bits, and the correlation id, which a model can see, too.",
        {
            "response_cache/the same bytes in another shape#2": (ONCE, TWICE),
            "response_cache/other outputs#2": (
                '200 {"model_name": "outputs", "model_version": "1", "outputs": [{"name": "SUM", "datatype": "INT32", '
                '"shape": [1], "data": [10]}]}',
                '200 {"model_name": "outputs", "model_version": "1", "outputs": [{"name": "SUM", "datatype": "INT32", '
                '"shape": [1], "data": [10]}, {"name": "ASKED"',
            ),
            "response_cache/other parameters#2": (
                ONCE.replace("shapes", "parameters"),
                TWICE.replace("shapes", "parameters"),
            ),
        },
    ),
    Difference(
        "The response cache: answers of a model that was replaced",
        "Triton goes on giving the answers of a version's old files after a reload. What was computed by other files, "
        "or by an ensemble of other models, is not an answer any more.",
        {
            f"response_cache/what was before a reload#{number}": (
                ONCE.replace("shapes", "forgets").replace("10]", "3]"),
                ONCE.replace("shapes", "forgets").replace("10]", "3]").replace("[1]}]}", "[101]}]}"),
            )
            for number in (3, 7)
        },
    ),
    Difference(
        "The response cache: preserve_ordering",
        "Triton answers nothing any more once a model with preserve_ordering has had an answer from the cache. Such an "
        "answer leaves at once; what is computed keeps its order.",
    ),
    Difference(
        "Trace rates and frequencies below zero",
        "Triton takes them for numbers beyond four billion, with which nothing is ever traced. They are out of range.",
        {
            f"trace_settings/{name}: minus {number}": ("200", f"400 Unable to parse '{name}', value is out of range")
            for name in ("trace_rate", "log_frequency")
            for number in ("one", "two")
        },
    ),
    Difference(
        "Trace settings of all models that one model cannot have",
        "They are refused, but Triton has already changed those of all. A refused update changes nothing.",
        {
            f"trace_settings/a rate of all that a model cannot have#{number}": (
                '200 {"trace_level": ["OFF"], "trace_rate": "0"',
                '200 {"trace_level": ["OFF"], "trace_rate": "7"',
            )
            for number in (8, 10)
        },
    ),
    Difference(
        "Spans of requests that are not to be sampled",
        "A `traceparent` whose sampled flag is not set leads to spans in Triton (triton-inference-server/server#8474). "
        "Here it leads to none: who began the trace has decided that it is not recorded.",
    ),
    Difference(
        "Trace state over gRPC",
        "Triton loses the `tracestate` that comes with a call. It is passed on, as over HTTP.",
    ),
    Difference(
        "Kinds of spans",
        "All of Triton's are of the kind SERVER, for which monitoring counts each as a request to a service. Here only "
        "`InferRequest` is; the others are INTERNAL.",
    ),
    Difference(
        "Refused requests in traces",
        "In Triton a request that is refused before it is queued takes its turn and its number, leaves no trace, and "
        "keeps the trace file from being written when the server stops. Here it does not count.",
    ),
    Difference(
        "Tensors in traces that make the trace file unreadable",
        "Triton writes texts and eight-bit numbers as they are, which is not always JSON, and six digits of a number. "
        "Here the file is JSON, and numbers have all their digits.",
    ),
    Difference(
        "HTTP requests sent before the answer to the one before",
        "Triton drops them. Pipelining is part of HTTP/1.1.",
        {
            "http_routes/two requests at once": (NEVER, "200"),
            "http_routes/three requests at once, one of them refused": (NEVER, "404 Not Found"),
        },
    ),
    Difference(
        "A connection kept open under HTTP/1.0",
        "Triton sends no Content-Length, so that the client waits for the end of the connection.",
        {"http_routes/HTTP/1.0 that keeps the connection": (NEVER, "200")},
    ),
    Difference(
        "HTTP that cannot be parsed",
        "Triton closes the connection without a word. Nerite says 400 first.",
        {
            "http_routes/no HTTP at all": ("no answer", "400"),
            "http_routes/header without a colon": ("no answer", "400"),
            "http_routes/method in small letters": ("no answer", "400"),
            "infer_json/wrong content length": ("no answer", "400"),
        },
    ),
    Difference(
        "Content-Length together with Transfer-Encoding, and other codings than chunked",
        "Triton reads a body of one of the two lengths, where a proxy in front may have seen the other, and what is "
        "left over as another request (request smuggling). Nerite refuses it, and closes the connection.",
        {
            "http_routes/Content-Length and Transfer-Encoding": (
                "400 unexpected size for request JSON",
                "400 Bad Request: Transfer-Encoding can't be present with Content-Length",
            ),
            "http_routes/a transfer coding beside chunked": (
                "400 [request id: <id_unknown>] input byte size mismatch for input 'raw_input'",
                "400 Bad Request: unsupported transfer coding: only 'chunked' is accepted",
            ),
        },
    ),
    Difference(
        "Chunk extensions and trailers",
        "Both are part of HTTP/1.1, and ignored. Triton closes the connection.",
        {"http_routes/chunked body with a trailer": ("no answer", '200 {"model_name": "echo"')},
    ),
    Difference(
        "A needed input left out beside an optional one",
        "Triton counts the inputs and does not look at their names, so that the model runs without the input.",
        {
            "infer_json/needed input missing beside optional ones": (
                '200 {"model_name": "options"',
                "400 [request id: <id_unknown>] expected number of inputs between 2 and 3 but got 2 inputs",
            ),
            "ensembles/an input that is not optional": (
                "400 in ensemble 'optional', [request id: <id_unknown>] unexpected deadlock, at least one output",
                "400 [request id: <id_unknown>] expected number of inputs between 1 and 2 but got 1 inputs for model",
            ),
            "ensembles/optional input of a model that needs it": (
                "500 in ensemble 'needed', Failed to process the request(s) for model 'plus_0', message: Attribute",
                "400 in ensemble 'needed', [request id: <id_unknown>] expected number of inputs between 1 and 2",
            ),
            "generate/an input is missing": (
                '200 {"count": 41, "model_name": "prompt"',
                "400 [request id: <id_unknown>] expected number of inputs between 1 and 6 but got 1 inputs",
            ),
        },
    ),
    Difference(
        "No inputs for a model that needs none, and makes batches",
        "Triton's Python backend looks for the size of the batch in the first input, and fails where there is none. In "
        "Nerite such a request is a batch of one, as one without a batch dimension is a request.",
        {
            "infer_json/no inputs where none is needed for a batch": (
                "400 [request id: <id_unknown>] out of bounds index 0: request has 0 inputs",
                '200 {"model_name": "free"',
            ),
            "grpc_infer/no inputs where none is needed for a batch": (
                "INVALID_ARGUMENT [request id: <id_unknown>] out of bounds index 0: request has 0 inputs",
                'OK {"model_name": "free"',
            ),
        },
    ),
    Difference(
        "Some outputs of an ensemble",
        "Triton fails where an output that is wanted also leads to one that is not. Nerite runs what is needed.",
        {
            f"ensembles/{exchange}": (
                f"400 in ensemble '{ensemble}', [request id: <id_unknown>] unexpected deadlock, at least one output is",
                f'200 {{"model_name": "{ensemble}"',
            )
            for exchange, ensemble in (
                ("an output that others are made of", "branches"),
                ("an output that is made of another", "branches"),
                ("an output of a step that gives others", "diamond"),
            )
        },
    ),
    Difference(
        "How often a request to an ensemble fails",
        "Triton counts it twice. Nerite counts each request once.",
        {
            "ensembles/failures are counted": (
                '200 {"model_stats": [{"name": "failing_end", "version": "1"',
                '200 {"model_stats": [{"name": "failing_end", "version": "1"',
            )
        },
    ),
    Difference(
        "Models that stay when an ensemble goes with all that it needs",
        "`unload_dependents` is to leave what was loaded for its own sake. Triton forgets that it was, once it is part "
        "of an ensemble.",
        {
            f"ensembles_explicit/unload keeps what was asked for{when}#{number}": (theirs, ours)
            for when in ("", " later")
            for number, theirs, ours in (
                (4, '200 [{"name": "bad_batch"}', '200 [{"name": "bad_batch"}'),
                (5, "200 []", '200 [{"name": "twice", "version": "1", "state": "READY"}]'),
            )
        },
    ),
    Difference(
        "More inputs than the model has",
        "Triton lists all that came, in the order of a hash table, and none that is missing. Nerite names one that the "
        "model does not have.",
        {
            "infer_json/one input too many": (
                "400 [request id: <id_unknown>] expected 2 inputs but got 3 inputs for model 'pair'. Got input(s) [",
                "400 unexpected inference input 'C' for model 'pair'",
            ),
            "infer_json/too many inputs beside optional ones": (
                "400 [request id: <id_unknown>] expected number of inputs between 2 and 3 but got 4 inputs for model",
                "400 unexpected inference input 'OTHER' for model 'options'",
            ),
            "grpc_infer/one input too many": (
                "INVALID_ARGUMENT [request id: <id_unknown>] expected 2 inputs but got 3 inputs for model 'pair'",
                "INVALID_ARGUMENT unexpected inference input 'C' for model 'pair'",
            ),
        },
    ),
    Difference(
        "Raw contents over gRPC that belong to no input",
        "Triton drops them. They are a mistake of the client, which is told.",
        {
            "grpc_infer/raw data for one input too many": (
                'OK {"model_name": "echo"',
                "INVALID_ARGUMENT expected 1 raw_input_contents entries for model 'echo', got 2",
            ),
            "grpc_infer/shared memory and raw": (
                "NOT_FOUND Unable to find shared memory region: 'r'",
                "INVALID_ARGUMENT expected 1 raw_input_contents entries for model 'echo', got 2",
            ),
            "shared_memory/gRPC: an input and raw contents#3": (
                'OK {"model_name": "copy"',
                "INVALID_ARGUMENT expected 1 raw_input_contents entries for model 'copy', got 2",
            ),
        },
    ),
    Difference(
        "A change of the log that is refused in part",
        "Triton has made the other changes by then. Nerite makes all of them or none.",
        {
            f"logging_settings/{name}#2": (
                '200 {"log_file": "", "log_info": false',
                '200 {"log_file": "", "log_info": true',
            )
            for name in ("a good one and a bad one", "a bad one and a good one")
        },
    ),
    Difference(
        "Offsets in shared memory",
        "Triton maps only what begins at a page of 4,096 bytes. Nerite takes any offset.",
        {
            "shared_memory/a region with an offset#2": ("400 failed to register shared memory region 'r'", "200"),
            "shared_memory/a region with an offset#3": (
                "404 Unable to find system shared memory region: 'r'",
                '200 [{"name": "r", "key": "exam_shm", "offset": 32, "byte_size": 32}]',
            ),
        },
    ),
    Difference(
        "When a request with several responses counts",
        "Triton counts it when `execute` returns, with the time until then, whatever becomes of it. Nerite counts it "
        "at its last response: the computing lasts until that was sent. A request that ends with an error has failed "
        '(`reason="BACKEND"`), as has one whose client gave it up (`reason="CANCELED"`). `execution_count` and '
        "`batch_stats` are about calls of `execute` with both.",
        {
            "counting_streams/several: a last error#2": (
                "metrics: nv_inference_request_duration_us, nv_inference_request_failure",
                "metrics: nv_inference_request_duration_us, nv_inference_request_failure",
            )
        },
    ),
    Difference(
        "Statistics by response",
        "`response_stats` of a decoupled model: Triton's Python backend leaves it empty, Nerite fills it in as the "
        "documentation of Triton has it. The waiting for a client that reads slowly counts as `compute_output`. "
        "Responses to one request after the 256th count with it.",
        {
            "counting_streams/several: statistics": (
                '200 {"model_stats": [{"name": "many"',
                '200 {"model_stats": [{"name": "many"',
            ),
            "counting_streams/several: statistics over gRPC": (
                'OK {"model_stats": [{',
                'OK {"model_stats": [{',
            ),
        },
    ),
    Difference(
        "The memory of a model",
        "`memory_usage` of a model whose instances are processes is what these have for themselves, files and shared "
        "tensors apart. Triton on a machine without GPUs has nothing there.",
    ),
    Difference(
        "A response sender of a model that is not decoupled, and a request that it ends without a response",
        "Triton fails the batch, with the traceback of `send`. With Nerite the answer to that request names the "
        "mistake and what to do. A thread of the model may make it as well: then Triton's client waits for ever.",
        {
            f"streams/{transport}sender, an end and no response": (
                f"{status}Failed to process the request(s) for model 'one_0', message: TritonModelException: Unable to",
                f"{status}Unable to send response. Non-decoupled model cannot send complete final before sending a",
            )
            for transport, status in (("", "OK ["), ("unary: ", "INTERNAL "), ("HTTP: ", "500 "))
        },
    ),
    Difference(
        "Compressed bodies that are broken",
        "Triton takes what it could unpack of them, and be it nothing, for the whole body. Nerite says that they are "
        "broken. This includes deflate without zlib's frame.",
        {
            "compression/deflate without a frame": (
                "400 [request id: <id_unknown>] input byte size mismatch for input 'raw_input' for model 'echo'",
                "400 failed to decompress request body",
            ),
            "compression/gzip that is not": (
                "400 [request id: <id_unknown>] input byte size mismatch for input 'raw_input' for model 'echo'",
                "400 failed to decompress request body",
            ),
            "compression/gzip cut off": (
                "500 failed to parse the request JSON buffer",
                "400 failed to decompress request body: it is incomplete",
            ),
        },
    ),
    Difference(
        "An Inference-Header-Content-Length that is no number, or beyond 32 bits",
        "Triton goes by the digits it begins with, 0 where there are none, and by what remains of them in 32 bits. The "
        "JSON is then cut, or taken for a tensor. Nerite says that the length is wrong.",
        {
            "infer_binary/length is text": (
                "400 [request id: <id_unknown>] input byte size mismatch for input 'raw_input' for model 'echo'",
                "400 Unable to parse Inference-Header-Content-Length, got: abc",
            ),
            "infer_binary/length is text after digits": (
                "500 failed to parse the request JSON buffer",
                "400 Unable to parse Inference-Header-Content-Length, got: 12abc",
            ),
            "infer_binary/length empty": (
                "400 [request id: <id_unknown>] input byte size mismatch for input 'raw_input' for model 'echo'",
                "400 Unable to parse Inference-Header-Content-Length, got:",
            ),
            "infer_binary/length beyond 32 bits": (
                "400 [request id: <id_unknown>] input byte size mismatch for input 'raw_input' for model 'echo'",
                "400 inference header size should be in range (0, 103), got: 4294967296",
            ),
        },
    ),
    Difference(
        "Negative timeouts over gRPC",
        "Triton makes a very long time of them. Over HTTP it refuses them, and Nerite does so over both.",
        {
            "parameters/gRPC: timeout negative": (
                'OK {"model_name": "request"',
                "INVALID_ARGUMENT invalid value for 'timeout', expected value >= 0.",
            )
        },
    ),
    Difference(
        "A forwarded header without a value",
        "Triton's HTTP parser makes a blank of it.",
        {
            "parameters/empty header": (
                '200 {"model_name": "request"',
                '200 {"model_name": "request"',
            )
        },
    ),
    Difference(
        "Shapes whose size does not fit 64 bits",
        "Triton goes on with what remains of it in 64 bits. Nerite goes by the true one.",
        {
            "infer_json/dimension of 2^63": (
                "500 Unable to parse 'data': Shape does not match true shape of 'data' field",
                "400 invalid shape for input 'IN': shape [1,9223372036854775808] causes total element count to exceed",
            ),
            "grpc_infer/elements beyond 64 bits": (
                "INVALID_ARGUMENT [request id: <id_unknown>] input byte size mismatch",
                "INVALID_ARGUMENT",
            ),
            "grpc_infer/bytes beyond 64 bits": (
                "INVALID_ARGUMENT [request id: <id_unknown>] input byte size mismatch",
                "INVALID_ARGUMENT",
            ),
        },
    ),
    Difference(
        "Bodies of an unload that cannot be parsed",
        "Triton unloads the model without having understood the request. Nerite tells the client, and unloads nothing.",
        {
            "repository_explicit/unload with bad JSON": ("200", "500 failed to parse the request JSON buffer"),
            "repository_fixed/unload with bad JSON": (
                "503 explicit model load / unload is not allowed",
                "500 failed to parse the request JSON buffer",
            ),
        },
    ),
    Difference(
        "A load without a configuration, after one that brought its own",
        "Triton keeps the configuration that was sent until a file changes. As its documentation says, a load without "
        "one is a load of what the repository has.",
        {
            "repository_explicit/load without it again#2": (
                '200 {"name": "echo", "platform": "", "backend": "python", "runtime": "", "version_policy": {"latest": '
                '{"num_versions": 1}}, "max_batch_size": 3,',
                '200 {"name": "echo", "platform": "", "backend": "python", "runtime": "", "version_policy": {"latest": '
                '{"num_versions": 1}}, "max_batch_size": 8,',
            )
        },
    ),
    Difference(
        "Samples for warming up in the statistics",
        "Triton counts them as requests. Nobody has sent them.",
        {
            "warm_up/statistics": (
                '200 {"model_stats": [{"name": "rows", "version": "1", "last_inference": "<last_inference>", '
                '"inference_count": 3,',
                '200 {"model_stats": [{"name": "rows", "version": "1", "last_inference": "<last_inference>", '
                '"inference_count": 0,',
            )
        },
    ),
    Difference(
        "Samples of models with sequences",
        "In Triton a sample has only the inputs that it names, so that an ONNX model needs all of its controls and "
        "states there. In Nerite a sample is a sequence of one request, with the controls and states of such a one. "
        "What it names itself is as it says, and has to be of the type and shape of the control. An iterative model "
        "runs until it is done; in Triton a load does not end where a model wants a sample once more.",
        {
            "warm_up/what sequences were": (
                """200 {"model_name": "sequences", "model_version": "1", "outputs": [{"name": "SAMPLES", "datatype": """
                """"BYTES", "shape": [1, 2], "data": ["[('IN', [[0, 0]])]", "[('IN', [[0, 0]])]"]}]}""",
                """200 {"model_name": "sequences", "model_version": "1", "outputs": [{"name": "SAMPLES", "datatype": """
                """"BYTES", "shape": [1, 2], "data": ["[('END', [[1]]), ('ID', [[1]]), ('IN', [[0, 0]]), ('READY', """
                """[[True]]), ('START', [[1.0]])]",""",
            ),
            "warm_up/sequencesothertype#1": (
                "200",
                "400 load failed for model 'sequencesothertype': version 1 is at UNAVAILABLE state: Invalid argument: "
                "[request id: <id_unknown>] inference input 'START' data-type is 'INT32', but model",
            ),
            "warm_up/sequencesothertype#2": ("200", "400"),
            "warm_up/sequencesotherdims#1": (
                "200",
                "400 load failed for model 'sequencesotherdims': version 1 is at UNAVAILABLE state: Invalid argument: "
                "[request id: <id_unknown>] unexpected shape for input 'START' for model",
            ),
            "warm_up/sequencesotherdims#2": ("200", "400"),
        },
    ),
    Difference(
        "Statistics of all models, with namespaces",
        "Triton looks for models that have the namespace in their name.",
        {
            "namespaces/statistics of all": (
                "400 Request for unknown model: '<models>::echo' is not found",
                '200 {"model_stats": [{"name": "echo"',
            )
        },
    ),
    Difference(
        "Files that come with a load and are no base64",
        "Triton loads what it can make of them.",
        {
            "repository_explicit/load with files that are no base64": (
                "400 load failed for model 'uploaded': version 1 is at UNAVAILABLE state",
                "400 load parameter 'file:1/model.py' is not base64",
            )
        },
    ),
    Difference(
        "Why a model could not be read, in the index",
        "Triton lists a model whose configuration is wrong like one that nobody tried to load, and one without a "
        "version not at all once its load was tried. Nerite says what is wrong with it.",
        {
            "ensembles/index of all": (
                '200 [{"name": "bad_batch"}, ',
                '200 [{"name": "bad_batch", "state": "UNAVAILABLE", "reason": "ensemble bad_batch allows maximum batch',
            ),
            "broken_start/index": (
                '200 [{"name": "badfield"}, {"name": "badtype"}, ',
                '200 [{"name": "badfield", "state": "UNAVAILABLE", "reason": "<models>/badfield/config.pbtxt:2:1: ',
            ),
            "repository_explicit/load badfield#2": (
                '200 [{"name": "arguments"}, {"name": "badfield"}, ',
                '200 [{"name": "arguments"}, {"name": "badfield", "state": "UNAVAILABLE", "reason": "<models>/badfield',
            ),
            "repository_explicit/load noversion#2": (
                '200 [{"name": "arguments"}, {"name": "pair", ',
                '200 [{"name": "arguments"}, {"name": "noversion", "state": "UNAVAILABLE", "reason": "at least one ',
            ),
            "repository_explicit/load othername#2": (
                '200 [{"name": "arguments"}, {"name": "othername"}, ',
                '200 [{"name": "arguments"}, {"name": "othername", "state": "UNAVAILABLE", "reason": "<models>/other',
            ),
            "repository_explicit/load zerodims#2": (
                f'200 [{{"name": "arguments"}}, {PAIR_AND_VERSIONS}, {{"name": "zerodims"}}]',
                f'200 [{{"name": "arguments"}}, {PAIR_AND_VERSIONS}, {{"name": "zerodims", "state": "UNAVAILABLE", ',
            ),
        },
    ),
    Difference(
        "SageMaker's list of models",
        "A model that was loaded with the header X-Amzn-SageMaker-Target-Model stands in Triton's list as an empty "
        "object.",
        {"sagemaker_models/a target#2": ('200 {"models": [{}]}', '200 {"models": [{"modelName": "hash"')},
    ),
    Difference(
        "A model of SageMaker's with the name of one that is there",
        "Triton says that it was loaded, and goes on with the old one.",
        {
            "sagemaker_models/the name of a model that is there": (
                "200",
                "400 failed to load 'echo', failed to poll from model repository",
            )
        },
    ),
    Difference(
        "SageMaker's archives outside of /opt/ml/models",
        "Triton knows that a folder is a model, and not one of models, only if its path is of the form "
        "/opt/ml/models/<hash>/model. Its newer versions take no other path. Nerite looks for config.pbtxt, wherever "
        "the archive was unpacked, so that what is meant for SageMaker can be tried elsewhere.",
        {"sagemaker_models/an archive that is a model": ("400 failed to register '', repository not found", "200")},
    ),
    Difference(
        "An archive of SageMaker's with several models and no ensemble",
        "Triton takes the one that the file system lists last. Nerite says that it does not know which one is meant.",
    ),
    Difference(
        "The routes of Vertex AI",
        "Triton takes AIP_HEALTH_ROUTE and AIP_PREDICT_ROUTE for regular expressions. They are paths.",
    ),
    Difference(
        "Variables of SageMaker that cannot be",
        "With an unknown SAGEMAKER_TRITON_PING_MODE Triton starts, and says that it is well whatever happens. Nerite "
        "does not start. So it is with SAGEMAKER_TRITON_INFERENCE_TYPE, which Triton looks at in its start script.",
    ),
    Difference(
        "A sequence whose request runs longer than a sequence may be idle",
        "Triton counts from when the last request came, and ends the sequence while the model works for it. In Nerite "
        "a sequence is idle while nothing of it waits or runs.",
        {
            "sequences/longer than a sequence may be idle#2": (
                "400 inference request for sequence 82 to model 'brief' must specify the START flag",
                '200 {"model_name": "brief"',
            )
        },
    ),
    Difference(
        "A worker that dies in the middle of a sequence",
        "Triton starts another and goes on with the sequence, of which the model knows nothing any more. Nerite "
        "refuses what follows in sequences that were lost, until they begin anew, and says why.",
    ),
    Difference(
        "START for a correlation id whose last request has END and has not run",
        "Triton gives the new sequence another slot, so that the model may get its requests before the END of the old "
        "one, or together with it. In Nerite it begins when the old one has ended.",
    ),
)
