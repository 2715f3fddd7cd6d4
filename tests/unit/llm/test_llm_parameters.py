"""The table of parameters in docs/llm.md: each engine has those that it says yes to, and refuses the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from nerite.backends.interface import ModelContext
from nerite.core.errors import Unsupported
from nerite.llm import selection
from nerite.llm import tensorrt_llm as of_tensorrt
from nerite.llm.openvino_genai import options
from nerite.llm.vllm import framework as of_vllm
from pages import rows

KNOWN = {"openvino_genai": options.KNOWN, "vllm": of_vllm.KNOWN, "tensorrt_llm": of_tensorrt.KNOWN}
OF_OTHER_TASKS = {"NORMALIZE", "POOLING_TYPE", "WORD_TIMESTAMPS"}
"""They have pages of their own."""


def model(**said: str) -> ModelContext:
    given = {key: {"string_value": value} for key, value in said.items()}
    return ModelContext("m", 1, Path(), {"parameters": given})


def test_the_table() -> None:
    cells = {
        (name.strip("` "), engine.strip("`")): cell
        for names, row in rows("docs/llm.md", "parameter").items()
        for name in names.split(",")
        for engine, cell in row.items()
        if engine.strip("`") in KNOWN
    }
    assert set(cells.values()) == {"yes", "no"}
    assert {name for name, _ in cells} >= selection.OF_SOME - OF_OTHER_TASKS
    for (name, engine), said in cells.items():
        if said == "yes":
            selection.check_parameters(model(**{name: "1"}), KNOWN[engine], "it")
        else:
            with pytest.raises(Unsupported, match=f"'{name}', which it does not support: remove it"):
                selection.check_parameters(model(**{name: "1"}), KNOWN[engine], "it")


def test_what_an_engine_knows_is_known_to_be_lacking_in_others() -> None:
    for known in KNOWN.values():
        assert known <= selection.OF_SOME


def test_what_is_somebody_elses_is_left_alone() -> None:
    selection.check_parameters(model(CHAT_TEMPLATE="plain", of_my_own="1"), options.KNOWN, "it")
