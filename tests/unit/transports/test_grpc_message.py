"""MessageReader: read at once or aside, unpacked up to a limit, and counted."""

from __future__ import annotations

import gzip
from typing import Any

import numpy as np
import pytest

from doubles import FakeAside, Incident
from nerite.core.errors import Exhausted, Internal, InvalidArgument, NeriteError
from nerite.transports.access import SenderHeaders
from nerite.transports.grpc.infer_request import InferReader
from nerite.transports.grpc.messages import MAX_QUESTION, MessageReader, MessageTooLarge, OpenedMessage
from nerite.transports.limits import ByteReservation, TransportLimits
from nerite.wire.grpc_service import ModelInferRequest

MB = 2**20


class Bench:
    def __init__(self, encoding: str = "identity", limit: int = 8 * MB, max_bytes: int = 0) -> None:
        self.aside = FakeAside()
        self.bounds = TransportLimits(max_bytes=max_bytes, aside=self.aside)
        self.messages = MessageReader(encoding, limit, self.bounds)
        self.reader = InferReader(SenderHeaders({}))

    def read(self, message: Any) -> Any:
        return self.messages.read(framed(message), self.reader)

    def read_aside(self, message: Any) -> OpenedMessage:
        assert self.read(message) is None
        found: list[OpenedMessage] = []
        self.messages.read_aside(framed(message), self.reader, found.append)
        assert found == []
        self.aside.do()
        return found[0]

    def refused_aside(self, message: Any) -> tuple[type, str]:
        opened = self.read_aside(message)
        assert isinstance(opened.content, NeriteError)
        return type(opened.content), opened.content.message


def framed(message: Any) -> memoryview:
    raw = message if isinstance(message, bytes) else message.SerializeToString()
    return memoryview(bytearray(bytes((raw.startswith(b"\x1f\x8b"),)) + len(raw).to_bytes(4) + raw))


def typed(values: Any, datatype: str = "INT64", field: str = "int64_contents") -> Any:
    tensor = {"name": "IN", "datatype": datatype, "shape": [len(values)], "contents": {field: values}}
    return ModelInferRequest(model_name="m", id="seven", inputs=[tensor])


def packed(message: Any) -> bytes:
    return gzip.compress(message.SerializeToString())


def test_a_small_message_is_read_at_once() -> None:
    for encoding, message in (("identity", typed([1, 2])), ("gzip", typed([1, 2])), ("gzip", packed(typed([1, 2])))):
        header, request_id, (data,) = Bench(encoding).read(message)
        assert (header.model_name, request_id, bytes(data)) == ("m", "seven", np.array([1, 2]).tobytes())


def test_large_raw_contents_are_read_at_once() -> None:
    tensor = {"name": "IN", "datatype": "UINT8", "shape": [5 * MB]}
    message = ModelInferRequest(inputs=[tensor], raw_input_contents=[bytes(5 * MB)])
    assert len(Bench().read(message)[2][0]) == 5 * MB


def test_large_typed_contents_are_read_aside() -> None:
    bench = Bench()
    values = np.arange(100_000)
    opened = bench.read_aside(typed(values))
    assert not isinstance(opened.content, NeriteError)
    assert bytes(opened.content[2][0]) == values.tobytes()
    assert bench.bounds.bytes.used == opened.share.size == 800_000
    opened.share.give_back()
    assert bench.bounds.bytes.used == 0


def test_what_unpacks_to_much_is_read_aside() -> None:
    bench = Bench("gzip")
    message = typed(np.zeros(500_000, np.int64))
    opened = bench.read_aside(packed(message))
    assert not isinstance(opened.content, NeriteError)
    assert len(opened.content[2][0]) == 4_000_000
    assert len(opened.message) == message.ByteSize()
    assert opened.share.size == message.ByteSize() + 4_000_000


def test_a_bomb_is_refused_with_the_flag() -> None:
    bench = Bench("gzip", limit=MB)
    text = "Received message larger than max (1048576) after decompression. Use --grpc-max-message-size to increase "
    assert bench.refused_aside(gzip.compress(bytes(100 * MB))) == (MessageTooLarge, text + "the limit.")
    assert bench.bounds.refused["message_size"] == 1
    assert bench.bounds.bytes.used <= MB


def test_tensors_that_are_larger_than_their_message_are_bounded_too() -> None:
    bench = Bench(limit=4_000_000)
    assert bench.refused_aside(typed(np.zeros(500_001, np.int64)))[0] is MessageTooLarge
    assert bench.bounds.refused["message_size"] == 1


