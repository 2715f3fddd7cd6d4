"""Trace files: the same requests to Triton and to Nerite leave the same records.

Not compared: times, and the order of records of one trace, which in Triton depends on which of its threads is first.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.ask import play
from conformance.exchange import Grpc, Scene, Step, Stream, grpc_infer, grpc_tensor, infer, infer_message, tensor
from conformance.servers import Server, start_nerite, start_triton
from conformance.triton_installation import TritonUnavailable, installation

pytestmark = pytest.mark.timeout(120)

# A server that has to hurry at its end writes no traces.
TRACE = ("--trace-config=triton,file={models}.trace", "--exit-timeout-secs=30")
BOTH = (*TRACE, "--trace-config=level=TIMESTAMPS", "--trace-config=level=TENSORS")
GOOD = Scene("good", models=("echo",), flags=(*BOTH, "--trace-config=rate=1", "--disable-auto-complete-config"))
STREAMS = replace(GOOD, name="streams", repository="streams", models=("many", "one"))
RARE = replace(GOOD, flags=(*TRACE, "--trace-config=level=TIMESTAMPS", "--trace-config=rate=2"))
ITERATIVE = replace(
    RARE, name="iterative", repository="iterative", models=("turns",), flags=(*RARE.flags, "--trace-config=rate=1")
)
FEW = replace(RARE, flags=(*RARE.flags, "--trace-config=count=3", "--trace-config=triton,log-frequency=2"))

HTTP = [infer("echo", tensor("IN", "INT32", [1, 2], [1, 2]), id=name) for name in ("", "a", "b", "c", "d", "e", "f")]
GRPC = [
    grpc_infer("echo", grpc_tensor("IN", "INT32", [1, 2]), raw=[b"\1\0\0\0\2\0\0\0"], id=name) for name in ("", "g")
]


TURNS = [
    infer("turns", tensor("WORDS", "BYTES", [1, 1], [words]), id="me")
    for words in ("again again done", "again raise", "done")
]


def streamed(model: str, *kinds: bytes) -> list[Step]:
    """A stream for each request, so that they come one after the other."""
    return [
        Stream(
            (
                infer_message(
                    model, grpc_tensor("KIND", "BYTES", [1]), raw=[len(kind).to_bytes(4, "little") + kind], id="me"
                ),
            )
        )
        for kind in kinds
    ]


@pytest.fixture(scope="module", autouse=True)
def triton() -> None:
    try:
        installation()
    except TritonUnavailable as error:
        if os.environ.get("CI"):
            pytest.fail(f"Triton cannot run here: {error}")
        pytest.skip(f"Triton cannot run here: {error}")


def traces(start: Callable[[Scene, Path], Server], scene: Scene, folder: Path, steps: Sequence[Step]) -> Any:
    """The files that a server leaves: name to traces, and of each trace its records without times, sorted."""
    server = start(scene, folder)
    try:
        server.wait()
        for step in steps:
            play(server, step)
    finally:
        server.stop()
    found: dict[str, dict[int, Any]] = {}
    for path in sorted(folder.glob("models.trace*")):
        of_file: dict[int, Any] = found.setdefault(path.name, {})
        for record in json.loads(path.read_text()):
            for stamp in record.get("timestamps", ()):
                assert isinstance(stamp.pop("ns"), int)
            of_file.setdefault(record.pop("id"), []).append(json.dumps(record, sort_keys=True))
    return {name: {number: Counter(records) for number, records in of.items()} for name, of in found.items()}


@pytest.mark.parametrize(
    ("scene", "steps", "files"),
    [
        pytest.param(GOOD, [*HTTP[:2], *GRPC], ["models.trace"], id="levels of all kinds"),
        pytest.param(
            STREAMS, [*streamed("many", b"send send last", b"send end"), *streamed("one", b"return")], ["models.trace"],
            id="streams",
        ),
        pytest.param(ITERATIVE, TURNS, ["models.trace"], id="requests of several turns"),
        pytest.param(RARE, HTTP, ["models.trace"], id="every second"),
        pytest.param(FEW, HTTP, ["models.trace.0", "models.trace.1"], id="three in files of two"),
    ],
)  # fmt: skip
def test_same_records(scene: Scene, steps: Sequence[Step | Grpc], files: list[str], tmp_path: Path) -> None:
    theirs = traces(start_triton, scene, tmp_path / "triton", steps)
    ours = traces(start_nerite, scene, tmp_path / "nerite", steps)
    assert sorted(ours) == files
    assert ours == theirs
