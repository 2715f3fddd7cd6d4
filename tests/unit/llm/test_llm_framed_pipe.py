"""Messages between an engine and its pipeline's process arrive whole and in order, however the bytes do."""

import socket
import threading

import numpy as np
import pytest

from nerite.llm.openvino_genai.messages import FramedPipe, packed_message


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_several_that_came_at_once(ends):
    ours, theirs = ends
    theirs.sendall(packed_message("a") + packed_message(["b"]) + packed_message({"c": 1}))
    line = FramedPipe(ours)
    assert line.receive() == "a"
    assert line.waits(0)  # what was read already counts
    assert [line.receive(), line.receive()] == [["b"], {"c": 1}]
    assert not line.waits(0)


def test_one_that_comes_byte_by_byte(ends):
    ours, theirs = ends
    line = FramedPipe(ours)
    received = []
    reader = threading.Thread(target=lambda: received.append(line.receive()))
    reader.start()
    for byte in packed_message(("tokens", [1, 2, 3])):
        theirs.sendall(bytes([byte]))
    reader.join(10)
    assert received == [("tokens", [1, 2, 3])]


def test_one_that_is_larger_than_what_the_system_takes_at_once(ends):
    ours, theirs = ends
    image = np.arange(1 << 22, dtype=np.uint8).reshape(2048, 2048)
    sender = threading.Thread(target=FramedPipe(theirs).send, args=(("image", image),))
    sender.start()
    name, received = FramedPipe(ours).receive()
    sender.join(10)
    assert name == "image"
    assert np.array_equal(received, image)


@pytest.mark.parametrize(
    "rest", [b"", b"\x05", packed_message("cut")[:-1]], ids=["nothing", "half a length", "half a message"]
)
def test_the_end(ends, rest):
    ours, theirs = ends
    theirs.sendall(packed_message("last") + rest)
    theirs.close()
    line = FramedPipe(ours)
    assert line.receive() == "last"
    assert line.waits(None)
    with pytest.raises(EOFError):
        line.receive()


def test_nobody_reads_any_more(ends):
    ours, theirs = ends
    theirs.close()
    with pytest.raises(OSError):
        FramedPipe(ours).send("a")


def test_what_there_is_no_room_for_is_given_back(ends):
    ours, theirs = ends
    message = packed_message(bytes(1 << 22))
    line = FramedPipe(theirs)
    rest = line.push(message)
    assert 0 < len(rest) < len(message)
    assert line.push(rest) == rest
    sender = threading.Thread(target=line.write, args=(rest,))
    sender.start()
    assert FramedPipe(ours).receive() == bytes(1 << 22)
    sender.join(10)
