"""Which GPUs a model may be on, and whether there is room."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nerite.config.defaults import Gpus
from nerite.config.model_config import ModelConfig, ModelInstanceGroup
from nerite.core.errors import Unavailable
from nerite.observability.gpus import Gpu, GpuLibrary
from nerite.repository.version_maker import GpuPlacement

GPUS = [Gpu(number, f"GPU-{number}", "Some", 9.0, number) for number in (0, 2)]


class Nvml:
    NVMLError = RuntimeError

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
    assert there.gpus("python") == Gpus((0, 2), 7.5, preferred=True)
    # As these are installed for the tests.
    for backend in ("onnxruntime", "pytorch", "tensorflow"):
        assert there.gpus(backend) == Gpus((0, 2), 7.5, preferred=False)
    library = tmp_path / "onnxruntime/capi/libonnxruntime_providers_cuda.so"
    library.parent.mkdir(parents=True)
    (tmp_path / "onnxruntime/__init__.py").touch()
    library.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    assert there.gpus("onnxruntime").preferred
    library.unlink()
    assert not there.gpus("onnxruntime").preferred
    # Not installed.
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # type: ignore[arg-type]
    assert not there.gpus("onnxruntime").preferred


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
