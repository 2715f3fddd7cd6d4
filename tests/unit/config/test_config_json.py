from __future__ import annotations

import json
from typing import Any

import pytest
from config_strategies import configs
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from nerite.config.json_form import from_json, parse_json, read_json, to_json
from nerite.config.model_config import (
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelInstanceGroup,
    ModelTransactionPolicy,
)
from nerite.core.errors import InvalidArgument


@given(configs())
@settings(max_examples=150)
def test_what_is_printed_reads_back_the_same(config: ModelConfig) -> None:
    printed = to_json(config)
    assert from_json(printed) == config
    assert parse_json(json.dumps(printed)).config == config


@given(configs())
@settings(max_examples=100)
def test_protobuf_reads_what_we_print_and_we_read_what_protobuf_prints(config: ModelConfig) -> None:
    theirs = json_format.ParseDict(to_json(config), model_config_pb2.ModelConfig())
    assert from_json(json_format.MessageToDict(theirs)) == config
    assert from_json(json_format.MessageToDict(theirs, preserving_proto_field_name=True)) == config


def test_defaults_are_printed_and_absent_messages_are_not() -> None:
    printed = to_json(ModelConfig(input=(ModelInput(name="A"),), dynamic_batching=ModelDynamicBatching()))
    assert printed["max_batch_size"] == 0
    assert printed["parameters"] == {}
    assert printed["output"] == []
    assert printed["input"][0] == {
        "name": "A",
        "data_type": "TYPE_INVALID",
        "format": "FORMAT_NONE",
        "dims": [],
        "is_shape_tensor": False,
        "allow_ragged_batch": False,
        "optional": False,
        "is_non_linear_format_io": False,
    }
    assert "optimization" not in printed
    assert "default_queue_policy" not in printed["dynamic_batching"]


@pytest.mark.parametrize(
    ("given", "config"),
    [
        ({}, ModelConfig()),
        ({"max_batch_size": "8"}, ModelConfig(max_batch_size=8)),
        ({"max_batch_size": 8.0}, ModelConfig(max_batch_size=8)),
        ({"maxBatchSize": 2}, ModelConfig(max_batch_size=2)),
        ({"max_batch_size": None, "input": None, "version_policy": None}, ModelConfig()),
        (
            {"instance_group": [{"kind": "kind_cpu"}]},
            ModelConfig(instance_group=(ModelInstanceGroup(kind="KIND_CPU"),)),
        ),
        ({"instance_group": [{"kind": 2}]}, ModelConfig(instance_group=(ModelInstanceGroup(kind="KIND_CPU"),))),
        ({"instance_group": {"count": 2}}, ModelConfig(instance_group=(ModelInstanceGroup(count=2),))),
        ({"input": [{"dims": ["4"]}, None]}, ModelConfig(input=(ModelInput(dims=(4,)),))),
        ({"input": [{"dims": 4}]}, ModelConfig(input=(ModelInput(dims=(4,)),))),
        (
            {"model_transaction_policy": {"decoupled": "true"}},
            ModelConfig(model_transaction_policy=ModelTransactionPolicy(decoupled=True)),
        ),
    ],
)
def test_what_triton_accepts_is_accepted(given: dict[str, Any], config: ModelConfig) -> None:
    assert from_json(given) == config


