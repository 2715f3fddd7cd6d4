"""Where Nerite answers otherwise than Triton, on purpose: what, and why.

The exam allows exactly these. Each is tied to the exchanges that show it, with how both answers begin (see ``brief``),
so that an entry cannot outlive its reason. ``docs/differences.md`` is made from this list by
``tools/build_differences.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NEVER = "-"
"""Triton's answer to what it is not asked, because it would end, hang or take the connection with it."""


@dataclass(frozen=True)
class Difference:
    """One thing that is otherwise."""

    what: str
    why: str
    answers: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """By exchange, how Triton's answer begins and how ours does. Empty where no exchange can show it.

    ``topic/name#2`` is the second answer of an exchange. ``topic/name`` is its first, and what comes after it is not
    compared: it follows from the difference.
    """


PAIR_AND_VERSIONS = ", ".join(
    (
        '{"name": "pair", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}',
        '{"name": "versions", "version": "1", "state": "READY"}',
        '{"name": "versions", "version": "3", "state": "UNAVAILABLE", "reason": "unloaded"}',
        '{"name": "versions", "version": "4", "state": "UNAVAILABLE", "reason": "unloaded"}',
    )
)
CONFIGURATION_OF_ECHO = (
    '"name": "echo", "platform": "", "backend": "python", "runtime": "", "version_policy": {"latest": '
    '{"num_versions": 1}}'
)
READY_OF_BROKEN = ", ".join(
    f'{{"name": "{model}", "version": "1", "state": "READY"}}' for model in ("fine", "noexecute", "specific")
)

