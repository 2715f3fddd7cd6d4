"""What the configuration of an OpenVINO model says about compiling it: no framework needed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from nerite.backends import machine
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core.errors import InvalidArgument
from nerite.frameworks.openvino import compile

CPU = frozenset(
    (
        "NUM_STREAMS",
        "INFERENCE_NUM_THREADS",
        "INFERENCE_PRECISION_HINT",
        "PERFORMANCE_HINT",
        "ENABLE_CPU_PINNING",
        "EXECUTION_MODE_HINT",
        "CPU_DENORMALS_OPTIMIZATION",
    )
)


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)


def context(settings: dict[str, str] | None = None, **parameters: str) -> ModelContext:
    config: dict[str, Any] = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    return ModelContext("m", 1, Path("/models/m"), config, settings or {})


def compiled(sharing: int = 1, own: tuple[int, ...] = (), **parameters: str) -> dict[str, str]:
    made = compile.make_plan(context(**parameters), CPU)
    return dict(compile.instance_plan(made, "m", InstanceContext("m_0", cores=own, sharing=sharing)).properties)


# ---- How wide ----


@pytest.mark.parametrize(
    ("sharing", "own", "streams", "threads"),
    [(1, (), "1", "4"), (2, (), "2", "4"), (9, (), "4", "4"), (2, (6, 7), "2", "2"), (1, (3,), "1", "1")],
)
def test_instances_have_a_stream_each_and_share_the_cores(
    sharing: int, own: tuple[int, ...], streams: str, threads: str
) -> None:
    assert compiled(sharing, own) == {
        "NUM_STREAMS": streams,
        "INFERENCE_NUM_THREADS": threads,
        "ENABLE_CPU_PINNING": "NO",
    }


def test_what_the_configuration_says_has_precedence() -> None:
    assert compiled(2, NUM_STREAMS="7", INFERENCE_NUM_THREADS="3", ENABLE_CPU_PINNING="YES") == {
        "NUM_STREAMS": "7",
        "INFERENCE_NUM_THREADS": "3",
        "ENABLE_CPU_PINNING": "YES",
    }


def test_with_a_hint_openvino_chooses_the_streams() -> None:
    assert "NUM_STREAMS" not in compiled(2, PERFORMANCE_HINT="throughput")


def test_other_devices_decide_themselves() -> None:
    made = compile.make_plan(context(TARGET_DEVICE="gpu.1"), CPU)
    assert compile.instance_plan(made, "m", InstanceContext("m_0", sharing=3)) == compile.CompilePlan("GPU.1", ())


# ---- Parameters ----


@pytest.mark.parametrize(
    ("key", "value", "name", "said"),
    [
        ("INFERENCE_NUM_THREADS", "3", "INFERENCE_NUM_THREADS", "3"),
        ("NUM_STREAMS", "auto", "NUM_STREAMS", "AUTO"),
        ("NUM_STREAMS", "NUMA", "NUM_STREAMS", "NUMA"),
        ("PERFORMANCE_HINT", "cumulative_throughput", "PERFORMANCE_HINT", "CUMULATIVE_THROUGHPUT"),
        ("HINT_BF16", "yes", "INFERENCE_PRECISION_HINT", "bf16"),
        ("INFERENCE_PRECISION_HINT", "f32", "INFERENCE_PRECISION_HINT", "f32"),
        ("CPU_DENORMALS_OPTIMIZATION", "YES", "CPU_DENORMALS_OPTIMIZATION", "YES"),
        ("CACHE_DIR", "/var/cache/m", "CACHE_DIR", "/var/cache/m"),
    ],
)
def test_parameters_are_properties(key: str, value: str, name: str, said: str) -> None:
    assert compile.chosen_properties(context(**{key: value}), CPU) == {name: said}


@pytest.mark.parametrize(
    ("key", "value", "refused"),
    [
        ("INFERENCE_NUM_THREADS", "-1", "to be a non-negative number, got -1"),
        ("COMPILATION_NUM_THREADS", "many", "to be a non-negative number, got many"),
        ("NUM_STREAMS", "two", "to be either AUTO/NUMA/<int_value>, got two"),
        ("PERFORMANCE_HINT", "fast", "to be LATENCY/THROUGHPUT/CUMULATIVE_THROUGHPUT, got fast"),
        ("HINT_BF16", "no", "to be YES, got no"),
    ],
)
def test_values_that_make_no_sense(key: str, value: str, refused: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        compile.chosen_properties(context(**{key: value}), CPU)
    assert error.value.message == f"expected the parameter '{key}' {refused}"


def test_yes_and_no() -> None:
    assert compile.flag_property(context(RESHAPE_IO_LAYERS="yes"), "RESHAPE_IO_LAYERS")
    assert not compile.flag_property(context(), "RESHAPE_IO_LAYERS")
    with pytest.raises(InvalidArgument, match="'RESHAPE_IO_LAYERS' to be YES or NO, got on"):
        compile.flag_property(context(RESHAPE_IO_LAYERS="on"), "RESHAPE_IO_LAYERS")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("num_streams", "NUM_STREAMS"),
        ("INFERENCE_NUM_THREAD", "INFERENCE_NUM_THREADS"),
        ("ENABLE_PADDING", "ENABLE_BATCH_PADDING"),
        ("TARGET_DEVICES", "TARGET_DEVICE"),
        ("EXECUTION_MODES_HINT", "EXECUTION_MODE_HINT"),
    ],
)
def test_what_was_nearly_meant_is_refused(wrong: str, meant: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        compile.chosen_properties(context(**{wrong: "1"}), CPU)
    assert error.value.message == (
        f"the parameter '{wrong}' is not yet supported by openvino backend. Did you mean {meant}?"
    )


def test_what_looks_like_nothing_belongs_to_somebody_else() -> None:
    others = dict.fromkeys(("EXECUTION_MODE", "WARMUP_REQUESTS", "MAX_QUEUE_SECONDS", "owner", "WORKER"), "1")
    assert compile.chosen_properties(context(**others), CPU) == {}


def test_a_property_that_the_device_does_not_have(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert compile.chosen_properties(context(COMPILATION_NUM_THREADS="2"), CPU) == {}
    assert caplog.messages == [
        "model 'm': its device has no property COMPILATION_NUM_THREADS, 'COMPILATION_NUM_THREADS' says nothing"
    ]


def test_the_cache_of_the_backend_is_that_of_models_without_one() -> None:
    settings = {"cache-dir": "/var/cache/all"}
    assert compile.chosen_properties(context(settings), CPU) == {"CACHE_DIR": "/var/cache/all"}
    assert compile.chosen_properties(context(settings, CACHE_DIR="/own"), CPU) == {"CACHE_DIR": "/own"}
