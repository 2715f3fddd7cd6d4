"""What a setting changes in a configuration."""

from __future__ import annotations

import pytest

from nerite.config.text import parse_text
from nerite.tools.analyze.search import SETTINGS, Value, changed

WRITTEN = """\
max_batch_size: 8
dynamic_batching { preferred_batch_size: [ 4, 8 ] }
instance_group [ { kind: KIND_CPU, count: 2 } ]
parameters { key: "intra_op_thread_count" value { string_value: "3" } }
"""


@pytest.mark.parametrize(
    ("name", "now", "value", "reads"),
    [
        ("max_batch", 8, 32, 32),
        ("preferred", 4, 16, 16),
        ("preferred", 4, 0, 0),
        ("delay", 0, 500, 500),
        ("delay", 0, "off", "off"),
        ("instances", 2, 4, 4),
        ("threads", 3, 1, 1),
        ("threads", 3, 0, 0),
        ("backend", "onnxruntime", "openvino", "openvino"),
    ],
)
def test_what_is_changed_is_read(name: str, now: Value, value: Value, reads: Value) -> None:
    written = parse_text('backend: "onnxruntime"\n' + WRITTEN).config
    setting = SETTINGS[name]
    assert setting.read(written) == now
    assert setting.read(changed(written, "onnxruntime", {name: value})) == reads
    assert changed(written, "onnxruntime", {}) == written


def test_preferred_sizes_above_the_largest_go() -> None:
    config = changed(parse_text(WRITTEN).config, "onnxruntime", {"max_batch": 4})
    assert config.dynamic_batching is not None
    assert config.dynamic_batching.preferred_batch_size == (4,)


def test_a_backend_that_is_not_written_stays_so_and_says_where_threads_are() -> None:
    config = changed(parse_text(WRITTEN).config, "openvino", {"threads": 2})
    assert config.backend == ""
    assert config.parameters["INFERENCE_NUM_THREADS"].string_value == "2"


@pytest.mark.parametrize(("name", "text"), [("max_batch", "x"), ("instances", "-1"), ("max_batch", "off")])
def test_no_value(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SETTINGS[name].parsed(text)
