"""Changing fields in a config.pbtxt: what is not changed stays as it was written."""

from __future__ import annotations

import dataclasses
import difflib

import pytest

from nerite.config.model_config import ModelConfig, ModelDynamicBatching, ModelInstanceGroup, ModelParameter
from nerite.config.text import edited, parse_text

WRITTEN = """\
# A model.
backend: "python", max_batch_size: 8  # as measured

dynamic_batching {
  # not long
  max_queue_delay_microseconds: 100
}
# its tensors
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
parameters { key: "a" value { string_value: "{ # }" } }
parameters: { key: "b" value: { string_value: "2" } };
output { name: "y" data_type: TYPE_FP32 dims: 1 }"""
OTHERS = {
    "nothing": {},
    "one": {"max_batch_size": 4},
    "a message": {"dynamic_batching": ModelDynamicBatching(max_queue_delay_microseconds=7)},
    "gone": {"dynamic_batching": None},
    "new": {"instance_group": (ModelInstanceGroup(count=2),)},
    "several of a kind": {"parameters": {"c": ModelParameter(string_value="3")}},
    "all": {"max_batch_size": 0, "dynamic_batching": None, "backend": "", "platform": "x", "input": (), "name": "m"},
}


@pytest.mark.parametrize("text", [WRITTEN, ""], ids=["written", "empty"])
@pytest.mark.parametrize("other", OTHERS)
def test_it_says_what_it_should(text: str, other: str) -> None:
    old = parse_text(text).config
    new = dataclasses.replace(old, **OTHERS[other])
    after = edited(text, old, new)
    parsed = parse_text(after)
    assert not parsed.mistakes
    assert parsed.config == new
    if old == new:
        assert after == text


def test_the_rest_stays_as_it_is() -> None:
    old = parse_text(WRITTEN).config
    new = dataclasses.replace(old, max_batch_size=32, instance_group=(ModelInstanceGroup(count=2),))
    changes = [
        line for line in difflib.ndiff(WRITTEN.splitlines(), edited(WRITTEN, old, new).splitlines()) if line[0] in "+-"
    ]
    assert changes == [
        '- backend: "python", max_batch_size: 8  # as measured',
        '+ backend: "python", max_batch_size: 32  # as measured',
        "+ ",
        "+ instance_group [",
        "+   {",
        "+     count: 2",
        "+   }",
        "+ ]",
    ]


def test_a_text_that_says_nothing() -> None:
    assert edited("", ModelConfig(), ModelConfig(max_batch_size=2)) == "max_batch_size: 2\n"
