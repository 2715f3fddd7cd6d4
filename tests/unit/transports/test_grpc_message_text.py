"""Texts in the messages of administrative methods: all of them have a limit, wherever they are."""

from __future__ import annotations

from typing import Any

import pytest

from nerite.core.errors import InvalidArgument
from nerite.transports.grpc import methods
from nerite.wire import grpc_service as wire

LONG = "x" * 1025
VALUE = "x" * (2**20 + 1)


def load(name: str = "m", **parameters: dict[str, Any]) -> Any:
    return wire.RepositoryModelLoadRequest(model_name=name, parameters=parameters)


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (wire.ModelConfigRequest(name=LONG), "'name'"),
        (wire.ModelConfigRequest(name="m", version=LONG), "'version'"),
        (load(LONG), "'model_name'"),
        (load(**{LONG: {"bytes_param": b""}}), "'a key of parameters'"),
        (load(config={"string_param": VALUE}), "'parameters[config].string_param'"),
        (wire.TraceSettingRequest(settings={"trace_rate": {"value": ["1", VALUE]}}), "'settings[trace_rate].value'"),
        (
            wire.LogSettingsRequest(settings={"log_format": {"string_param": VALUE}}),
            "'settings[log_format].string_param'",
        ),
        (wire.SystemSharedMemoryRegisterRequest(name="r", key=LONG), "'key'"),
    ],
)
def test_texts_that_are_too_long_are_refused(message: Any, path: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        methods.check_texts(message)
    assert refused.value.message.startswith(f"{path} is ")


def test_values_and_files_may_be_long() -> None:
    methods.check_texts(load("x" * 1024, config={"string_param": "x" * 2**20}, file={"bytes_param": bytes(2**21)}))
