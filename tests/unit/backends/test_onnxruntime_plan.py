"""What a configuration means for a session, worked out without the framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nerite.backends import machine
from nerite.backends.configuration import first_instance
from nerite.backends.interface import InstanceContext
from nerite.backends.onnxruntime import session
from nerite.backends.onnxruntime.session import CPU, ModelFile, OnnxSessionPlan, Provider
from nerite.core.errors import InvalidArgument
from onnx_models import context


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)


def made(
    directory: Path, config: dict[str, Any] | None = None, settings: dict[str, str] | None = None, **parameters: str
) -> OnnxSessionPlan:
    path = directory / "1" / "model.onnx"
    path.parent.mkdir(exist_ok=True)
    path.touch()
    values = {key: {"string_value": value} for key, value in parameters.items()}
    given = context(directory, {**(config or {}), "parameters": values}, settings)
    return session.make_plan(given, InstanceContext("m_0"), session.model_file(given))


def test_defaults(tmp_path: Path) -> None:
    found = made(tmp_path)
    assert found == OnnxSessionPlan(
        file=ModelFile(tmp_path / "1" / "model.onnx", found.file.modified_ns),
        providers=(CPU,),
        graph_level="ORT_ENABLE_ALL",
        parallel=False,
        intra_op_threads=4,
        inter_op_threads=4,
        global_threads=False,
        memory_arena=True,
        memory_pattern=True,
        entries=(("session.inter_op.allow_spinning", "0"), ("session.intra_op.allow_spinning", "0")),
        op_libraries=(),
    )


@pytest.mark.parametrize(
    ("groups", "threads"),
    [
        ([], 4),
        ([{"kind": "KIND_CPU", "count": 1}], 8),
        ([{"kind": "KIND_CPU", "count": 2}], 4),
        ([{"kind": "KIND_CPU", "count": 3}], 2),
        ([{"kind": "KIND_CPU", "count": 1}, {"kind": "KIND_CPU", "count": 1}], 4),
        ([{"kind": "KIND_GPU", "count": 2, "gpus": [0, 1]}], 2),
        ([{"kind": "KIND_CPU", "count": 50}], 1),
    ],
)
def test_the_cores_are_divided_among_the_instances(tmp_path: Path, groups: list[Any], threads: int) -> None:
    assert made(tmp_path, {"instance_group": groups}).intra_op_threads == threads


def test_thread_counts_of_the_model_go_before_those_of_the_backend(tmp_path: Path) -> None:
    settings = {"intra_op_thread_count": "3", "inter_op_thread_count": "5"}
    found = made(tmp_path, settings=settings, intra_op_thread_count="6", inter_op_thread_count="0")
    assert (found.intra_op_threads, found.inter_op_threads) == (6, 5)


def test_the_global_pool_ignores_the_model(tmp_path: Path) -> None:
    settings = {"enable-global-threadpool": "1", "intra_op_thread_count": "3"}
    found = made(tmp_path, settings=settings, intra_op_thread_count="6")
    assert (found.global_threads, found.intra_op_threads, found.inter_op_threads) == (True, 3, 8)


@pytest.mark.parametrize(
    ("level", "name"),
    [(0, "ORT_ENABLE_ALL"), (1, "ORT_ENABLE_EXTENDED"), (-1, "ORT_ENABLE_BASIC"), (2, "ORT_DISABLE_ALL")],
)
def test_graph_levels(tmp_path: Path, level: int, name: str) -> None:
    assert made(tmp_path, {"optimization": {"graph": {"level": level}}}).graph_level == name


def test_other_options(tmp_path: Path) -> None:
    found = made(
        tmp_path,
        execution_mode="1",
        enable_mem_arena="off",
        enable_mem_pattern="FALSE",
        **{"session.use_device_allocator_for_initializers": "1", "session.intra_op.allow_spinning": "1"},
    )
    assert (found.parallel, found.memory_arena, found.memory_pattern) == (True, False, False)
    assert dict(found.entries) == {
        "session.inter_op.allow_spinning": "0",
        "session.intra_op.allow_spinning": "1",
        "session.use_device_allocator_for_initializers": "1",
    }


@pytest.mark.parametrize(
    ("key", "value", "complaint", "expected"),
    [
        (
            "execution_mode",
            "2",
            "Invalid configuration value provided. Expected values for  execution_mode are 0 or 1 but got 2 .",
            "0 or 1",
        ),
        ("execution_mode", "parallel", "failed to convert 'parallel' to integral number", "0 or 1"),
        (
            "intra_op_thread_count",
            "many",
            "failed to convert 'many' to integral number",
            "a number of threads, or 0",
        ),
        (
            "inter_op_thread_count",
            "3000000000",
            "failed to convert '3000000000' to integral number",
            "a number of threads, or 0",
        ),
        ("enable_mem_arena", "perhaps", "failed to convert 'perhaps' to boolean", "true or false"),
        ("enable_mem_pattern", "", "failed to convert '' to boolean", "true or false"),
    ],
)
def test_values_that_make_no_sense(tmp_path: Path, key: str, value: str, complaint: str, expected: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        made(tmp_path, **{key: value})
    assert refused.value.message == f"{complaint}, in parameter '{key}' of model 'm', which takes {expected}"


@pytest.mark.parametrize(
    ("key", "value", "complaint", "expected"),
    [
        ("intra_op_thread_count", "all", "failed to convert 'all' to integral number", "a number of threads, or 0"),
        ("enable-global-threadpool", "2", "failed to convert '2' to boolean", "true or false"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, key: str, value: str, complaint: str, expected: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        made(tmp_path, {"backend": "onnxruntime"}, {key: value})
    assert refused.value.message == f"{complaint}, in --backend-config=onnxruntime,{key}=…, which takes {expected}"


def shrinking(tmp_path: Path, arenas: str, gpus: Sequence[int] = (), **parameters: str) -> Mapping[str, str]:
    given = {"memory.enable_memory_arena_shrinkage": arenas, **parameters}
    config = {
        "instance_group": [{"kind": "KIND_GPU" if gpus else "KIND_CPU", "gpus": list(gpus)}],
        "parameters": {key: {"string_value": value} for key, value in given.items()},
    }
    return session.run_entries(context(tmp_path, config))


@pytest.mark.parametrize(
    ("arenas", "gpus"), [("cpu:0", ()), ("cpu", ()), ("cpu:0;gpu:0", ()), ("gpu:2;cpu:0;", (1, 2))]
)
def test_arenas_to_shrink(tmp_path: Path, arenas: str, gpus: Sequence[int]) -> None:
    assert shrinking(tmp_path, arenas, gpus) == {"memory.enable_memory_arena_shrinkage": arenas}
    assert shrinking(tmp_path, "") == {}


@pytest.mark.parametrize(
    ("arenas", "parameters"),
    [("all", {}), ("cpu:0;all", {}), ("cpu:1", {}), ("gpu:0", {}), ("cpu:0", {"enable_mem_arena": "0"})],
)
def test_arenas_that_there_are_not(tmp_path: Path, arenas: str, parameters: dict[str, str]) -> None:
    """ONNX Runtime would fail every request for them."""
    with pytest.raises(InvalidArgument) as refused:
        shrinking(tmp_path, arenas, **parameters)
    assert refused.value.message == (
        f"'{arenas}' names an arena that does not exist, in parameter 'memory.enable_memory_arena_shrinkage' of model "
        "'m', which takes cpu:0 (with 'enable_mem_arena') and gpu:N of the model's GPUs, separated by ';'"
    )


@pytest.mark.parametrize(
    ("groups", "instance"),
    [
        ([], InstanceContext("m", "CPU", 0)),
        ([{"kind": "KIND_AUTO"}], InstanceContext("m", "CPU", 0)),
        ([{"kind": "KIND_CPU"}, {"kind": "KIND_GPU", "gpus": [3, 4]}], InstanceContext("m", "GPU", 3)),
    ],
)
def test_the_first_instance(tmp_path: Path, groups: list[Any], instance: InstanceContext) -> None:
    assert first_instance(context(tmp_path, {"instance_group": groups})) == instance


# ---- Execution providers ----


def wanted(
    gpu: list[Any] | None = None, cpu: list[Any] | None = None, kind: str = "GPU", **parameters: str
) -> list[Provider]:
    accelerators = {"gpu_execution_accelerator": gpu or [], "cpu_execution_accelerator": cpu or []}
    config = {
        "optimization": {"execution_accelerators": accelerators},
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }
    return list(session.wanted_providers(context(Path(), config), InstanceContext("m_0", kind, 2)))


CUDA = Provider("CUDAExecutionProvider", (("device_id", "2"),))


def test_a_gpu_is_used_through_cuda_with_the_cpu_behind() -> None:
    assert wanted() == [CUDA, CPU]
    assert wanted(kind="CPU") == [CPU]
    # An accelerator for another kind of instance does not matter.
    assert wanted([{"name": "tensorrt"}], kind="CPU") == [CPU]


def test_tensorrt_options_have_onnx_runtimes_names() -> None:
    parameters = {"precision_mode": "FP16", "max_workspace_size_bytes": "1024", "trt_engine_cache_enable": "1"}
    assert wanted([{"name": "tensorrt", "parameters": parameters}]) == [
        Provider(
            "TensorrtExecutionProvider",
            (
                ("device_id", "2"),
                ("trt_engine_cache_enable", "1"),
                ("trt_fp16_enable", "1"),
                ("trt_max_workspace_size", "1024"),
            ),
        ),
        CUDA,
        CPU,
    ]


def test_cuda_options_old_and_new() -> None:
    new = [{"name": "cuda", "parameters": {"cudnn_conv_use_max_workspace": "0"}}]
    found = wanted(new, cudnn_conv_algo_search="1", arena_extend_strategy="1", do_copy_in_default_stream="true")
    assert dict(found[0].options) == {
        "device_id": "2",
        "cudnn_conv_use_max_workspace": "0",
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",
        "do_copy_in_default_stream": "1",
    }


def test_openvino_runs_on_the_cpu_with_its_parameters() -> None:
    accelerators = [{"name": "openvino", "parameters": {"precision": "FP32"}}]
    assert wanted(cpu=accelerators, kind="CPU") == [
        Provider("OpenVINOExecutionProvider", (("device_type", "CPU"), ("precision", "FP32"))),
        CPU,
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"gpu": [{"name": "openvino"}]},
            "unknown Execution Accelerator 'openvino' is requested as gpu_execution_accelerator of model 'm'; "
            "use cuda or tensorrt",
        ),
        (
            {"cpu": [{"name": "cuda"}]},
            "unknown Execution Accelerator 'cuda' is requested as cpu_execution_accelerator of model 'm'; use openvino",
        ),
        (
            {"gpu": [{"name": "tensorrt", "parameters": {"precision_mode": "FP8"}}]},
            "unsupported precision mode 'FP8' is requested, in parameter 'precision_mode' of accelerator 'tensorrt' of "
            "model 'm', which takes FP32, FP16, BF16, INT8",
        ),
        (
            {"gpu": [{"name": "tensorrt", "parameters": {"speed": "max"}}]},
            "unknown parameter 'speed' is provided for TensorRT Execution Accelerator of model 'm', which accepts "
            "precision_mode, max_workspace_size_bytes, int8_calibration_table_name, int8_use_native_calibration_table, "
            "and parameters that begin with trt_",
        ),
        (
            {"gpu": [{"name": "tensorrt", "parameters": {"trt_cuda_graph_enable": "true"}}]},
            "a CUDA graph reads its inputs at fixed addresses, and those of requests differ, in parameter "
            "'trt_cuda_graph_enable' of accelerator 'tensorrt' of model 'm', which takes false; models of the backend "
            "tensorrt can use graphs",
        ),
    ],
)
def test_accelerators_that_we_do_not_know(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        wanted(**arguments)
    assert refused.value.message == text


@pytest.mark.parametrize(
    ("key", "value", "complaint", "expected"),
    [
        (
            "cudnn_conv_algo_search",
            "3",
            "unsupported cudnn_conv_algo_search value '3' is requested",
            "0 (EXHAUSTIVE), 1 (HEURISTIC), 2 (DEFAULT)",
        ),
        (
            "arena_extend_strategy",
            "largest",
            "failed to convert 'largest' to integral number",
            "0 (kNextPowerOfTwo), 1 (kSameAsRequested)",
        ),
        ("gpu_mem_limit", "2GB", "failed to convert '2GB' to integral number", "a number of bytes"),
        ("do_copy_in_default_stream", "yes", "failed to convert 'yes' to boolean", "true or false"),
    ],
)
def test_cuda_options_that_make_no_sense(key: str, value: str, complaint: str, expected: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        wanted(**{key: value})
    assert refused.value.message == f"{complaint}, in parameter '{key}' of model 'm', which takes {expected}"
    assert wanted(kind="CPU", **{key: value}) == [CPU]
