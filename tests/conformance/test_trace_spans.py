"""Spans for collectors: the same requests to Triton and to Nerite lead to the same spans, but for what Nerite adds.

Not compared: times and ids, and the kinds of inner spans. Triton has no ``tracestate`` over gRPC.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from collector import Collector, Span, collecting
from conformance.ask import play
from conformance.exchange import Scene, Step, grpc_infer, grpc_tensor, infer, tensor
from conformance.servers import Server, start_nerite, start_triton
from conformance.triton_installation import TritonUnavailable, installation

pytestmark = pytest.mark.timeout(120)

FLAGS = (
    # A server that has to hurry at its end sends no spans.
    "--exit-timeout-secs=30",
    "--trace-config=mode=opentelemetry",
    "--trace-config=level=TIMESTAMPS",
    "--trace-config=opentelemetry,bsp_schedule_delay=50",
    "--trace-config=opentelemetry,resource=team=blue",
    "--disable-auto-complete-config",
)
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OUTER = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "x=y"}
IN = tensor("IN", "INT32", [1, 2], [1, 2])
RAW = b"\1\0\0\0\2\0\0\0"


@pytest.fixture(scope="module", autouse=True)
def triton() -> None:
    try:
        installation()
    except TritonUnavailable as error:
        if os.environ.get("CI"):
            pytest.fail(f"Triton cannot run here: {error}")
        pytest.skip(f"Triton cannot run here: {error}")


def said(collector: Collector, span: Span) -> tuple[Any, ...]:
    """What is compared of a span, and of those under it."""
    under = [said(collector, child) for child in collector.children(span)]
    own = {name: value for name, value in span.attributes.items() if name.startswith("triton.")}
    return span.name, sorted(own.items()), sorted(Counter(span.moments).items()), span.state, sorted(under)


def told(
    start: Callable[[Scene, Path], Server], rate: int, repository: str, folder: Path, steps: Sequence[Step]
) -> Any:
    """What a collector hears: each trace, by the span that it is under."""
    models = ("echo",) if repository == "good" else ("chain", "twice")
    with collecting() as collector:
        flags = (*FLAGS, f"--trace-config=rate={rate}", f"--trace-config=opentelemetry,url={collector.url}")
        server = start(Scene("spans", repository=repository, models=models, flags=flags), folder)
        try:
            server.wait()
            for step in steps:
                play(server, step)
        finally:
            server.stop()
        roots = collector.named("InferRequest")
        resources = {(span.resource["service.name"], span.resource["team"], span.kind) for span in roots}
        outer = [(root.parent, root.trace if root.parent else "") for root in roots]
        return resources, sorted(outer), sorted(said(collector, root) for root in roots)


PLAIN = [
    infer("echo", IN, id="a"),
    infer("echo", IN),
    grpc_infer("echo", grpc_tensor("IN", "INT32", [1, 2]), raw=[RAW]),
]
PROPAGATED = [
    infer("echo", IN, headers=OUTER),
    grpc_infer(
        "echo", grpc_tensor("IN", "INT32", [1, 2]), raw=[RAW], metadata=(("traceparent", OUTER["traceparent"]),)
    ),
    infer("echo", IN, headers={"traceparent": "00-1-2-01"}),
    infer("echo", IN),
]


@pytest.mark.parametrize(
    ("rate", "repository", "steps"),
    [
        pytest.param(1, "good", PLAIN, id="plain requests"),
        pytest.param(1, "good", PROPAGATED, id="some that others began"),
        pytest.param(0, "good", PROPAGATED, id="only what others began"),
        pytest.param(2, "good", [*PLAIN, *PROPAGATED], id="every second, and what others began"),
        pytest.param(1, "ensembles", [infer("chain", IN, id="me")], id="an ensemble"),
    ],
)
def test_same_spans(rate: int, repository: str, steps: Sequence[Step], tmp_path: Path) -> None:
    theirs = told(start_triton, rate, repository, tmp_path / "triton", steps)
    ours = told(start_nerite, rate, repository, tmp_path / "nerite", steps)
    assert theirs[2]
    assert ours == theirs
