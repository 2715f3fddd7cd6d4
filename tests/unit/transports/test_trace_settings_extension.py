"""Changing what is traced through the trace extension. What Triton says to each is a matter of the exam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from nerite.config.options import TraceOptions
from nerite.core.errors import InvalidArgument, NeriteError, Unsupported
from nerite.observability.trace import TraceSettings
from nerite.transports.settings import change_trace_settings


def change(**given: Sequence[str] | None) -> dict[str, Any]:
    settings = TraceSettings(TraceOptions(levels=("TENSORS",), file="t"), lambda: None)
    change_trace_settings(settings, "m", given, lambda _, value: value)
    return dict(settings.current("m"))


def test_what_is_given_changes_and_nothing_else() -> None:
    assert change() == change(colour=["red"]) == change(trace_level=["nothing"]) == change(trace_rate=None)
    assert change(trace_rate=["3"]) == change() | {"trace_rate": "3"}
    assert change(trace_level=["OFF"]) == change() | {"trace_level": ["OFF"]}


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"trace_file": ["x"]}, Unsupported, "trace file location can not be updated through network protocol"),
        ({"trace_level": ["OFF", "OFF"]}, InvalidArgument, "Expect only one trace level 'OFF' is specified"),
        (
            {"trace_rate": ["9" * 5_000]},
            InvalidArgument,
            "'trace_rate' is 5000 characters long, more than the 1024 that are allowed",
        ),
        (
            {"trace_level": ["OFF", "\udcff"]},
            InvalidArgument,
            "'trace_level' is not valid UTF-8 at character 0",
        ),
        ({"trace_rate": ["x"]}, InvalidArgument, "Unable to parse 'trace_rate', got: x"),
        ({"trace_count": ["-2"]}, InvalidArgument, "Unable to parse 'trace_count'. Expecting value >= -1, got:-2"),
        (
            {"trace_rate": ["-1"]},
            InvalidArgument,
            "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: -1",
        ),
    ],
)
def test_refusals(given: dict[str, Sequence[str]], kind: type[NeriteError], message: str) -> None:
    with pytest.raises(kind) as caught:
        change(**given)
    assert caught.value.message == message
