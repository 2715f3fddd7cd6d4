from __future__ import annotations

from typing import Any

import pytest

from nerite.core.errors import Internal, InvalidArgument
from nerite.transports.http import request_bodies


@pytest.mark.parametrize(
    ("document", "parameters"),
    [
        ({}, {}),
        ({"parameters": {}}, {}),
        ({"parameters": {"config": "{}", "file:1/model.py": "eA=="}}, {"config": "{}", "file:1/model.py": b"x"}),
    ],
)
def test_what_a_load_may_say(document: dict[str, Any], parameters: dict[str, str | bytes]) -> None:
    assert request_bodies.read_load_parameters(document) == parameters


@pytest.mark.parametrize("parameters", [[], None, "config"])
def test_parameters_are_an_object(parameters: Any) -> None:
    with pytest.raises(Internal, match=r"attempt to get members for non-object\n"):
        request_bodies.read_load_parameters({"parameters": parameters})


@pytest.mark.parametrize("name", ["config", "file:1/model.py", "colour"])
def test_a_value_is_text(name: str) -> None:
    with pytest.raises(Internal, match=rf"attempt to access JSON non-string as string\n.* '{name}'"):
        request_bodies.read_load_parameters({"parameters": {name: 5}})


def test_a_parameter_that_there_is_not() -> None:
    with pytest.raises(Internal, match=r"unexpected error on creating Triton parameter\n.* 'colour'"):
        request_bodies.read_load_parameters({"parameters": {"config": "{}", "colour": "red"}})


@pytest.mark.parametrize("text", ["%%%", "eA", "eA==\n", "é"])
def test_a_file_is_base64(text: str) -> None:
    with pytest.raises(
        InvalidArgument, match=r"load parameter 'file:1/model.py' is not base64: .*\n    Send the content"
    ):
        request_bodies.read_load_parameters({"parameters": {"config": "{}", "file:1/model.py": text}})
