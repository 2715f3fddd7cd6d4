"""Which GPUs a model may be on, and whether there is room."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from distributions import install, only_these
from nerite.config.defaults import Gpus
from nerite.config.model_config import ModelConfig, ModelInstanceGroup, ModelParameter
from nerite.core.errors import Unavailable
from nerite.observability.gpus import Gpu, GpuLibrary
from nerite.repository.version_maker import GpuPlacement

GPUS = [Gpu(number, f"GPU-{number}", "Some", 9.0, number) for number in (0, 2)]


class Nvml:
    NVMLError = RuntimeError

    @staticmethod
    def nvmlSystemGetDriverVersion() -> str:
        return "570.86.15"

    @staticmethod
    def nvmlSystemGetCudaDriverVersion() -> int:
        return 12080

    @staticmethod
    def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
        if handle == 2:
            raise RuntimeError("Not Supported")
        return SimpleNamespace(total=1000, used=600)


def placement(limits: dict[int, float]) -> GpuPlacement:
    return GpuPlacement(GpuLibrary(Nvml), GPUS, 7.5, limits)


def model(kind: ModelInstanceGroup.Kind, *gpus: int) -> ModelConfig:
    return ModelConfig(name="m", instance_group=(ModelInstanceGroup(kind=kind, gpus=gpus),))


def test_gpus_for_frameworks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = placement({})
    assert there.gpus(ModelConfig(backend="python")) == Gpus((0, 2), 7.5)
    # As these are installed for the tests.
    for backend in ("onnxruntime", "pytorch", "tensorflow"):
        assert there.gpus(ModelConfig(backend=backend)).misfit.endswith(" is a CPU build")
    only_these(tmp_path, monkeypatch)
    install(tmp_path, "onnxruntime-gpu 1.26.0", "torch 2.13.0")
    assert there.gpus(ModelConfig(backend="onnxruntime")) == Gpus((0, 2), 7.5)
    assert there.gpus(ModelConfig(backend="pytorch")) == Gpus(
        (0, 2),
        7.5,
        False,
        "torch 2.13.0 was built for CUDA 13.0, and the driver supports CUDA up to 12.8",
        "upgrade the driver to 580 or newer, or install the build for CUDA 12: pip uninstall -y torch && pip install "
        "torch --index-url https://download.pytorch.org/whl/cu126",
    )
    assert there.gpus(ModelConfig(backend="tensorflow")).misfit == "tensorflow is not installed"


def test_an_environment_of_its_own_may_have_another_build() -> None:
    environment = {"EXECUTION_ENV_PATH": ModelParameter(string_value="environment")}
    own = ModelConfig(backend="onnxruntime", parameters=environment)
    assert placement({}).gpus(own) == Gpus((0, 2), 7.5, preferred=False)
    assert placement({}).gpus(dataclasses.replace(own, backend="tensorrt")) == Gpus((0, 2), 7.5)


def test_no_gpus_that_a_framework_could_use() -> None:
    assert GpuPlacement(GpuLibrary(None), [], 7.5).gpus(ModelConfig(backend="onnxruntime")) == Gpus((), 7.5)


def test_a_full_gpu_takes_no_more_models() -> None:
    with pytest.raises(Unavailable) as refusal:
        placement({0: 0.5}).check_room(model("KIND_GPU", 0))
    assert refusal.value.message == (
        "can not create model 'm': memory limit set for GPU 0 has exceeded, model loading is rejected. 600 of its "
        "1,000 bytes are used, and --model-load-gpu-limit allows 50%: unload a model, or raise the limit"
    )


@pytest.mark.parametrize(
    ("limits", "config"),
    [
        ({0: 0.6}, model("KIND_GPU", 0)),
        ({}, model("KIND_GPU", 0)),
        ({0: 0.5}, model("KIND_GPU", 2)),
        ({0: 0.5}, model("KIND_CPU")),
        # A GPU that does not tell, and one that is not there.
        ({2: 0.0}, model("KIND_GPU", 2)),
        ({5: 0.0}, model("KIND_GPU", 0)),
    ],
)
def test_others_are_loaded(limits: dict[int, float], config: ModelConfig) -> None:
    placement(limits).check_room(config)