DIFFERENCES = (
    # ---- Mistakes of Triton that are not repeated ----
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
        },
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
            "infer_json/wrong content length": ("no answer", "400"),
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
            )
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
        "Metadata that would be forwarded under a reserved name",
        "Names that begin with triton_ are reserved. Triton refuses them in HTTP headers only, Nerite in gRPC metadata "
        "too.",
        {
            "parameters/gRPC: reserved metadata": (
                'OK {"model_name": "request"',
                "INVALID_ARGUMENT Header 'triton_thing' is reserved for Triton usage and cannot be forwarded.",
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
        "Why a model could not be read, in the index",
        "Triton lists a model whose configuration is wrong like one that nobody tried to load, and one without a "
        "version not at all once its load was tried. Nerite says what is wrong with it.",
        {
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
    # ---- Of a later release ----
    Difference(
        "A configuration or files that come with a load",
        "Not offered yet: such a load is refused as a whole, and nothing changes. The model's files in the repository "
        "are what is loaded.",
        {
            "repository_explicit/load with a configuration": ("200", "501 load parameter 'config' is not offered"),
            "repository_explicit/load without it again#2": (
                f'200 {{{CONFIGURATION_OF_ECHO}, "max_batch_size": 3,',
                f'200 {{{CONFIGURATION_OF_ECHO}, "max_batch_size": 8,',
            ),
            "repository_explicit/load with a bad configuration": (
                "500 failed to load 'echo', failed to poll from model repository",
                "501 load parameter 'config' is not offered",
            ),
            "repository_explicit/load with files": ("200", "501 load parameter 'config' is not offered"),
            "repository_explicit/load with files and no configuration": (
                "500 failed to load 'echo', failed to poll from model repository",
                "501 load parameter 'file:1/model.py' is not offered",
            ),
            "repository_explicit/load with files that are no base64": (
                "400 load failed for model 'uploaded': version 1 is at UNAVAILABLE state",
                "501 load parameter 'config' is not offered",
            ),
            "repository_explicit/load with a file outside": (
                "500 failed to load 'uploaded', failed to poll from model repository",
                "501 load parameter 'config' is not offered",
            ),
            "repository_explicit/gRPC: load with files": ("OK", "UNIMPLEMENTED load parameter '"),
        },
    ),
    Difference(
        "Decoupled models",
        "Not offered yet: their load is refused, with the reason in the index and in the log.",
        {
            "broken_start/index of what is ready": (
                f'200 [{READY_OF_BROKEN}, {{"name": "stream", "version": "1", "state": "READY"}}]',
                f"200 [{READY_OF_BROKEN}]",
            ),
            "broken_start/decoupled over infer": (
                "501 HTTP end point doesn't support models with decoupled transaction policy",
                "404 Request for unknown model: 'stream' has no available versions",
            ),
            "broken_start/decoupled over infer, and a wrong input": (
                "501 HTTP end point doesn't support models with decoupled transaction policy",
                "404 Request for unknown model: 'stream' has no available versions",
            ),
            "broken_start/gRPC: decoupled over infer": (
                "UNIMPLEMENTED ModelInfer RPC doesn't support models with decoupled transaction policy",
                "NOT_FOUND Request for unknown model: 'stream' has no available versions",
            ),
        },
    ),
    Difference(
        "Metrics of pinned memory",
        "Nerite keeps no pool of pinned memory, so that there is nothing to measure.",
        {
            "counting/metrics of the machine#2": (
                "metrics: nv_pinned_memory_pool_total_bytes, nv_pinned_memory_pool_used_bytes",
                "metrics: none",
            )
        },
    ),
    # ---- Left open by the protocols ----
    Difference(
        "JSON keys that stand twice",
        "JSON does not say what they mean. Triton takes the first, Nerite the last, as most programs do.",
        {
            "infer_json/keys twice": (
                '200 {"id": "a"',
                '200 {"id": "b"',
            )
        },
    ),
    Difference(
        "Methods that HTTP does not know",
        "Triton finds that the path does not take them. Nerite does not read further than the method, says so, and "
        "closes the connection.",
        {"http_routes/method of no meaning": ("405 Method Not Allowed", "400 Bad Request: Invalid method")},
    ),
    Difference(
        "The content type of the error about a string that is cut off",
        "Triton finds it when the model is to run, and calls it text/plain as all errors of models. Nerite finds it "
        "before, as all other sizes that are wrong, and calls it JSON, which it is.",
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
    # ---- Wording ----
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
    # ---- Of a newer Triton ----
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


def by_exchange() -> dict[str, tuple[str, str]]:
    """Every allowed pair of answers by its exchange. Raises ``ValueError`` where one exchange is listed twice."""
    found: dict[str, tuple[str, str]] = {}
    for difference in DIFFERENCES:
        for exchange, pair in difference.answers.items():
            if exchange in found:
                raise ValueError(f"{exchange} is in two entries")
            found[exchange] = pair
    return found


def brief(answer: Mapping[str, Any]) -> str:
    """An answer on one line, the way the list above has it: status, then the error's text or the body.

    Of metrics the names of the families.
    """
    if "broken" in answer:
        return f"no answer ({answer['broken']})"
    if "code" in answer:
        body = answer.get("details", answer.get("message"))
        return f"{answer['code']} {body if isinstance(body, str) else json.dumps(body)}".strip()
    if "families" in answer:
        return f"metrics: {', '.join(sorted(answer['families'])) or 'none'}"
    body = answer.get("json", answer.get("text"))
    if isinstance(body, dict) and "error" in body:
        body = body["error"]
    return f"{answer.get('status', '')} {body if isinstance(body, str) else json.dumps(body)}".strip()


def page() -> str:
    """The text of ``docs/differences.md``."""
    lines = [INTRODUCTION]
    for difference in DIFFERENCES:
        lines += [f"## {difference.what}", "", difference.why, ""]
        if difference.answers:
            lines += ["| Exchange | Triton | Nerite |", "|---|---|---|"]
            for exchange, (theirs, ours) in difference.answers.items():
                lines.append(f"| {cell(exchange)} | {cell(theirs)} | {cell(ours)} |")
            lines.append("")
    return "\n".join(lines)


def cell(text: str) -> str:
    """Text as a cell of a table."""
    return "none" if text == NEVER else text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


INTRODUCTION = """\
# Where Nerite differs from Triton

Made by `tools/build_differences.py` from `tests/conformance/differences.py`. Do not edit.

Both servers are asked the same questions by `tests/conformance/test_exam.py`, and have to give the same answers:
status, headers, body, gRPC code and message. This page lists what is otherwise, and the exam fails when the list is
incomplete, and when an entry is no longer true. Triton is version 2.51.0. The texts are how an answer begins.

One rule holds everywhere: an error may go on after Triton's text, with what to do about it.
"""
