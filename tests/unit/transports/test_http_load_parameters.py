from __future__ import annotations

from typing import Any

import pytest

from nerite.core.errors import Internal, InvalidArgument
from nerite.transports.http import load_parameters


@pytest.mark.parametrize(
    ("document", "parameters"),
    [
        ({}, {}),
        ({"parameters": {}}, {}),
        ({"parameters": {"config": "{}", "file:1/model.py": "eA=="}}, {"config": "{}", "file:1/model.py": b"x"}),
    ],
)
def test_what_a_load_may_say(document: dict[str, Any], parameters: dict[str, str | bytes]) -> None:
    assert load_parameters.read(document) == parameters


@pytest.mark.parametrize("parameters", [[], None, "config"])
def test_parameters_are_an_object(parameters: Any) -> None:
    with pytest.raises(Internal, match=r"attempt to get members for non-object\n"):
        load_parameters.read({"parameters": parameters})


@pytest.mark.parametrize("name", ["config", "file:1/model.py", "colour"])
def test_a_value_is_text(name: str) -> None:
    with pytest.raises(Internal, match=rf"attempt to access JSON non-string as string\n.* '{name}'"):
        load_parameters.read({"parameters": {name: 5}})


def test_a_parameter_that_there_is_not() -> None:
    with pytest.raises(Internal, match=r"unexpected error on creating Triton parameter\n.* 'colour'"):
        load_parameters.read({"parameters": {"config": "{}", "colour": "red"}})


@pytest.mark.parametrize("text", ["%%%", "eA", "eA==\n", "é"])
def test_a_file_is_base64(text: str) -> None:
    with pytest.raises(
        InvalidArgument, match=r"load parameter 'file:1/model.py' is not base64: .*\n    Send the content"
    ):
        load_parameters.read({"parameters": {"config": "{}", "file:1/model.py": text}})