def test_there_may_be_no_room_for_what_a_message_unpacks_to() -> None:
    bench = Bench("gzip", max_bytes=2 * MB)
    kind, text = bench.refused_aside(packed(typed(np.zeros(3 * MB, np.int64))))
    assert kind is Exhausted
    assert "--max-bytes-in-flight" in text
    assert bench.bounds.bytes.refused == 1


def test_too_many_fields_are_counted() -> None:
    bench = Bench()
    for message in (b"\x08\x00" * 20_000, b"\x3a\x00" * 2_000, b"\x22\x00" * 20_000):
        with pytest.raises(InvalidArgument, match="that are allowed"):
            bench.read(message)
    with pytest.raises(InvalidArgument, match="'parameters' has 2000 elements, more than the 1024 that are allowed"):
        bench.read(ModelInferRequest(parameters={str(number): {"bool_param": True} for number in range(2000)}))
    with pytest.raises(InvalidArgument, match="'shape' has 1025 elements, more than the 1024 that are allowed"):
        bench.read(ModelInferRequest(inputs=[{"shape": [1] * 1025, "contents": {}}]))
    assert bench.bounds.refused["fields"] == 5
    assert issubclass(bench.refused_aside(ModelInferRequest(inputs=[{"shape": [1] * 100_000}]))[0], InvalidArgument)
    assert bench.bounds.refused["fields"] == 6


def test_broken_messages() -> None:
    assert Bench("gzip").refused_aside(gzip.compress(bytes(MB)))[:1] == (Internal,)
    whole = packed(typed(np.random.default_rng(0).integers(0, 2**60, 100_000)))
    kind, text = Bench("gzip").refused_aside(whole[:-10])
    assert (kind, text) == (Internal, "failed to decompress the message: it is incomplete")
    with pytest.raises(Internal, match=r"^Unable to parse request$"):
        Bench().read(b"\x0a\x05")
    with pytest.raises(Internal, match=r"^received a compressed message without grpc-encoding$"):
        Bench().read(packed(typed([1])))
    with pytest.raises(Internal, match=r"^failed to decompress the message: "):
        Bench("gzip").read(b"\x1f\x8bnothing")


def test_a_mistake_of_ours_in_a_thread_is_an_answer() -> None:
    bench = Bench()
    found: list[OpenedMessage] = []
    reader: Any = None
    bench.messages.read_aside(framed(b""), reader, found.append)
    bench.aside.do()
    said = found[0].content
    assert isinstance(said, Internal)
    assert said.message == Incident()


def test_the_beginning_of_what_is_wrong() -> None:
    assert bytes(Bench().messages.beginning(framed(b"\x0a\x05"))) == b"\x0a\x05"
    assert bytes(Bench("gzip").messages.beginning(framed(gzip.compress(b"\x0a\x05")))) == b"\x0a\x05"
    assert bytes(Bench("gzip").messages.beginning(framed(gzip.compress(bytes(MB))))) == b""
    assert bytes(Bench("gzip").messages.beginning(framed(b"\x1f\x8bnothing"))) == b""


def test_questions_are_small() -> None:
    bench = Bench("gzip", limit=MAX_QUESTION)
    assert bench.messages.parsed(framed(b"abc"), bytes) == b"abc"
    assert bench.messages.parsed(framed(gzip.compress(bytes(MAX_QUESTION))), len) == MAX_QUESTION
    with pytest.raises(Exhausted, match=r"^Received message larger than max \(65536\) after decompression$"):
        bench.messages.parsed(framed(gzip.compress(bytes(MAX_QUESTION + 1))), len)
    assert bench.messages.too_large(10**6).message == "Received message larger than max (1000000 vs. 65536)"


def test_a_load_that_brings_files_is_parsed_aside() -> None:
    bench = Bench("gzip")
    found: list[tuple[ByteReservation, Any]] = []
    for message in (bytes(MB), gzip.compress(bytes(MB)), gzip.compress(bytes(9 * MB))):
        assert bench.messages.parsed(framed(message), len) is None
        bench.messages.parse_aside(framed(message), len, lambda share, said: found.append((share, said)))
        bench.aside.do()
    assert [said for _, said in found[:2]] == [MB, MB]
    assert [share.size for share, _ in found[:2]] == [0, MB]
    assert isinstance(found[2][1], MessageTooLarge)
