from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from config_strategies import configs
from hypothesis import given, settings
from hypothesis import strategies as st

from nerite.config.defaults import Gpus, misses_gpus, normalise, normalise_instances
from nerite.config.json_form import to_json
from nerite.config.model_config import ModelConfig, ModelEnsembling, ModelInstanceGroup
from nerite.config.text import parse_text


def normalised(text: str, gpus: tuple[int, ...] = (), **changes: Any) -> dict[str, Any]:
    config = dataclasses.replace(parse_text(text).config, name="m", **changes)
    return to_json(normalise_instances(normalise(config), Gpus(gpus)))


@given(configs(), st.sets(st.integers(0, 3)).map(lambda numbers: Gpus(tuple(numbers))))
@settings(max_examples=100)
def test_filling_in_twice_is_filling_in_once(config: ModelConfig, gpus: Gpus) -> None:
    once = normalise_instances(normalise(config), gpus)
    assert normalise_instances(normalise(once), gpus) == once


def test_an_empty_configuration() -> None:
    config = normalised("")
    assert config["version_policy"] == {"latest": {"num_versions": 1}}
    assert config["optimization"]["input_pinned_memory"] == {"enable": True}
    assert config["optimization"]["output_pinned_memory"] == {"enable": True}
    assert [(group["name"], group["kind"], group["count"]) for group in config["instance_group"]] == [
        ("m", "KIND_CPU", 1)
    ]


def test_what_is_given_stays() -> None:
    config = normalised(
        "version_policy { all { } } optimization { input_pinned_memory { } } "
        "max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 2 ] }"
    )
    assert config["version_policy"] == {"all": {}}
    assert config["optimization"]["input_pinned_memory"] == {"enable": False}
    assert config["dynamic_batching"]["preferred_batch_size"] == [2]


@pytest.mark.parametrize(("batch", "sizes"), [(0, []), (8, [8])])
def test_the_largest_batch_is_the_preferred_one(batch: int, sizes: list[int]) -> None:
    config = normalised(f"max_batch_size: {batch} dynamic_batching {{ }}")
    assert config["dynamic_batching"]["preferred_batch_size"] == sizes
    config = normalised(f"max_batch_size: {batch} sequence_batching {{ oldest {{ }} }}")
    assert config["sequence_batching"]["oldest"]["preferred_batch_size"] == sizes


def test_sequences_are_idle_for_a_second() -> None:
    assert normalised("sequence_batching { }")["sequence_batching"]["max_sequence_idle_microseconds"] == 1_000_000
    given = normalised("sequence_batching { max_sequence_idle_microseconds: 5 }")
    assert given["sequence_batching"]["max_sequence_idle_microseconds"] == 5


def test_an_ensemble_has_neither_optimization_nor_instances_and_says_that_it_is_not_decoupled() -> None:
    config = normalised('platform: "ensemble" ensemble_scheduling { }')
    assert "optimization" not in config
    assert config["instance_group"] == []
    assert config["model_transaction_policy"] == {"decoupled": False}


@pytest.mark.parametrize(
    ("backend", "gpus", "kind", "count", "used"),
    [
        ("python", (), "KIND_CPU", 1, []),
        ("onnxruntime", (), "KIND_CPU", 2, []),
        ("tensorflow", (), "KIND_CPU", 2, []),
        ("pytorch", (), "KIND_CPU", 1, []),
        ("onnxruntime", (1, 0), "KIND_GPU", 1, [0, 1]),
        ("python", (0,), "KIND_GPU", 1, [0]),
        ("openvino", (0,), "KIND_CPU", 1, []),
        ("fil", (0,), "KIND_CPU", 1, []),
    ],
)
def test_the_default_group(backend: str, gpus: tuple[int, ...], kind: str, count: int, used: list[int]) -> None:
    (group,) = normalised("", gpus, backend=backend)["instance_group"]
    assert (group["kind"], group["count"], group["gpus"]) == (kind, count, used)


@pytest.mark.parametrize(
    ("given", "gpus", "kind", "used"),
    [
        ("KIND_AUTO", (0, 1), "KIND_GPU", (0, 1)),
        ("KIND_AUTO", (), "KIND_CPU", ()),
        ("KIND_CPU", (0,), "KIND_CPU", ()),
        ("KIND_MODEL", (0,), "KIND_MODEL", ()),
        ("KIND_GPU", (), "KIND_GPU", ()),
    ],
)
def test_the_kind_of_a_group(given: Any, gpus: tuple[int, ...], kind: str, used: tuple[int, ...]) -> None:
    config = ModelConfig(name="m", instance_group=(ModelInstanceGroup(kind=given),))
    (group,) = normalise_instances(config, Gpus(gpus)).instance_group
    assert (group.name, group.kind, group.gpus, group.count) == ("m_0", kind, used, 1)


def test_a_framework_for_the_cpu_alone_gets_no_gpus_unless_told() -> None:
    gpus = Gpus((0, 1), preferred=False)
    config = ModelConfig(name="m", backend="onnxruntime")
    (group,) = normalise_instances(config, gpus).instance_group
    assert (group.kind, group.gpus, group.count) == ("KIND_CPU", (), 2)
    told = dataclasses.replace(config, instance_group=(ModelInstanceGroup(kind="KIND_GPU"),))
    assert normalise_instances(told, gpus).instance_group[0].gpus == (0, 1)


UNFIT = Gpus((0,), preferred=False, misfit="it is a CPU build")


@pytest.mark.parametrize(
    ("backend", "groups", "gpus", "kind", "misses"),
    [
        ("onnxruntime", (), UNFIT, "KIND_CPU", True),
        ("onnxruntime", (ModelInstanceGroup(),), UNFIT, "KIND_CPU", True),
        ("onnxruntime", (), Gpus((0,)), "KIND_GPU", False),
        ("onnxruntime", (), UNFIT._replace(numbers=()), "KIND_CPU", False),
        ("onnxruntime", (), UNFIT._replace(misfit=""), "KIND_CPU", False),
        ("onnxruntime", (ModelInstanceGroup(kind="KIND_CPU"),), UNFIT, "KIND_CPU", False),
        # It would be on the CPU anyway.
        ("fil", (), UNFIT, "KIND_CPU", False),
        # These are refused.
        ("onnxruntime", (ModelInstanceGroup(kind="KIND_GPU"),), UNFIT, "KIND_GPU", False),
        ("onnxruntime", (ModelInstanceGroup(gpus=(0,)),), UNFIT, "KIND_GPU", False),
        ("tensorrt", (), UNFIT._replace(preferred=True), "KIND_GPU", False),
    ],
)
def test_which_models_are_on_the_cpu_for_lack_of_a_build(
    backend: str, groups: tuple[ModelInstanceGroup, ...], gpus: Gpus, kind: str, misses: bool
) -> None:
    config = ModelConfig(name="m", backend=backend, instance_group=groups)
    assert normalise_instances(config, gpus).instance_group[0].kind == kind
    assert misses_gpus(config, gpus) == misses


def test_an_ensemble_misses_no_gpus() -> None:
    config = ModelConfig(name="m", platform="ensemble", ensemble_scheduling=ModelEnsembling())
    assert not misses_gpus(config, UNFIT)


def test_a_listed_gpu_that_is_not_there_makes_auto_the_cpu() -> None:
    config = ModelConfig(name="m", instance_group=(ModelInstanceGroup(gpus=(0, 7)),))
    assert normalise_instances(config, Gpus((0, 1))).instance_group[0].kind == "KIND_CPU"
