"""TensorRT: what follows from an engine's description and a plan's header alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs import as_backends_get_it
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, InvalidArgument, NeriteError, Unavailable, Unsupported
from nerite.frameworks.tensorrt import engine, execution
from nerite.frameworks.tensorrt.backend import check_batches, complete_from_description, execution_options
from nerite.frameworks.tensorrt.engine import EngineDescription, EngineTensor, ShapeRange, largest_batch

SMALL = {"IN": ShapeRange((1, 4), (2, 4), (4, 4))}
LARGE = {"IN": ShapeRange((1, 4), (16, 4), (32, 4))}
ENGINE = EngineDescription(
    [EngineTensor("IN", dtypes.FP32, (-1, 4))], [EngineTensor("OUT", dtypes.FP32, (-1, 4))], [SMALL, LARGE]
)
SIZES = EngineDescription(
    [EngineTensor("SIZES", dtypes.INT32, (2,), shape_values=True)],
    [EngineTensor("OUT", dtypes.FP32, (-1, -1))],
    [{}],
)


def context(config: dict[str, Any] | None = None, directory: Path = Path("/models/m"), **parameters: str) -> Any:
    given = {key: {"string_value": value} for key, value in parameters.items()}
    return ModelContext("m", 1, directory, as_backends_get_it({"parameters": given, **(config or {})}))


@pytest.mark.parametrize(
    ("rows", "offered", "index"),
    [(1, (0, 1), 0), (3, (0, 1), 0), (4, (0, 1), 0), (12, (0, 1), 1), (1, (1,), 1), (32, (0, 1), 1)],
)
def test_the_profile_for_the_most_alike_shapes(rows: int, offered: tuple[int, ...], index: int) -> None:
    there = {each: ENGINE.profiles[each] for each in offered}
    assert engine.choose_profile("m", there, {"IN": (rows, 4)}) == index


@pytest.mark.parametrize(
    ("shape", "offered", "said"),
    [
        ((5, 4), (0,), "model expected the shape of dimension 0 to be between 1 and 4 but received 5"),
        ((1, 7), (0,), "model expected the shape of dimension 1 to be between 4 and 4 but received 7"),
        ((4,), (0,), "model expected 2 dimensions but received 1 dimensions"),
        (
            (33, 4),
            (0, 1),
            "model expected the shape of dimension 0 to be between 1 and 4 but received 33. None of the profiles 0, 1 "
            "takes it",
        ),
    ],
)
def test_shapes_that_no_profile_takes(shape: tuple[int, ...], offered: tuple[int, ...], said: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        engine.choose_profile("m", {each: ENGINE.profiles[each] for each in offered}, {"IN": shape})
    assert refusal.value.message == f"request specifies invalid shape for input 'IN' for m. Error details: {said}"


def test_the_profiles_of_an_instance() -> None:
    groups = [{"name": "a", "profile": ["1", "0", "1"]}, {"name": "a_b", "profile": []}]
    config = {"instance_group": groups}
    assert engine.profiles_of_group("m", engine.group_of(config, "a_0"), 2) == (1, 0)
    assert engine.profiles_of_group("m", engine.group_of(config, "a_b_3"), 2) == (0,)
    with pytest.raises(InvalidArgument, match='has profile: "2", and the engine has the profiles 0 to 1'):
        engine.profiles_of_group("m", {"name": "a", "profile": ["2"]}, 2)
    with pytest.raises(InvalidArgument, match='has profile: "x", and the engine has the profile 0 alone'):
        engine.profiles_of_group("m", {"name": "a", "profile": ["x"]}, 1)


def test_how_an_instance_runs() -> None:
    given = {
        "instance_group": [{"name": "m_0", "profile": ["1"]}],
        "optimization": {"priority": "PRIORITY_MAX", "cuda": {"graphs": True}},
    }
    strategy = {"execution_context_allocation_strategy": "ON_PROFILE_CHANGE"}
    way = execution_options(context(given, **strategy), InstanceContext("m_0_1", "GPU", 3), 2)
    assert way == (3, (1,), "ON_PROFILE_CHANGE", "PRIORITY_MAX", True)
    assert execution_options(context(), InstanceContext("m_0", "GPU"), 1) == (
        0,
        (0,),
        "STATIC",
        "PRIORITY_DEFAULT",
        False,
    )
    with pytest.raises(InvalidArgument, match="is 'HEAP', and may be STATIC or ON_PROFILE_CHANGE"):
        execution_options(context(execution_context_allocation_strategy="HEAP"), InstanceContext("m_0", "GPU"), 1)


def test_the_largest_batch() -> None:
    assert largest_batch([SMALL]) == 4
    assert largest_batch([SMALL, LARGE]) == 32
    assert largest_batch([{"A": ShapeRange((1,), (1,), (8,)), "B": ShapeRange((1,), (1,), (2,))}]) == 2


def test_a_configuration_is_completed() -> None:
    whole = complete_from_description(context(), ENGINE)
    assert whole["max_batch_size"] == 4
    assert whole["dynamic_batching"] == {}
    assert whole["input"] == [{"name": "IN", "data_type": "TYPE_FP32", "dims": [4]}]
    assert whole["output"] == [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [4]}]
    # No more than the profiles that are used take.
    narrow = ENGINE._replace(profiles=[{"IN": ShapeRange((1, 4), (2, 4), (2, 4))}, LARGE])
    assert complete_from_description(context(), narrow)["max_batch_size"] == 2
    used = {"instance_group": [{"name": "m", "profile": ["1"]}]}
    assert complete_from_description(context(used), narrow)["max_batch_size"] == 4


def test_an_engine_of_one_size_has_no_batches() -> None:
    fixed = EngineDescription(
        [EngineTensor("IN", dtypes.FP16, (8, 4))],
        [EngineTensor("OUT", dtypes.BOOL, (8,))],
        [{"IN": ShapeRange((8, 4), (8, 4), (8, 4))}],
    )
    whole = complete_from_description(context(), fixed)
    assert not whole["max_batch_size"]
    assert whole["input"] == [{"name": "IN", "data_type": "TYPE_FP16", "dims": [8, 4]}]


def test_sizes_as_values() -> None:
    whole = complete_from_description(context(), SIZES)
    assert whole["input"] == [{"name": "SIZES", "data_type": "TYPE_INT32", "dims": [2], "is_shape_tensor": True}]
    assert whole.get("max_batch_size", 0) == 0
    with pytest.raises(Unsupported, match="SIZES hold sizes as values, and requests with such tensors are not batched"):
        check_batches("m", {"max_batch_size": 2}, SIZES)


def test_batches_that_no_profile_takes() -> None:
    with pytest.raises(Internal) as refusal:
        complete_from_description(context({"max_batch_size": 128}), ENGINE._replace(profiles=[SMALL]))
    assert refusal.value.message == (
        "autofill failed for model 'm': configuration specified max-batch 128 but TensorRT engine only supports "
        "max-batch 4. Set max_batch_size: 4, or build the engine with a profile for 128 rows"
    )


def test_the_version_in_a_plan(tmp_path: Path) -> None:
    plan = tmp_path / "model.plan"
    plan.write_bytes(b"ftrt" + bytes(20) + bytes((10, 3, 0, 26)) + b"engine")
    assert engine.plan_version(plan) == "10.3.0.26"
    plan.write_bytes(b"ftrt" + b"\1\0\0\0" + bytes(16) + bytes((10, 3, 0, 26)) + b"engine")
    assert engine.plan_version(plan) == ""
    plan.write_bytes(b"ftrt" + bytes(8))
    assert engine.plan_version(plan) == ""


@pytest.mark.parametrize(
    ("content", "kind", "said"),
    [
        (None, Unavailable, "unable to find '{}/1/model.plan' for model instance 'm'"),
        (b"onnx", InvalidArgument, "'{}/1/model.plan' is no TensorRT engine. Make one: trtexec --onnx=model.onnx"),
    ],
)
def test_a_plan_that_is_none(content: bytes | None, kind: type[NeriteError], said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "model.plan").write_bytes(content)
    with pytest.raises(kind) as refusal:
        engine.find_plan(context(directory=tmp_path))
    assert said.format(tmp_path) in refusal.value.message


def test_a_machine_without_gpus() -> None:
    with pytest.raises(Unsupported) as refusal:
        execution.require_device("m", 0)
    assert refusal.value.message.startswith(
        "unable to load model 'm', TensorRT backend supports only GPU device, and this machine has no GPU that could "
        "be used (CUDA says: "
    )
