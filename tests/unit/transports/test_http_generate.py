"""The generate extension: what a body means, what a response looks like, how replies end."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles import Caller, Helpers
from http_peer import Peer
from nerite.core import tensor as dtypes
from nerite.core.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NeriteError,
    Overloaded,
    QuotaExceeded,
    TooLarge,
    Unavailable,
)
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import EMPTY, InferenceResponse, ResponseHeader
from nerite.core.signature import Signature, SignatureInput
from nerite.core.tensor import TensorSpec, from_array, join_bytes
from nerite.transports.access import SenderHeaders
from nerite.transports.http import generate_form
from nerite.transports.http.generate import Generation
from nerite.transports.http.generate_form import GenerateForm
from nerite.transports.http.handler import HttpQuestion
from nerite.transports.http.head import RequestHead


def form(dims: tuple[int, ...], value: Any, batch: int = 0, **keys: Any) -> GenerateForm:
    made = GenerateForm(
        Signature("m", batch, [SignatureInput("IN", dtypes.INT32, dims)], []), SenderHeaders({"forwarded": "yes"})
    )
    made.read(orjson.dumps({"IN": value, **keys}))
    return made


@pytest.mark.parametrize(
    ("dims", "batch", "count", "shape"),
    [
        ((1,), 0, 1, (1,)),
        ((2, 3), 0, 6, (2, 3)),
        ((-1,), 0, 5, (5,)),
        ((-1,), 0, 0, (0,)),
        ((2, -1), 0, 6, (2, 3)),
        ((-1, 2), 0, 6, (3, 2)),
        ((-1, -1), 0, 6, (1, 6)),
        ((1,), 8, 3, (3, 1)),
        ((-1,), 8, 3, (1, 3)),
        ((2,), 8, 6, (3, 2)),
    ],
)
def test_shapes(dims: tuple[int, ...], batch: int, count: int, shape: tuple[int, ...]) -> None:
    made = form(dims, list(range(count)), batch)
    header = made.header("m", "")
    assert header.inputs == (TensorSpec("IN", dtypes.INT32, shape),)
    assert bytes(made.data[0]) == np.arange(count, dtype=np.int32).tobytes()
    assert header.parameters == {"forwarded": "yes"}


@given(st.lists(st.integers(-1, 4), max_size=4), st.integers(0, 64))
def test_a_shape_holds_all_elements_or_is_refused(dims: list[int], count: int) -> None:
    try:
        made = form(tuple(dims), [0] * count)
    except InvalidArgument as refusal:
        assert refusal.message == "The schema can not convert input 'IN' to tensor with proper shape"
        return
    shape = made.header("m", "").inputs[0].shape
    assert np.prod(shape, dtype=int) == count
    assert all(have == want or want == -1 for have, want in zip(shape, dims, strict=True))


def test_everything_that_is_no_input_is_a_parameter() -> None:
    made = form((1,), 3, id="me", top_k=1, parameters={"stop": "x", "seed": 2}, sequence_id=7)
    header = made.header("m", "2")
    assert header.parameters == {"id": "me", "top_k": 1, "stop": "x", "seed": 2, "sequence_id": 7, "forwarded": "yes"}
    assert (made.id, header.sequence_id, header.model_version) == ("me", 0, "2")


@pytest.mark.parametrize(
    ("keys", "error", "told"),
    [
        ({"id": 7}, Internal, "Unable to parse 'id': attempt to access JSON non-string as string"),
        ({"parameters": {"IN": 1}}, InvalidArgument, "Converting keyword: 'parameters': [request id: <id_unknown>] "),
        ({"parameters": 1}, Internal, "Expected JSON object for keyword: 'parameters'"),
        ({"other": None}, InvalidArgument, "parameter 'other' has invalid type."),
    ],
)
def test_mistakes(keys: dict[str, Any], error: type[NeriteError], told: str) -> None:
    with pytest.raises(error) as refusal:
        form((1,), 1, **keys)
    assert refusal.value.message.startswith(told)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"id":"\xff","IN":1}', "member 'id' is not valid UTF-8 at character 0"),
        (b'{"stop":"\xff","IN":1}', "member 'stop' is not valid UTF-8 at character 0"),
        (b'{"parameters":{"stop":"\xff"},"IN":1}', "member 'parameters.stop' is not valid UTF-8 at character 0"),
        (b'{"id":"%b","IN":1}' % (b"x" * 2_000), "'id' is 2000 characters long"),
        (b'{"%b":1,"IN":1}' % (b"x" * 2_000), "the name of a parameter is 2000 characters long"),
    ],
)
def test_text_that_is_none_is_refused(body: bytes, told: str) -> None:
    made = GenerateForm(Signature("m", 0, [SignatureInput("IN", dtypes.INT32, (1,))], []), SenderHeaders({}))
    with pytest.raises(InvalidArgument) as refused:
        made.read(body)
    assert refused.value.message.startswith(told)


@pytest.mark.parametrize(
    "body",
    [
        b'{"id":"me","IN":1,"IN":2}',
        b'{"IN":1,"id":"me","stop":"x","IN":1}',
        b'{"IN":1,"id":"me","parameters":{"IN":1}}',
        b'{"IN":1,"id":"me","IN":NaN}',
    ],
)
def test_an_input_that_is_there_twice(body: bytes) -> None:
    made = GenerateForm(
        Signature("m", 0, [SignatureInput("IN", dtypes.FP32, (1,)), SignatureInput("OTHER", dtypes.FP32, (1,))], []),
        SenderHeaders({}),
    )
    with pytest.raises(InvalidArgument) as refused:
        made.read(body)
    assert refused.value.message.endswith("[request id: me] input 'IN' already exists in request")


@pytest.mark.parametrize(
    "body", [b'{"IN":1,"stop":"IN","x":1,"x":2}', b'{"IN":1,"stop":"\\"IN\\":"}', b'{"IN":1e5,"stop":"IN"}']
)
def test_an_input_whose_name_is_a_text_too(body: bytes) -> None:
    made = GenerateForm(Signature("m", 0, [SignatureInput("IN", dtypes.FP32, (1,))], []), SenderHeaders({}))
    made.read(body)
    assert len(made.data) == 1


@pytest.mark.parametrize("body", [b'{"IN":"a\xff"}', b'{"parameters":{"IN":"a\xff"}}'])
def test_inputs_may_be_any_bytes(body: bytes) -> None:
    made = GenerateForm(Signature("m", 0, [SignatureInput("IN", dtypes.BYTES, (1,))], []), SenderHeaders({}))
    made.read(body)
    assert bytes(made.data[0]) == join_bytes([b"a\xff"])


def test_an_input_named_as_the_keyword() -> None:
    made = GenerateForm(Signature("m", 0, [SignatureInput("parameters", dtypes.INT32, (1,))], []), SenderHeaders({}))
    with pytest.raises(InvalidArgument, match="Keyword 'parameters' for nested schema also given as input tensor name"):
        made.read(b'{"parameters": 1}')


def response(parameters: dict[str, Any] | None = None, **arrays: Any) -> InferenceResponse:
    tensors = [from_array(name, np.asarray(value)) for name, value in arrays.items()]
    header = ResponseHeader("m", "1", [spec for spec, _ in tensors], parameters)
    return InferenceResponse(header, [data for _, data in tensors])


def test_a_response_is_flat_and_sorted() -> None:
    asked = InferenceRequest(RequestHeader("m", "", []), [], Caller(), 0, "me")
    text = generate_form.write_generate(
        asked, response({"why": "done"}, many=np.array([[1, 2]]), b=np.array([b"x"], object))
    )
    assert text == b'{"b":"x","id":"me","many":[1,2],"model_name":"m","model_version":"1","why":"done"}'


BYTES = Signature(
    "m", 0, [SignatureInput("IN", dtypes.BYTES, (-1,)), SignatureInput("HALF", dtypes.BF16, (1,), optional=True)], []
)


@pytest.mark.parametrize(
    ("value", "elements"),
    [({"b64": "/wA="}, [b"\xff\0"]), (["a", {"b64": "/wA="}], [b"a", b"\xff\0"]), ([{"b64": ""}], [b""])],
)
def test_base64(value: Any, elements: list[bytes]) -> None:
    made = GenerateForm(BYTES, SenderHeaders({}))
    made.read(orjson.dumps({"IN": value, "parameters": {"base64_output": True, "top_k": 1}}))
    header = made.header("m", "")
    assert made.data == [join_bytes(elements)]
    assert (header.parameters, header.base64_by_default) == ({"top_k": 1}, True)
    text = generate_form.write_generate(
        InferenceRequest(header, [], Caller(), 0), response(OUT=np.array(elements, object))
    )
    again = GenerateForm(BYTES, SenderHeaders({}))
    again.read(orjson.dumps({"IN": orjson.loads(text)["OUT"]}))
    assert again.data == made.data, "what one gets can be sent back"


def test_base64_output_is_a_boolean() -> None:
    with pytest.raises(Internal, match="Unable to parse 'base64_output': attempt to access JSON non-boolean as bool"):
        form((1,), 1, base64_output="yes")


def test_an_input_may_be_called_base64_output() -> None:
    made = GenerateForm(Signature("m", 0, [SignatureInput("base64_output", dtypes.INT32, (1,))], []), SenderHeaders({}))
    made.read(b'{"base64_output": 7}')
    assert [spec.name for spec in made.header("m", "").inputs] == ["base64_output"]


def test_half_precision_where_it_is_allowed() -> None:
    made = GenerateForm(BYTES, SenderHeaders({}), half=True)
    made.read(b'{"IN": "a", "HALF": -1.5}')
    assert bytes(made.data[1]) == b"\xc0\xbf"
    asked = InferenceRequest(made.header("m", ""), made.data, Caller(), 0)
    text = generate_form.write_generate(asked, response(OUT=np.array([1.5, 0.1], np.float16)), half=True)
    assert text == b'{"OUT":[1.5,0.1],"model_name":"m","model_version":"1"}'


class Handler:
    """Gives each request to a ``Generation``."""

    def __init__(self) -> None:
        self.asked: list[InferenceRequest] = []
        self.paused: list[bool] = []
        self.helpers = Helpers()

    def begin(self, head: RequestHead) -> None:
        return None

    def receive_buffer(self, head: RequestHead) -> None:
        return None

    def handle(self, connection: Any, head: RequestHead, body: memoryview) -> HttpQuestion | None:
        server: Any = self
        sink = Generation(connection, server, events="stream" in head.path)
        request = connection.request = InferenceRequest(RequestHeader("m", "", []), [], sink, 0)
        request.on_pause = lambda request, paused: self.paused.append(paused)
        self.asked.append(request)
        return None

    def handle_again(self, connection: Any, meaning: Any, data: bytearray) -> None:
        raise AssertionError

    def answer(self, connection: Any, request: InferenceRequest, response: InferenceResponse) -> None:
        raise AssertionError


@pytest.fixture
def peer() -> Peer:
    return Peer(Handler())


def ask(peer: Peer, path: str = "/stream", version: str = "1.1", headers: str = "") -> InferenceRequest:
    peer.send(f"POST {path} HTTP/{version}\r\n{headers}Content-Length: 0\r\n\r\n".encode())
    handler: Any = peer.handler
    asked: InferenceRequest = handler.asked[-1]
    return asked


def test_events_leave_as_they_come(peer: Peer) -> None:
    asked = ask(peer)
    assert peer.transport.taken() == b""
    asked.respond(response(a=1), False)
    head, _, chunk = peer.transport.taken().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK") and b"text/event-stream; charset=utf-8" in head
    event = b'data: {"a":1,"model_name":"m","model_version":"1"}\n\n'
    assert chunk == b"%x\r\n%b\r\n" % (len(event), event)
    asked.respond(EMPTY)
    assert peer.transport.taken() == b"0\r\n\r\n"
    ask(peer).respond(EMPTY)
    assert peer.transport.taken().endswith(b"\r\n\r\n0\r\n\r\n"), "the connection goes on"


def test_http_1_0_has_no_chunks(peer: Peer) -> None:
    asked = ask(peer, version="1.0")
    asked.respond(response(a=1))
    head, _, body = peer.transport.taken().partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert body == b'data: {"a":1,"model_name":"m","model_version":"1"}\n\n'
    assert peer.transport.closed


def test_the_last_reply_of_a_connection_says_so(peer: Peer) -> None:
    asked = ask(peer, headers="Connection: close\r\n")
    asked.respond(response(a=1))
    assert b"\r\nConnection: close\r\n" in peer.transport.taken()
    assert peer.transport.closed


@pytest.mark.parametrize("count", [0, 1, 2])
def test_generate_is_for_one_response(peer: Peer, count: int) -> None:
    asked = ask(peer, "/generate")
    for _ in range(count):
        asked.respond(response(a=1), False)
    assert peer.transport.taken() == b""
    asked.respond(EMPTY)
    assert (b"exactly 1 response" in peer.transport.taken()) == (count != 1)


def test_an_output_that_json_cannot_show(peer: Peer) -> None:
    asked = ask(peer)
    asked.respond(response(a=np.array([1.5], np.float16)))
    said = peer.transport.taken()
    assert said.startswith(b"HTTP/1.1 400")
    assert b'data: {"error":"sending FP16 data via JSON is not supported.' in said


def test_a_slow_reader_makes_the_model_pause(peer: Peer) -> None:
    asked = ask(peer)
    handler: Any = peer.handler
    asked.respond(response(a=1), False)
    peer.connection.pause_writing()
    asked.respond(response(a=2), False)
    peer.connection.resume_writing()
    assert handler.paused == [True, True, False]


LARGE = np.arange(70_000, dtype=np.int16)
LARGE_TEXT = b'{"a":%b,"model_name":"m","model_version":"1"}' % orjson.dumps(LARGE.tolist())


def test_a_large_response_is_written_elsewhere_and_others_wait_behind_it(peer: Peer) -> None:
    asked = ask(peer)
    handler: Any = peer.handler
    asked.respond(response(a=LARGE), False)
    asked.respond(response(a=1), False)
    asked.respond(response(a=LARGE), False)
    asked.respond(response(a=2), True)
    assert peer.transport.taken() == b""
    assert handler.paused == [True, True, True]
    handler.helpers.answer_next()
    first = peer.transport.taken()
    assert first.count(b"data: ") == 2
    assert b"data: " + LARGE_TEXT + b"\n\n" in first and first.index(LARGE_TEXT) < first.index(b'{"a":1,')
    handler.helpers.answer_next()
    last = peer.transport.taken()
    assert last.index(LARGE_TEXT) < last.index(b'{"a":2,') and last.endswith(b"0\r\n\r\n")
    ask(peer).respond(EMPTY)
    assert peer.transport.taken(), "the connection goes on"


def test_the_model_goes_on_when_a_large_response_was_sent(peer: Peer) -> None:
    asked = ask(peer)
    handler: Any = peer.handler
    asked.respond(response(a=LARGE), False)
    handler.helpers.answer_next()
    assert handler.paused == [True, False]
    asked.respond(EMPTY)
    assert peer.transport.taken().endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_generate_with_one_large_response(peer: Peer, version: str) -> None:
    asked = ask(peer, "/generate", version)
    handler: Any = peer.handler
    asked.respond(response(a=LARGE))
    handler.helpers.answer_next()
    body = peer.transport.taken().partition(b"\r\n\r\n")[2]
    assert body == (LARGE_TEXT if version == "1.0" else b"%x\r\n%b\r\n0\r\n\r\n" % (len(LARGE_TEXT), LARGE_TEXT))


@pytest.mark.parametrize("path", ["/generate", "/stream"])
def test_a_large_response_that_could_not_be_written(peer: Peer, path: str) -> None:
    asked = ask(peer, path)
    handler: Any = peer.handler
    asked.respond(response(a=LARGE))
    handler.helpers.answer_next(Internal("it is gone"))
    said = peer.transport.taken()
    assert said.startswith(b"HTTP/1.1 400") and b'{"error":"it is gone"}' in said


def test_nobody_waits_for_a_large_response_any_more(peer: Peer) -> None:
    asked = ask(peer)
    handler: Any = peer.handler
    asked.respond(response(a=LARGE), False)
    peer.connection.connection_lost(None)
    handler.helpers.answer_next()
    assert peer.transport.taken() == b""


def test_a_client_that_goes_cancels(peer: Peer) -> None:
    asked = ask(peer)
    asked.respond(response(a=1), False)
    peer.transport.taken()
    peer.connection.connection_lost(None)
    assert asked.cancelled
    asked.respond(response(a=2))
    assert peer.transport.taken() == b""


@pytest.mark.parametrize("path", ["/generate", "/stream"])
@pytest.mark.parametrize(
    ("error", "status", "again"),
    [
        (Unavailable("full", 3), b"400", b""),
        (Internal("broken"), b"400", b""),
        (QuotaExceeded("enough", 3), b"429", b"Retry-After: 3\r\n"),
        (Overloaded("full", 2), b"503", b"Retry-After: 2\r\n"),
        (TooLarge("long"), b"413", b""),
        (DeadlineExceeded("late"), b"503", b""),
    ],
)
def test_the_status_of_an_error(peer: Peer, path: str, error: NeriteError, status: bytes, again: bytes) -> None:
    """Triton has one for whatever goes wrong with a model; what it does not know keeps its own."""
    ask(peer, path).respond(InferenceResponse.failed(error))
    said = peer.transport.taken()
    assert said.startswith(b"HTTP/1.1 %b " % status)
    assert (again in said, b"Retry-After" in said) == (True, bool(again))
