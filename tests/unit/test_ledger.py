"""The ledger of the contract is complete: nothing works without a test, and nothing is silently without effect."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import triton_python_backend_utils as pb_utils
from conformance.topics import topics
from ledger import config_fields, endpoints, flags, metrics, page
from ledger import pb_utils as models
from ledger.mutations import mutation
from nerite.backends.registry import ENTRIES
from nerite.cli.flags import FLAGS
from nerite.config import validate
from nerite.config.text import parse_text
from nerite.transports.http.routes import ENDPOINTS
from nerite.wire import model_config

TESTS = Path(__file__).parents[1]
WIRE = TESTS.parent / "src" / "nerite" / "wire"


@cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@cache
def exchanges() -> Mapping[str, frozenset[str]]:
    return {topic.name: frozenset(topic.exchanges) for topic in topics()}


@pytest.mark.parametrize("section", page.sections(), ids=lambda section: section.title)
def test_each_test_exists(section: page.Section) -> None:
    missing = []
    for name, test in section.works.items():
        file, _, function = test.partition("::")
        topic, _, exchange = test.partition(": ")
        there = function in functions(file) if function else exchange in exchanges().get(topic, ())
        if not there:
            missing.append((name, test))
    assert missing == []
    assert section.works.keys().isdisjoint(section.no_effect)


@pytest.mark.parametrize("section", page.sections(), ids=lambda section: section.title)
def test_each_effect_can_be_taken_away(section: page.Section) -> None:
    """Whether the tests see it is tried by ``make mutations``."""
    for name in section.works:
        for edit in mutation(section.title, name):
            text = (TESTS.parent / "src" / edit.file).read_text()
            changed = edit.apply(text)
            assert changed != text
            compile(changed, edit.file, "exec")


def leaves(descriptor: object, place: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields below a message of the protocol that are no messages themselves."""
    for field in descriptor.fields:  # type: ignore[attr-defined]
        message = field.message_type
        if message is not None and message.GetOptions().map_entry:
            message = message.fields_by_name["value"].message_type
        if message is None or not message.fields:
            yield place + field.name
        else:
            yield from leaves(message, f"{place}{field.name}.")


def test_every_field_of_a_configuration_is_in_it() -> None:
    listed = config_fields.CONFIG_FIELDS.keys() | validate.FIELDS.keys()
    every = list(leaves(model_config.ModelConfig.DESCRIPTOR))
    assert len(every) > 120
    unlisted = [name for name in every if not any(f"{name}.".startswith(f"{parent}.") for parent in listed)]
    assert unlisted == []
    unknown = [name for name in listed if not any(f"{each}.".startswith(f"{name}.") for each in every)]
    assert unknown == []


def test_every_flag_is_in_it() -> None:
    assert flags.FLAGS.keys() == {flag.name for flag in FLAGS if not flag.no_effect}


def test_every_endpoint_is_in_it() -> None:
    http = {f"{method} {endpoint.path}" for endpoint in ENDPOINTS for method in endpoint.methods}
    assert endpoints.HTTP.keys() >= http
    calls = {
        call
        for schema in ("grpc_service.proto", "health.proto")
        for call in re.findall(r"^  rpc (\w+)", (WIRE / schema).read_text(), re.MULTILINE)
    }
    assert endpoints.GRPC.keys() == calls | {"StreamCoreMetrics"}


def test_every_member_that_models_use_is_in_it() -> None:
    members = set()
    for name, member in vars(pb_utils).items():
        if not name.startswith("_") and not inspect.ismodule(member):
            members.add(name)
            own = vars(member) if inspect.isclass(member) else ()
            members |= {f"{name}.{each}" for each in own if not each.startswith("_")}
    listed = {name for name in models.PB_UTILS if not name.startswith(("parameters: ", "TritonPythonModel."))}
    assert listed == members - OURS


OURS = {
    "InferenceRequest.target",
    "InferenceRequest.custom",
    "InferenceRequest.preferred_device",
    "InferenceTrace.request",
}
"""Attributes that other packages of the server use."""


def test_every_metric_of_triton_is_in_it() -> None:
    page = (TESTS.parent / "docs" / "metrics.md").read_text()
    table = page[page.index("<!-- metrics -->") : page.index("<!-- /metrics -->")]
    listed = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `nv_")}
    assert metrics.METRICS.keys() == listed


def test_the_page_is_made_from_it() -> None:
    written = (TESTS.parent / "docs" / "contract.md").read_text()
    assert written == page.page(), "run tools/build_contract.py"


def told(text: str, backend: str) -> list[str]:
    parsed = parse_text(text, "config.pbtxt")
    assert parsed.mistakes == ()
    return list(validate.without_effect(parsed.config, backend))


SET = {
    "runtime": 'runtime: "model.so"',
    "default_model_filename": 'default_model_filename: "m"',
    "cc_model_filenames": 'cc_model_filenames { key: "7.5" value: "m" }',
    "model_operations": 'model_operations { op_library_filename: "l.so" }',
    "input.format": "input [{ dims: 1 }, { format: FORMAT_NCHW }]",
    "batch_input": "batch_input { data_type: TYPE_FP32 }",
    "batch_output": 'batch_output { target_name: "OUT" }',
    "instance_group.secondary_devices": "instance_group [{ count: 2 }, { secondary_devices { device_id: 1 } }]",
    "optimization.graph": "optimization { graph { level: 1 } }",
    "optimization.priority": "optimization { priority: PRIORITY_MAX }",
    "optimization.cuda.graphs": "optimization { cuda { graphs: true } }",
    "optimization.cuda.graph_spec": "optimization { cuda { graph_spec { batch_size: 1 } } }",
    "optimization.cuda.busy_wait_events": "optimization { cuda { busy_wait_events: true } }",
    "optimization.cuda.output_copy_stream": "optimization { cuda { output_copy_stream: true } }",
    "optimization.execution_accelerators.gpu_execution_accelerator": (
        'optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }'
    ),
    "optimization.execution_accelerators.cpu_execution_accelerator": (
        'optimization { execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }'
    ),
    "optimization.input_pinned_memory": "optimization { input_pinned_memory { enable: false } }",
    "optimization.output_pinned_memory": "optimization { output_pinned_memory { enable: true } }",
    "optimization.gather_kernel_buffer_threshold": "optimization { gather_kernel_buffer_threshold: 1 }",
    "optimization.eager_batching": "optimization { eager_batching: true }",
    "sequence_batching.state.use_same_buffer_for_input_output": (
        "sequence_batching { state { use_same_buffer_for_input_output: true } }"
    ),
}


@pytest.mark.parametrize("field", validate.FIELDS)
def test_what_has_no_effect_is_told(field: str) -> None:
    why = validate.FIELDS[field]
    for backend in ("", *sorted(validate.BACKENDS)):
        lines = [line for line in told(SET[field], backend) if line.startswith(f"'{field}' has no effect")]
        assert len(lines) == (backend not in why.heeded_by), backend
    assert told(SET[field], "a_backend_of_a_user") == []


def test_what_is_not_set_is_not_told() -> None:
    text = (
        'backend: "python" max_batch_size: 4 input { name: "A" dims: 1 } dynamic_batching { } optimization { cuda { } }'
    )
    assert told(text, "python") == []


def test_backends_are_those_that_there_are() -> None:
    assert ENTRIES.keys() == validate.BACKENDS
