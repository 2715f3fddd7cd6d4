"""Triton bugs that Nerite does not repeat."""

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
        "Counters with `--metrics-config=counter_latencies=false`",
        "Triton keeps the metrics of requests and executions at 0. Nerite counts them, and leaves out only the "
        "durations.",
        {
            "metrics_config/of requests": (
                "metrics: nv_inference_compute_infer_summary_us",
                "metrics: nv_inference_compute_infer_summary_us",
            )
        },
    ),
    Difference(
        "Requests that web pages of other origins make browsers send",
        "Triton answers them, including a load that brings a program along. On every port that speaks HTTP, Nerite "
        "refuses those that can change something with 403, and on a loopback address also requests under a name that "
        "is not the server's. See [access control](access.md#web-pages-from-other-origins-cors).",
    ),
    Difference(
        "Files in load requests that need no key",
        "While a port lets other machines load models without a key, Nerite refuses a load that brings files with 403"
        " or PERMISSION_DENIED; Triton runs them. `--model-load-files=any` accepts them. See [access "
        "control](access.md#loading-a-model-runs-its-code).",
    ),
    Difference(
        "Requests to a model whose instances are all passive",
        "They crash Triton. Nerite refuses them.",
        {"instances/a request to passive instances": (NEVER, "503 all instances of the model are passive")},
    ),
    Difference(
        "Names and ids that are not UTF-8, of unlimited length, or with control characters",
        "Triton accepts them over HTTP, and passes them to models, files and clients that cannot read them. Nerite "
        "refuses text that is not UTF-8 everywhere but in the data of BYTES tensors, names and ids of more than 1,024 "
        "characters, and control characters in names, ids and values of headers, with the name of the field.",
        {
            "infer_json/id that is not UTF-8": ("200", "400 member 'id' is not valid UTF-8 at character 2."),
            "infer_json/member that is not UTF-8": ("200", "400 member 'more' is not valid UTF-8 at character 0."),
            "infer_json/id with a line end": ("200", "400 'id' has the control character U+000A at character 1"),
            "infer_json/id of 5,000 characters": ("200", "400 'id' is 5000 characters long, more than the 1024"),
        },
    ),
    Difference(
        "gRPC messages of unlimited size, number of fields and duration",
        "Triton accepts messages of 2 GiB, even compressed ones, and waits for an announced message for as long as "
        "the connection lives. Nerite accepts 256 MiB after decompression: send larger tensors in shared memory or in"
        " several requests, or raise `--grpc-max-message-size` to up to 2 GiB. A message without progress for a "
        "minute is ended (`--grpc-upload-timeout`). A request may have 5,000 fields, 1,024 inputs, outputs, "
        "parameters or dimensions, and 4 MiB beside its tensors. See "
        "[overload](overload.md#connections-and-request-bodies).",
    ),
    Difference(
        "Number of connections and bytes in flight",
        "Triton bounds neither, and fails when the system does. Nerite closes the longest idle connections when there"
        " are as many as `--max-connections` allows, or after 15 minutes without a request, and refuses requests "
        "beyond `--max-bytes-in-flight` with 429 or RESOURCE_EXHAUSTED.",
    ),
    Difference(
        "Long texts in calls between models",
        "Triton passes on whatever a model puts into a `pb_utils.InferenceRequest`, of any length. Nerite applies the"
        " limits of clients: a name or an id of more than 1,024 characters, or a parameter of more than 1 MiB, is "
        "refused with the name of the field, in the response to the call.",
    ),
    Difference(
        "A verbosity beyond 32 bits",
        "Triton truncates it to 32 bits, so that a large one may turn verbose logging off.",
        {"logging_settings/details beyond 32 bits": ("200", "400 'log_verbose_level' must be from 0 to 4294967295")},
    ),
    Difference(
        "Rate limiter: head-of-line blocking",
        "With `--rate-limit=execution_count` Triton starts no instance while the first one waits, not even those that"
        " need other resources or none. In Nerite an instance is only delayed by instances that need the same "
        "resource.",
        {
            f"instances/who needs nothing, while others wait#{number}": (turn(model, theirs), turn(model, ours))
            for number, model, theirs, ours in ((2, "seldom", 11, 12), (3, "free", 12, 11))
        },
    ),
    Difference(
        "Requests that wait for resources",
        "In Triton they have left the queue: they cannot be cancelled, do not expire, and join no batch. In Nerite a "
        "batch is formed when its instance has its resources.",
    ),
    Difference(
        "Warm-up and the rate limiter",
        "Triton warms instances up when their resources are free, so that a load may have to wait for requests to "
        "other models. In Nerite a load does not wait.",
    ),
    Difference(
        "Requests that crash Triton",
        "A request must never end the server. Nerite refuses these like any other mistake.",
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
        "BLS calls: errors",
        "Triton's error has the code INTERNAL whatever the called model reported, and an error among several "
        "responses is lost: it becomes a response without outputs. Nerite passes on both unchanged.",
        {
            "calls/an error among the answers": (
                said("[('OUT', [0.0])]\n[('OUT', [1.0])]\n[('OUT', [2.0])]\n[]"),
                said("[('OUT', [0.0])]\n[('OUT', [1.0])]\n[('OUT', [2.0])]\nerror: three"),
            )
        },
    ),
    Difference(
        "Names in Python models that are not UTF-8",
        "Triton accepts the bytes, and the model gets an exception later, when it reads them back or reads the error "
        "that quotes them. In Nerite the function that is given the name raises the error, and names the argument.",
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
        "In log messages and error texts of a model, Nerite escapes bytes that are not UTF-8. Triton passes such "
        "bytes on, and raises `TypeError` for a lone surrogate.",
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
        "Triton raises `RuntimeError` about a cast in C++. Nerite raises the error of other mistakes in the same "
        "argument, with the reason.",
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
        "If `execute` returns something other than a response for a request, Triton fails all requests of the batch. "
        "Nerite answers the others.",
    ),
    Difference(
        "Return values of Python models that make Triton wait forever",
        "None in place of a response is an error of the model; in Nerite its client gets the error at once.",
        {
            "python_models/none": (NEVER, "500"),
            "python_models/nothing": (NEVER, "500"),
            "python_models/gRPC: none": (NEVER, "INTERNAL"),
            "python_models/gRPC: nothing": (NEVER, "INTERNAL"),
        },
    ),
    Difference(
        "Iterative sequences: END before the last iteration",
        "Triton loses a request with START and END that its model reschedules, and its client waits forever. It also "
        "loses a rescheduled request of a model whose sequences are not iterative; in Nerite that fails, with the "
        "text of Triton's log.",
        {"iterative/END in two turns": (NEVER, "200")},
    ),
    Difference(
        "Iterative sequences: statistics",
        "Triton counts a request as often as it was executed. Nerite counts one inference, when it is over, and an "
        "execution for each iteration.",
    ),
    Difference(
        "Wrong initial states: a file missing or too short, two of them, other dimensions",
        "Triton sometimes crashes at such a load. In Nerite it fails with Triton's text.",
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
        "Initial states with a size of their own",
        "If a state may have any size, Triton writes all of its initial state into memory for size 1, and may crash. "
        "In Nerite the model gets all of it, in the shape of `initial_state`.",
    ),
    Difference(
        "States without an initial state",
        "Triton gives the first request of a sequence uninitialized memory; Nerite gives it zeros.",
    ),
    Difference(
        "Sequence tensors with two roles",
        "Nerite refuses to load a model in which a control or a state has the name of an input, of another control or"
        " of another state, a state has no name or type, or one tensor has two kinds of control. Triton accepts them,"
        " and gives the model one of the two tensors, or crashes at the first request.",
    ),
    Difference(
        "Response cache: failures",
        "Triton caches a failure as a response without outputs, and returns it with status 200 to the next equal "
        "request. Nerite only caches successful responses.",
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
        "Response cache: requests that are not equal",
        "Triton's key is a hash of 64 bits of the names and bytes of the inputs, so that a response is also returned "
        "to requests with another shape, other outputs, and other parameters. Nerite's key has 256 bits and includes "
        "all of these, and the correlation id, which a model can see, too.",
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
        "Response cache: responses of a model that was replaced",
        "After a reload, Triton keeps returning responses of a version's old files. Nerite invalidates what was "
        "computed from other files, or by an ensemble of other models.",
        {
            f"response_cache/what was before a reload#{number}": (
                ONCE.replace("shapes", "forgets").replace("10]", "3]"),
                ONCE.replace("shapes", "forgets").replace("10]", "3]").replace("[1]}]}", "[101]}]}"),
            )
            for number in (3, 7)
        },
    ),
    Difference(
        "Response cache: preserve_ordering",
        "Triton stops answering once a model with preserve_ordering had a cache hit. In Nerite a hit is answered at "
        "once, and computed responses keep their order.",
    ),
    Difference(
        "Ensembles: the order of a stream",
        "With several instances of a step behind a decoupled one, responses of a request overtake each other in "
        "Triton, so the words of a text change places. In Nerite they leave in the order of the decoupled step's "
        "responses.",
    ),
    Difference(
        "Negative trace rates and frequencies",
        "Triton takes them for numbers beyond four billion, with which nothing is ever traced. Nerite refuses them as"
        " out of range.",
        {
            f"trace_settings/{name}: minus {number}": ("200", f"400 Unable to parse '{name}', value is out of range")
            for name in ("trace_rate", "log_frequency")
            for number in ("one", "two")
        },
    ),
    Difference(
        "Global trace settings that one model cannot have",
        "They are refused, but Triton has already changed the global ones. In Nerite a refused update changes nothing.",
        {
            f"trace_settings/a rate of all that a model cannot have#{number}": (
                '200 {"trace_level": ["OFF"], "trace_rate": "0"',
                '200 {"trace_level": ["OFF"], "trace_rate": "7"',
            )
            for number in (8, 10)
        },
    ),
    Difference(
        "Spans of requests that are not sampled",
        "A `traceparent` whose sampled flag is not set leads to spans in Triton "
        "(triton-inference-server/server#8474). In Nerite it leads to none: the originator of the trace has decided "
        "not to record it.",
    ),
    Difference(
        "Trace state over gRPC",
        "Triton loses the `tracestate` of a call. Nerite propagates it, as over HTTP.",
    ),
    Difference(
        "Kinds of spans",
        "All of Triton's spans are of the kind SERVER, each of which monitoring counts as a request to a service. In "
        "Nerite only `InferRequest` is; the others are INTERNAL.",
    ),
    Difference(
        "Refused requests in traces",
        "In Triton, a request that is refused before it is queued counts for the trace rate and the trace count, "
        "leaves no trace, and prevents the trace file from being written at shutdown. Nerite does not count it.",
    ),
    Difference(
        "Tensors in traces that make the trace file unreadable",
        "Triton writes strings and eight-bit numbers unescaped, which is not always JSON, and six digits of a number."
        " In Nerite the file is JSON, and numbers have all their digits.",
    ),
    Difference(
        "HTTP pipelining",
        "Triton drops requests that are sent before the previous response. Pipelining is part of HTTP/1.1.",
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
        "Triton closes the connection without a response. Nerite sends 400 first.",
        {
            "http_routes/no HTTP at all": ("no answer", "400"),
            "http_routes/header without a colon": ("no answer", "400"),
            "http_routes/method in small letters": ("no answer", "400"),
            "infer_json/wrong content length": ("no answer", "400"),
        },
    ),
    Difference(
        "Content-Length together with Transfer-Encoding, and other codings than chunked",
        "Triton reads a body by one of the two lengths, where a proxy in front may have used the other, and treats "
        "the rest as another request (request smuggling). Nerite refuses the request, and closes the connection.",
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
        "Both are part of HTTP/1.1; Nerite ignores them. Triton closes the connection.",
        {"http_routes/chunked body with a trailer": ("no answer", '200 {"model_name": "echo"')},
    ),
    Difference(
        "A missing required input beside an optional one",
        "Triton counts the inputs and does not check their names, so that the model runs without the input.",
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
        "No inputs for a batching model that needs none",
        "Triton's Python backend takes the batch size from the first input, and fails without one. In Nerite such a "
        "request is a batch of one.",
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
        "A subset of the outputs of an ensemble",
        "Triton fails if a requested output also leads to one that was not requested. Nerite runs the steps that are "
        "needed.",
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
        "Failed requests to an ensemble",
        "Triton counts each twice. Nerite counts it once.",
        {
            "ensembles/failures are counted": (
                '200 {"model_stats": [{"name": "failing_end", "version": "1"',
                '200 {"model_stats": [{"name": "failing_end", "version": "1"',
            )
        },
    ),
    Difference(
        "Models that stay when an ensemble is unloaded with its dependents",
        "`unload_dependents` should keep models that were loaded explicitly. Triton forgets that they were, once they"
        " are part of an ensemble.",
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
        "Triton lists all inputs of the request, in the order of a hash table, and none that is missing. Nerite names"
        " one that the model does not have.",
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
        "Triton drops them. Nerite refuses them as a mistake of the client where no input is in shared memory.",
        {
            "grpc_infer/raw data for one input too many": (
                'OK {"model_name": "echo"',
                "INVALID_ARGUMENT expected 1 raw_input_contents entries for model 'echo', got 2",
            ),
        },
    ),
    Difference(
        "A change of log settings that is refused in part",
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
        "Triton only maps at multiples of 4,096 bytes. Nerite accepts any offset.",
        {
            "shared_memory/a region with an offset#2": ("400 failed to register shared memory region 'r'", "200"),
            "shared_memory/a region with an offset#3": (
                "404 Unable to find system shared memory region: 'r'",
                '200 [{"name": "r", "key": "exam_shm", "offset": 32, "byte_size": 32}]',
            ),
        },
    ),
    Difference(
        "When a request with several responses is counted",
        "Triton counts it when `execute` returns, with the time until then, whatever its outcome. Nerite counts it at"
        " its last response: the compute time lasts until that was sent. A request that ends with an error has failed"
        ' (`reason="BACKEND"`), as has one that its client cancelled (`reason="CANCELED"`). The latter '
        "holds for each request to which a model responds that it was cancelled. `execution_count` and "
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
        "Triton's Python backend leaves the `response_stats` of a decoupled model empty; Nerite fills them in as "
        "Triton's documentation describes. The time that a slow client takes counts as `compute_output`. Responses "
        "after the 256th of a request are counted with it.",
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
        "In Nerite, `memory_usage` of a model whose instances are processes is their private memory, without files "
        "and shared tensors. Triton on a machine without GPUs reports nothing.",
    ),
    Difference(
        "A response sender in a model that is not decoupled, and a request that it ends without a response",
        "Triton fails the batch, with the traceback of `send`. In Nerite the response to that request names the "
        "mistake and the remedy. That includes threads of the model, for which Triton's client waits forever.",
        {
            f"streams/{transport}sender, an end and no response": (
                f"{status}Failed to process the request(s) for model 'one_0', message: TritonModelException: Unable to",
                f"{status}Unable to send response. Non-decoupled model cannot send complete final before sending a",
            )
            for transport, status in (("", "OK ["), ("unary: ", "INTERNAL "), ("HTTP: ", "500 "))
        },
    ),
    Difference(
        "Corrupt compressed bodies",
        "Triton takes what it could decompress, even if that is nothing, for the whole body. Nerite reports that the "
        "body is corrupt, also for deflate without zlib's header.",
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
        "An Inference-Header-Content-Length that is not a number, or beyond 32 bits",
        "Triton uses the leading digits, 0 if there are none, truncated to 32 bits. The JSON is then cut, or taken "
        "for a tensor. Nerite reports that the length is wrong.",
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
        "Triton turns them into a very long time. Over HTTP it refuses them; Nerite refuses them over both.",
        {
            "parameters/gRPC: timeout negative": (
                'OK {"model_name": "request"',
                "INVALID_ARGUMENT invalid value for 'timeout', expected value >= 0.",
            )
        },
    ),
    Difference(
        "A forwarded header without a value",
        "Triton's HTTP parser turns the empty value into a blank.",
        {
            "parameters/empty header": (
                '200 {"model_name": "request"',
                '200 {"model_name": "request"',
            )
        },
    ),
    Difference(
        "Shapes whose size exceeds 64 bits",
        "Triton continues with the size truncated to 64 bits. Nerite uses the true one.",
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
        "Unload requests whose body cannot be parsed",
        "Triton unloads the model without having understood the request. Nerite reports an error, and unloads nothing.",
        {
            "repository_explicit/unload with bad JSON": ("200", "500 failed to parse the request JSON buffer"),
            "repository_fixed/unload with bad JSON": (
                "503 explicit model load / unload is not allowed",
                "500 failed to parse the request JSON buffer",
            ),
        },
    ),
    Difference(
        "A load without a configuration, after one with a configuration",
        "Triton keeps the configuration that was sent until a file changes. In Nerite, as Triton's documentation "
        "says, a load without one loads what is in the repository.",
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
        "Warm-up samples in the statistics",
        "Triton counts them as requests. Nerite does not, because no client has sent them.",
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
        "Warm-up samples of models with sequences",
        "In Triton a sample has only the inputs that it names, so that an ONNX model needs all of its controls and "
        "states there. In Nerite a sample is a sequence of one request, with the controls and states of such a "
        "request. A sample may set them, with the type and shape of the control. An iterative model runs until it is "
        "done; in Triton a load never ends if a model reschedules a sample.",
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
        "Files in a load request that are not base64",
        "Triton decodes and loads what it can.",
        {
            "repository_explicit/load with files that are no base64": (
                "400 load failed for model 'uploaded': version 1 is at UNAVAILABLE state",
                "400 load parameter 'file:1/model.py' is not base64",
            )
        },
    ),
    Difference(
        "Reasons in the index for models that could not be read",
        "Triton lists a model with a wrong configuration like one that was never loaded, and omits one without a "
        "version once a load was tried. Nerite lists the reason.",
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
        "Triton lists a model that was loaded with the header X-Amzn-SageMaker-Target-Model as an empty object.",
        {"sagemaker_models/a target#2": ('200 {"models": [{}]}', '200 {"models": [{"modelName": "hash"')},
    ),
    Difference(
        "A SageMaker model with the name of a loaded one",
        "Triton reports that it was loaded, and continues with the old one.",
        {
            "sagemaker_models/the name of a model that is there": (
                "200",
                "400 failed to load 'echo', failed to poll from model repository",
            )
        },
    ),
    Difference(
        "SageMaker archives outside of /opt/ml/models",
        "Triton tells the directory of one model from a directory of models only by a path of the form "
        "/opt/ml/models/<hash>/model. Its newer versions accept no other path. Nerite looks for config.pbtxt, "
        "wherever the archive was unpacked, so that archives for SageMaker can be tried elsewhere.",
        {"sagemaker_models/an archive that is a model": ("400 failed to register '', repository not found", "200")},
    ),
    Difference(
        "A SageMaker archive with several models and no ensemble",
        "Triton takes the one that the file system lists last. Nerite refuses it as ambiguous.",
    ),
    Difference(
        "The routes of Vertex AI",
        "Triton takes AIP_HEALTH_ROUTE and AIP_PREDICT_ROUTE for regular expressions. In Nerite they are paths.",
    ),
    Difference(
        "Invalid values of SageMaker variables",
        "With an unknown SAGEMAKER_TRITON_PING_MODE Triton starts, and always reports that it is healthy. Nerite does"
        " not start. The same holds for SAGEMAKER_TRITON_INFERENCE_TYPE, which Triton reads in its start script.",
    ),
    Difference(
        "A sequence whose request runs longer than the idle timeout",
        "Triton counts from the arrival of the last request, and ends the sequence while the model executes it. In "
        "Nerite a sequence is idle only while none of its requests waits or runs.",
        {
            "sequences/longer than a sequence may be idle#2": (
                "400 inference request for sequence 82 to model 'brief' must specify the START flag",
                '200 {"model_name": "brief"',
            )
        },
    ),
    Difference(
        "Rows that are wider than the forest of a model",
        "Triton's FIL backend does not compare `dims` with the number of features: of `dims: [204]` and a forest of 10 "
        "features it reads rows of 10 out of rows of 204, so that all answers but the first are wrong. Nerite refuses "
        "to load the model: `has dims [204], but it has 10 features`.",
    ),
    Difference(
        "A worker that dies in the middle of a sequence",
        "Triton starts another and continues the sequence, of which the new process knows nothing. Nerite refuses "
        "further requests of lost sequences until they start again, and gives the reason.",
    ),
    Difference(
        "START for a correlation id whose previous END has not run yet",
        "Triton gives the new sequence another slot, so that the model may get its requests before the END of the old"
        " one, or together with it. In Nerite the new sequence begins when the old one has ended.",
    ),
)
