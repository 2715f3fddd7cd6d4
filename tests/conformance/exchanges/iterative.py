"""Iterative sequences: what a model is told each time; and with what states begin."""

from typing import Any

from conformance.exchange import Http, Stream, grpc_infer, grpc_tensor, infer, infer_message, post, tensor
from conformance.exchanges.scenes import ITERATIVE

SCENE = ITERATIVE
EMPTY_FINAL = {"triton_enable_empty_final_response": True}


def turns(words: str, model: str = "turns", **parameters: Any) -> Http:
    return infer(model, tensor("WORDS", "BYTES", [1, 1], [words]), id="me", parameters=parameters)


def called(words: str, **parameters: Any):
    contents = {"bytes_contents": [words.encode()]}
    return grpc_infer("turns", grpc_tensor("WORDS", "BYTES", [1, 1], contents), id="me", parameters=parameters)


def streamed(words: str, **parameters: Any) -> Stream:
    contents = {"bytes_contents": [words.encode()]}
    asked = infer_message(
        "streamed", grpc_tensor("WORDS", "BYTES", [1, 1], contents), id="me", parameters=EMPTY_FINAL | parameters
    )
    return Stream((asked,))


def begun(model: str) -> Http:
    return infer(model, tensor("IN", "INT32", [1, 1], [1]), parameters={"sequence_id": 1, "sequence_start": True})


def load(model: str) -> Http:
    return post(f"/v2/repository/models/{model}/load", {})


BEGUN = {"sequence_id": 5, "sequence_start": True}
EXCHANGES = {
    "one turn": turns("done"),
    "three turns": turns("again again done"),
    "the next has another id": turns("again done"),
    "START without an id": turns("again done", sequence_start=True),
    "END without an id": turns("again done", sequence_end=True),
    "an id": turns("again done", **BEGUN),
    "an id that has not begun": turns("done", sequence_id=6),
    "END in one turn": turns("done", sequence_id=8, sequence_start=True, sequence_end=True),
    "END in two turns": turns("again done", sequence_id=1000, sequence_start=True, sequence_end=True),
    "gRPC: three turns": called("again again done"),
    "gRPC: an id": called("again done", **BEGUN),
    "an error at last": turns("again error"),
    "an exception at last": turns("again raise"),
    "by a sender at last": turns("again sender"),
    "flag 2": turns("2 done"),
    "flag 3": turns("3 done"),
    "flag 6": turns("6 done"),
    "a response, and once more": turns("both done"),
    "two rows": infer("turns", tensor("WORDS", "BYTES", [2, 1], ["done", "done"])),
    "a response each turn": streamed("again again last"),
    "a response each turn: an id": streamed("again last", **BEGUN),
    "a response each turn: an exception": streamed("again raise"),
    "states: a file that is too short": load("shortfile"),
    "states: a file that is not there": load("nofile"),
    "states: two beginnings": load("two"),
    "states: other dimensions": load("otherdims"),
    # Last: it is with these that Triton writes beyond its memory, and may not live long.
    "states begin with a file": begun("begins"),
    "states begin with strings": begun("begins_text"),
}
