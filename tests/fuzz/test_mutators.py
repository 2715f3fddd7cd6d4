"""Inputs: equal seeds make equal ones, they are small, and most of them come further than the first check."""

from __future__ import annotations

import json
import random

import pytest

from fuzz import administration, inference, surfaces
from fuzz.mutators import documents, fields, frames, heads, octets, words
from fuzz.mutators.documents import Members, Raw
from nerite.wire.grpc_service import ModelInferRequest
from nerite.wire.schema import methods


@pytest.mark.parametrize("surface", surfaces.SURFACES)
def test_equal_seeds_make_equal_inputs(surface: str) -> None:
    first = [surfaces.case(surface, 7, number) for number in range(60)]
    assert first == [surfaces.case(surface, 7, number) for number in range(60)]
    assert len({case.parts for case in first}) > 40
    assert all(case.size < 3 * octets.LARGEST and case.parts for case in first)
    assert first != [surfaces.case(surface, 8, number) for number in range(60)]


def test_shares_are_those_of_the_table() -> None:
    assert sum(surface.share for surface in surfaces.SURFACES.values()) == 100
    drawn = surfaces.draw(1, ["json", "loads"], 5, 400)
    assert [case.number for case in drawn] == list(range(5, 405))
    assert 350 < sum(case.surface == "json" for case in drawn) < 400


def test_every_method_of_grpc_has_a_valid_message() -> None:
    asked = {"/inference.GRPCInferenceService/ModelInfer", "/inference.GRPCInferenceService/ModelStreamInfer"}
    # The server has no watches.
    assert {*administration.METHODS, *asked} == {path for path in methods() if not path.endswith("/Watch")}
    for path, make in administration.METHODS.items():
        assert type(make(random.Random(1))).DESCRIPTOR is methods()[path].request.DESCRIPTOR


def test_inferences_are_valid_before_they_are_changed() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        asked = inference.asked(chance)
        message = ModelInferRequest.FromString(inference.message(chance, asked))
        assert message.model_name == asked.model
        document, tail = inference.binary(asked)
        assert sum(tensor["parameters"]["binary_data_size"] for tensor in document["inputs"]) == len(tail)
        json.loads(documents.dumped(inference.document(chance, asked)))


def test_documents_are_written_as_they_are() -> None:
    tree = Members([["a", [1, None, True, "é\ud800"]], ["a", Raw(b"nul")], ["b", Members()]])
    assert documents.dumped(tree) == b'{"a":[1,null,true,"\\u00e9\\ud800"],"a":nul,"b":{}}'
    assert documents.dumped(documents.thawed({"x": [{"y": 0.5}]})) == b'{"x":[{"y":0.5}]}'
    assert documents.dumped([float("nan"), float("-inf"), -(10**400)]) == b"[NaN,-Infinity,-1" + b"0" * 400 + b"]"


def test_documents_change_in_many_ways() -> None:
    made = {documents.mutated(random.Random(seed), {"a": [1, 2], "b": {"c": "d"}}) for seed in range(500)}
    assert len(made) > 350
    valid = 0
    for text in made:
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            continue
        valid += 1
    assert len(made) / 3 < valid < len(made)


def test_fields_are_taken_apart_and_put_together() -> None:
    message = inference.message(random.Random(3), inference.asked(random.Random(3), "worker"))
    taken = fields.parsed(message)
    assert taken is not None
    assert fields.dumped(taken) == message
    assert fields.parsed(b"\x08") is None
    assert fields.parsed(b"\x0a\x05ab") is None
    assert fields.varint(-1 % 2**64) == b"\xff" * 9 + b"\x01"
    readable = 0
    for seed in range(300):
        try:
            ModelInferRequest.FromString(fields.mutated(random.Random(seed), message))
        except Exception:  # protobuf has several
            continue
        readable += 1
    assert 100 < readable < 300


def test_frames_have_heads() -> None:
    assert frames.frame(frames.PING, frames.ACK, 0, b"12345678") == b"\0\0\x08\x06\x01\0\0\0\x0012345678"
    assert frames.frame(frames.DATA, 0, 2**32 - 1, b"", 5)[:9] == b"\0\0\x05\0\0\xff\xff\xff\xff"
    made = frames.session(random.Random(1), b"/x", [], b"body")
    assert frames.mutated(random.Random(2), made) != made


def test_chunks_are_in_good_order() -> None:
    raw = heads.chunked(random.Random(1), b"x" * 100)
    assert raw.endswith((b"0\r\n\r\n", b"0\r\nTrailing: x\r\n\r\n"))
    raw = heads.whole(b"GET", b"/", [b"A: b"], b"body")
    assert raw == b"GET / HTTP/1.1\r\nA: b\r\n\r\nbody"
    for seed in range(50):
        assert b"".join(heads.pieces(random.Random(seed), raw)) == raw
        assert not set(b"\r\n\0") & set(heads.value(random.Random(seed)))


def test_words_change() -> None:
    text = 'name: "x" dims: [ 1, -2 ] # said\n'
    made = {words.mutated(random.Random(seed), text, ("dims",)) for seed in range(300)}
    assert len(made) > 200


def test_loads_bring_nothing_large_and_no_program_that_chance_has_written() -> None:
    programs = {administration.models.brought(source) for source in administration.SOURCES} | {"AA=A"}
    for number in range(2_000):
        case = surfaces.case("loads", 1, number)
        if b'"file:' not in case.parts[1]:
            continue
        parameters = json.loads(case.parts[1])["parameters"]
        assert {value for name, value in parameters.items() if name.startswith("file:")} <= programs
    tamed = administration.tamed({"instance_group": [{"count": 10**9}], "backend": "pytorch"})
    assert tamed == {"instance_group": [{"count": 0}], "backend": "python"}