@pytest.mark.parametrize(
    ("given", "told"),
    [
        # The texts are those of Triton, behind "Invalid config override: ".
        ([], ": Root element must be a message."),
        ({"foo": 1}, "foo: Cannot find field."),
        ({"backend ": "x"}, "backend : Cannot find field."),
        ({"input": [{"foo": {}}]}, "(input[0]) foo: Cannot find field."),
        ({"max_batch_size": "x"}, '(max_batch_size): invalid value "x" for type TYPE_INT32'),
        ({"max_batch_size": " 8"}, '(max_batch_size): invalid value " 8" for type TYPE_INT32'),
        ({"max_batch_size": 8.5}, "(max_batch_size): invalid value 8.5 for type TYPE_INT32"),
        ({"max_batch_size": True}, "(max_batch_size): invalid value true for type TYPE_INT32"),
        ({"max_batch_size": 99999999999}, "(max_batch_size): invalid value 99999999999 for type TYPE_INT32"),
        ({"max_batch_size": [8]}, "max_batch_size: Proto field is not repeating, cannot start list."),
        ({"backend": 5}, "(backend): invalid value 5 for type TYPE_STRING"),
        (
            {"instance_group": [{"kind": "GPU"}]},
            '(instance_group[0].kind): invalid value "GPU" for type '
            "type.googleapis.com/inference.ModelInstanceGroup.Kind",
        ),
        (
            {"instance_group": [5]},
            "(instance_group[0]): invalid value 5 for type type.googleapis.com/inference.ModelInstanceGroup",
        ),
        (
            {"input": [{"data_type": "fp32"}]},
            '(input[0].data_type): invalid value "fp32" for type type.googleapis.com/inference.DataType',
        ),
        (
            {"dynamic_batching": {}, "sequence_batching": {}},
            ": invalid value oneof field 'scheduling_choice' is already set. "
            "Cannot set 'sequence_batching' for type oneof",
        ),
        (
            {"model_warmup": [{"inputs": {"A": {"zero_data": True, "random_data": True}}}]},
            "(model_warmup[0].inputs[0].value): invalid value oneof field 'input_data_type' is already set. "
            "Cannot set 'random_data' for type oneof",
        ),
        (
            {"dynamic_batching": 5},
            "(dynamic_batching): invalid value 5 for type type.googleapis.com/inference.ModelDynamicBatching",
        ),
        (
            {"dynamic_batching": {"max_queue_delay_microseconds": -1}},
            "(dynamic_batching.max_queue_delay_microseconds): invalid value -1 for type TYPE_UINT64",
        ),
        (
            {"dynamic_batching": {"priority_queue_policy": {"x": {}}}},
            '(dynamic_batching.priority_queue_policy[0].key): invalid value "x" for type TYPE_UINT64',
        ),
        (
            {"model_transaction_policy": {"decoupled": 1}},
            "(model_transaction_policy.decoupled): invalid value 1 for type TYPE_BOOL",
        ),
        (
            {"parameters": {"a": "b"}},
            '(parameters[0].value): invalid value "b" for type type.googleapis.com/inference.ModelParameter',
        ),
        ({"parameters": []}, ": invalid value Cannot bind a list to map for field 'parameters'. for type Map"),
        (
            {"sequence_batching": {"direct": {"minimum_slot_utilization": "x"}}},
            '(sequence_batching.direct.minimum_slot_utilization): invalid value "x" for type TYPE_FLOAT',
        ),
    ],
)
def test_a_refusal_has_the_text_of_protobuf(given: Any, told: str) -> None:
    (mistake,) = read_json(given).mistakes
    assert mistake.message == told
    assert mistake.remedy
    assert isinstance(mistake.as_error(), InvalidArgument)


def test_all_mistakes_are_told_with_what_to_do_and_the_rest_is_read() -> None:
    parsed = read_json({"maxBatch": 1, "backend": 5, "instance_group": [{"kind": "GPU", "count": 2}]}, "override")
    assert [(mistake.place, mistake.remedy) for mistake in parsed.mistakes] == [
        ("override: maxBatch", "Did you mean max_batch_size?"),
        ("override: backend", "Write a string."),
        ("override: instance_group[0].kind", "Write KIND_GPU."),
    ]
    assert parsed.config.instance_group == (ModelInstanceGroup(count=2),)
    assert parsed.doubtful == {"maxBatch", "backend", "instance_group"}


@pytest.mark.parametrize("text", ["", "x", "{", "{'backend': python}", '{"backend": "python",,}', "[" * 100_000])
def test_what_is_not_json_is_a_mistake(text: str) -> None:
    (mistake,) = parse_json(text, "override").mistakes
    assert mistake.message
    assert mistake.place == "override"


NAMES = st.sampled_from(
    ["name", "input", "dims", "parameters", "kind", "dynamic_batching", "count", "x", "maxBatchSize"]
)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud800") | st.just("9" * 5000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)


@given(JUNK)
@settings(max_examples=300)
def test_no_data_is_too_odd(data: Any) -> None:
    parsed = read_json(data)
    assert isinstance(parsed.config, ModelConfig)
    assert all(mistake.message for mistake in parsed.mistakes)
    if not parsed.mistakes:
        assert from_json(to_json(parsed.config)) == parsed.config
