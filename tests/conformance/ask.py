"""Plays the steps of an exchange against one server and returns the answers in a form that can be compared.

An answer is a plain dict. What is in it by chance (times, the place of the models on disk) is replaced by a mark,
and nothing else is: see ``settled``.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, HTTPResponse
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from conformance.exchange import Change, Eventually, Grpc, Http, Raw, Scrape, Session, Step, Stream, Together
from conformance.servers import Server
from nerite.wire import schema
from serving import OneReader

Answer = dict[str, Any]

SECONDS = 60.0
"""How long any answer may take, and how long to ask again for the one that an exchange waits for."""
COUNTED = ("nv_inference_", "nv_cache_num_")
"""How the names of metrics begin that count what was asked."""
HEADERS_BY_CHANCE = {"date", "server", "content-length"}
"""Not compared. That the length of the body is right is checked by reading it."""
VOLATILE = {"ns", "last_inference", "memory_usage"}
"""JSON keys whose values are times, or sizes of processes."""


def ask(server: Server, steps: Sequence[Step]) -> list[Answer]:
    """Play ``steps`` in order; one answer for each request."""
    answers: list[Answer] = []
    for step in steps:
        answers += play(server, step)
    return [settled(answer, server) for answer in answers]


def play(server: Server, step: Step) -> list[Answer]:
    match step:
        case Http():
            return over_http(server.port_of(step), [(step.encode(), [step.method])])
        case Session():
            port = server.port_of(step.requests[0])
            return over_http(port, [(each.encode(), [each.method]) for each in step.requests])
        case Raw():
            return over_http(server.http, [(step.data, ["GET"] * step.answers)])
        case Grpc():
            return [over_grpc(server.grpc, step)]
        case Stream():
            return [over_stream(server.grpc, step)]
        case Scrape():
            return [scraped(server.metrics, step.prefix)]
        case Together():
            return together(server, step)
        case Eventually():
            return eventually(server, step)
        case Change():
            step.what(server.models)
            return []


def together(server: Server, step: Together) -> list[Answer]:
    with ThreadPoolExecutor(len(step.steps)) as threads:
        running = []
        for each in step.steps:
            running.append(threads.submit(play, server, each))
            time.sleep(step.gap)
        return [answer for each in running for answer in each.result()]


def eventually(server: Server, step: Eventually) -> list[Answer]:
    deadline = time.monotonic() + SECONDS
    while True:
        (answer,) = play(server, step.step)
        # An answer of another shape than expected is no reason to stop asking.
        with contextlib.suppress(LookupError, TypeError):
            if step.until(answer):
                return [answer]
        if time.monotonic() > deadline:
            return [answer]
        time.sleep(0.05)


# ---- HTTP ----


def over_http(port: int, exchanges: Sequence[tuple[bytes, Sequence[str]]]) -> list[Answer]:
    """Send bytes on a new connection and read an answer for each of the methods, again and again."""
    answers: list[Answer] = []
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        reader = OneReader(connection)
        for data, methods in exchanges:
            connection.sendall(data)
            for method in methods:
                response = HTTPResponse(reader, method=method)  # type: ignore[arg-type]  # needs only makefile
                try:
                    response.begin()
                    body = response.read()
                except (HTTPException, ConnectionError, TimeoutError) as error:
                    return [*answers, {"broken": type(error).__name__}]
                answers.append(http_answer(response, body))
    return answers


def http_answer(response: HTTPResponse, body: bytes) -> Answer:
    headers = {name.lower(): value for name, value in response.getheaders()}
    answer: Answer = {"status": response.status}
    answer["headers"] = {name: headers[name] for name in sorted(headers.keys() - HEADERS_BY_CHANCE)}
    encoding = headers.get("content-encoding")
    if encoding == "gzip":
        body = gzip.decompress(body)
    elif encoding == "deflate":
        body = zlib.decompress(body)
    _, _, size = headers.get("content-type", "").partition("json-header-size=")
    length = int(headers.get("inference-header-content-length", size or len(body)))
    head, tail = body[:length], body[length:]
    try:
        answer["json"] = json.loads(head)
    except ValueError:
        answer["text"] = head.decode("latin-1")
    if tail:
        answer["tail"] = tail.hex(" ", -4)
    return answer


def scraped(port: int, prefix: str) -> Answer:
    """The families, each with its type and, by labels, the values that are counts of something that was asked."""
    (answer,) = over_http(port, [(Http("GET", "/metrics").encode(), ["GET"])])
    families = {}
    for family in text_string_to_metric_families(answer["text"]):
        if family.name.startswith(prefix):
            counted = family.name.startswith(COUNTED) and not family.name.endswith("_us")
            values = {labelled(sample): sample.value if counted else "<value>" for sample in family.samples}
            families[family.name] = {"type": family.type, "help": family.documentation, "values": values}
    return {"headers": answer["headers"], "families": families}


def labelled(sample: Sample) -> str:
    """A sample's name and labels, in one order."""
    return " ".join((sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))))


# ---- gRPC ----


def over_grpc(port: int, step: Grpc) -> Answer:
    path = step.call if step.call.startswith("/") else f"/inference.GRPCInferenceService/{step.call}"
    compression = grpc.Compression.Gzip if step.compressed else grpc.Compression.NoCompression
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(path)
        data = step.message.SerializeToString() if isinstance(step.message, Message) else step.message
        try:
            reply = call(data, timeout=SECONDS, metadata=step.metadata, compression=compression)
        except grpc.RpcError as error:
            return grpc_failure(error)
    return {"code": "OK", "message": plain(schema.methods()[path].response.FromString(reply))}


def over_stream(port: int, step: Stream) -> Answer:
    """All responses, and how the stream ended."""
    path = "/inference.GRPCInferenceService/ModelStreamInfer"

    def requests() -> Iterator[bytes]:
        for number, message in enumerate(step.messages):
            time.sleep(step.gap if number else 0)
            yield message.SerializeToString()

    answer: Answer = {"responses": [], "code": "OK"}
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(path)(requests(), timeout=SECONDS, metadata=step.metadata)
        try:
            for reply in call:
                answer["responses"].append(plain(schema.methods()[path].response.FromString(reply)))
        except grpc.RpcError as error:
            answer |= grpc_failure(error)
    return answer


def grpc_failure(error: grpc.RpcError) -> Answer:
    return {"code": error.code().name, "details": error.details()}


def plain(message: Message) -> Any:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


# ---- What is there by chance ----


def settled(value: Any, server: Server) -> Any:
    """Return ``value`` with a mark in place of each time, the server's version and the paths that it was given."""
    if isinstance(value, dict) and "extensions" in value:
        return {**value, "version": "<version>"}
    if isinstance(value, dict):
        return {
            settled(key, server): f"<{key}>" if key in VOLATILE else settled(item, server)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [settled(item, server) for item in value]
    if isinstance(value, str):
        for path in (server.models, server.second, server.backends):
            value = value.replace(str(path), f"<{path.name}>")
    return value
