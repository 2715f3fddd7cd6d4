"""The client side of HTTP/2, with the ``h2`` package as the server."""

from __future__ import annotations

import h2.errors
import h2.events
import h2.settings
import pytest
from http2_client_peer import REQUEST_BLOCK, H2Server

from nerite.http2 import Http2ErrorCode, Limits, encode_headers


def test_a_call_and_its_answer():
    peer = H2Server()
    stream_id = peer.client.open_stream(REQUEST_BLOCK)
    peer.client.send_data(stream_id, [b"ques", b"tion"], True)
    seen = peer.pump()
    request = next(event for event in seen if isinstance(event, h2.events.RequestReceived))
    assert dict(request.headers) == {
        ":method": "POST", ":scheme": "http", ":path": "/x", ":authority": "a", "te": "trailers"
    }  # fmt: skip
    assert peer.requests == {1: b"question"}
    peer.answer(1, b"answer")
    peer.pump()
    (started, trailers) = peer.answers.take()
    assert started[0] == "started" and started[2].status == 200 and started[2].get(b"content-type")
    assert trailers == ("trailers", 1, ((b"grpc-status", b"0"),))
    assert peer.answers.bodies == {1: b"answer"}
    assert (peer.client.open_streams, peer.client.finished, peer.client.incomplete) == (0, False, False)


def test_streams_have_odd_numbers_that_grow():
    peer = H2Server()
    assert [peer.client.open_stream(REQUEST_BLOCK, end_stream=True) for _ in range(3)] == [1, 3, 5]
    peer.pump()
    ends = [event.stream_id for event in peer.events if isinstance(event, h2.events.StreamEnded)]
    assert ends == [1, 3, 5]


def test_equal_headers_of_answers_are_one_object():
    peer = H2Server()
    found = []
    for _ in range(4):
        stream_id = peer.client.open_stream(REQUEST_BLOCK, end_stream=True)
        peer.pump()
        peer.answer(stream_id, b"x")
        peer.pump()
        found.append(peer.answers.take()[0][2])
    # The first fills the table of the encoder; its block is another than the later ones.
    assert found[2] is found[3]


@pytest.mark.parametrize("window", [1, 1_000, 65_535, 1 << 20])
def test_large_bodies_both_ways(window):
    body = bytes(range(256)) * 2_000
    peer = H2Server(Limits(stream_window=window, connection_window=65_535), INITIAL_WINDOW_SIZE=max(window, 100))
    stream_id = peer.client.open_stream(REQUEST_BLOCK)
    peer.client.send_data(stream_id, [body], True)
    assert peer.client.queued > 0
    peer.pump()
    assert peer.requests[stream_id] == body
    assert (peer.client.queued, peer.client.buffered(stream_id)) == (0, 0)
    short = body[: 3 * window + 5]
    peer.answer(stream_id, short)
    peer.pump()
    assert peer.answers.bodies[stream_id] == short


def test_a_paused_answer_stops_at_its_window():
    peer = H2Server(Limits(stream_window=10_000))
    stream_id = peer.client.open_stream(REQUEST_BLOCK, end_stream=True)
    peer.pump()
    peer.client.pause(stream_id)
    peer.server.send_headers(stream_id, [(":status", "200")])
    peer.server.send_data(stream_id, bytes(10_000))
    peer.pump()
    assert peer.server.local_flow_control_window(stream_id) == 0
    peer.client.resume(stream_id)
    peer.pump()
    assert peer.server.local_flow_control_window(stream_id) == 10_000


def test_a_stream_of_pieces_is_writable_again():
    peer = H2Server(INITIAL_WINDOW_SIZE=10)
    peer.credit = False
    stream_id = peer.client.open_stream(REQUEST_BLOCK)
    peer.pump()
    peer.client.send_data(stream_id, [bytes(25)])
    peer.pump()
    assert peer.client.buffered(stream_id) == 15 and peer.answers.take() == []
    peer.server.increment_flow_control_window(100, stream_id)
    peer.pump()
    assert peer.answers.take() == [("writable", stream_id)]
    peer.client.send_trailers(stream_id, encode_headers([(b"x", b"1")]))
    assert any(isinstance(event, h2.events.TrailersReceived) for event in peer.pump())
    with pytest.raises(RuntimeError, match="already ended"):
        peer.client.send_data(stream_id, [b"more"])


def test_the_server_says_how_many_streams():
    peer = H2Server(MAX_CONCURRENT_STREAMS=2, greeted=False)
    assert peer.client.room == 100, "before the server has said anything"
    peer.pump()
    assert peer.client.room == 2
    peer.client.open_stream(REQUEST_BLOCK, end_stream=True)
    peer.client.open_stream(REQUEST_BLOCK, end_stream=True)
    peer.pump()
    assert peer.client.room == 0
    with pytest.raises(RuntimeError, match="no room"):
        peer.client.open_stream(REQUEST_BLOCK)
    peer.answer(3)
    peer.pump()
    assert peer.client.room == 1
    peer.server.update_settings({h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 0})
    peer.pump()
    assert peer.client.room == 0


def test_our_own_limit_of_streams():
    peer = H2Server(Limits(max_concurrent_streams=1))
    peer.pump()
    peer.client.open_stream(REQUEST_BLOCK)
    assert peer.client.room == 0


def test_an_answer_before_the_end_of_the_request():
    peer = H2Server()
    stream_id = peer.client.open_stream(REQUEST_BLOCK)
    peer.client.send_data(stream_id, [bytes(200_000)])
    peer.credit = False
    peer.pump()
    peer.answer(stream_id, b"no")
    seen = peer.pump()
    resets = [event for event in seen if isinstance(event, h2.events.StreamReset)]
    assert [event.error_code for event in resets] == [h2.errors.ErrorCodes.NO_ERROR]
    assert (peer.client.open_streams, peer.client.queued) == (0, 0)
    assert peer.answers.take()[-1][0] == "trailers"
    peer.client.send_data(stream_id, [b"late"])
    assert not peer.client.outbound


def test_resets_by_either_side():
    peer = H2Server()
    first, second = (peer.client.open_stream(REQUEST_BLOCK) for _ in range(2))
    peer.pump()
    peer.server.reset_stream(first, h2.errors.ErrorCodes.REFUSED_STREAM)
    peer.client.reset(second)
    seen = peer.pump()
    assert peer.answers.take() == [("closed", first, Http2ErrorCode.REFUSED_STREAM)]
    (reset,) = (event for event in seen if isinstance(event, h2.events.StreamReset))
    assert (reset.stream_id, reset.error_code) == (second, h2.errors.ErrorCodes.CANCEL)


def test_what_comes_for_a_stream_that_we_reset_is_dropped():
    peer = H2Server()
    stream_id = peer.client.open_stream(REQUEST_BLOCK, end_stream=True)
    peer.pump()
    peer.server.send_headers(stream_id, [(":status", "200"), ("x", "y")])
    peer.server.send_data(stream_id, b"late")
    peer.server.send_headers(stream_id, [("grpc-status", "0")], end_stream=True)
    peer.client.reset(stream_id)
    peer.pump()
    assert peer.answers.take() == [] and not peer.client.closed


def test_goaway_reports_what_was_not_processed():
    peer = H2Server()
    first, second, third = (peer.client.open_stream(REQUEST_BLOCK, end_stream=True) for _ in range(3))
    peer.pump()
    peer.server.close_connection(last_stream_id=first, additional_data=b"bye")
    peer.client.receive(peer.server.data_to_send(), 0.0)
    assert peer.answers.take() == [
        ("closing", Http2ErrorCode.NO_ERROR, "bye"),
        ("closed", second, Http2ErrorCode.REFUSED_STREAM),
        ("closed", third, Http2ErrorCode.REFUSED_STREAM),
    ]
    assert (peer.client.room, peer.client.open_streams, peer.client.finished) == (0, 1, False)
    peer.client.lost()
    assert peer.answers.take() == [("closed", first, Http2ErrorCode.CANCEL)]


def test_our_goaway_lets_open_streams_end():
    peer = H2Server()
    stream_id = peer.client.open_stream(REQUEST_BLOCK, end_stream=True)
    peer.pump()
    peer.client.goaway()
    peer.client.goaway()
    assert peer.client.room == 0 and not peer.client.finished
    goaway = peer.client.outbound[:]
    assert len(goaway) == 1
    peer.client.outbound.clear()
    peer.answer(stream_id, b"last")
    peer.client.receive(peer.server.data_to_send(), 0.0)
    assert peer.answers.bodies == {stream_id: b"last"} and peer.client.finished


def test_pings_both_ways():
    peer = H2Server(Limits(max_ping_strikes=0))
    peer.pump()
    peer.client.ping()
    assert peer.client.pings_unanswered == 1
    peer.pump()
    assert peer.client.pings_unanswered == 0
    for _ in range(20):
        peer.server.ping(b"12345678")
        seen = peer.pump()
        assert any(isinstance(event, h2.events.PingAckReceived) for event in seen)


def test_a_server_that_changes_its_windows():
    peer = H2Server()
    peer.credit = False
    stream_id = peer.client.open_stream(REQUEST_BLOCK)
    peer.client.send_data(stream_id, [bytes(65_000)])
    peer.pump()
    peer.server.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 10})
    peer.pump()
    peer.client.send_data(stream_id, [bytes(1_000)], True)
    peer.pump()
    assert peer.client.buffered(stream_id) == 1_000
    peer.server.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 70_000})
    peer.server.increment_flow_control_window(100_000)
    peer.pump()
    assert len(peer.requests[stream_id]) == 66_000 and not peer.client.queued


def test_a_server_without_a_header_table():
    peer = H2Server(HEADER_TABLE_SIZE=0)
    peer.pump()
    for _ in range(2):
        peer.client.open_stream(REQUEST_BLOCK, end_stream=True)
    requests = [event for event in peer.pump() if isinstance(event, h2.events.RequestReceived)]
    assert len(requests) == 2


def test_interim_answers_are_dropped():
    peer = H2Server()
    stream_id = peer.client.open_stream(REQUEST_BLOCK)
    peer.pump()
    peer.server.send_headers(stream_id, [(":status", "103"), ("link", "x")])
    peer.pump()
    assert peer.answers.take() == []
    peer.answer(stream_id, b"x", trailers=False)
    peer.pump()
    assert [event[0] for event in peer.answers.take()] == ["started", "ended"]
