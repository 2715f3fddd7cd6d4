"""Finding GPUs, and what is reported of them: asked of the stand-in for nvidia-ml-py, and of the package itself."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from doubles import samples
from nerite.config.options import MetricsOptions
from nerite.observability import gpus
from nerite.observability.gpus import (
    GpuLibrary,
    GpuMetrics,
    of_this_machine,
    open_library,
    start_gpu_metrics,
    visible_indices,
)
from serving import eventually

STAND_IN = Path(__file__).resolve().parents[2] / "stand_ins" / "nvml"
BIG: dict[str, Any] = {
    "uuid": "GPU-aa01",
    "name": "Big",
    "capability": [9, 0],
    "memory": [1000, 250],
    "percent": 37,
    "milliwatts": 120500,
    "milliwatts_allowed": 700000,
    "millijoules": 5000,
}
OLD = {"uuid": "GPU-ab02", "name": "Old", "capability": [3, 5], "memory": [500, 0]}

Give = Callable[[list[dict[str, Any]]], GpuLibrary]


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Give]:
    """Let the machine have GPUs; may be called again, when they do something else."""
    file = tmp_path / "gpus.json"
    monkeypatch.setenv("STAND_IN_GPUS", str(file))
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)

    def given(found: list[dict[str, Any]]) -> GpuLibrary:
        file.with_suffix(".new").write_text(json.dumps(found))
        file.with_suffix(".new").rename(file)
        return open_library()

    yield given
    sys.modules.pop("pynvml", None)


UUIDS = ("GPU-aa01", "GPU-ab02", "GPU-cc03")


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("", []),
        ("-1", []),
        ("0,7,1", [0]),
        ("1,1", []),
        ("GPU-ab02,GPU-aa01", [1, 0]),
        ("GPU-c", [2]),
        ("GPU-a", []),
        ("MIG-1234", []),
    ],
)
def test_cuda_visible_devices(visible: str | None, indices: list[int]) -> None:
    assert visible_indices(UUIDS, visible) == indices


def test_gpus_are_found(give: Give) -> None:
    found = of_this_machine(give([BIG, OLD]), {}, 0.0)
    assert [(gpu.number, gpu.uuid, gpu.name, gpu.capability) for gpu in found] == [
        (0, "GPU-aa01", "Big", 9.0),
        (1, "GPU-ab02", "Old", 3.5),
    ]


def test_a_process_that_sees_one_gpu_calls_it_the_first(give: Give) -> None:
    (gpu,) = of_this_machine(give([BIG, OLD]), {"CUDA_VISIBLE_DEVICES": "1"}, 0.0)
    assert (gpu.number, gpu.name) == (0, "Old")


def test_gpus_that_are_too_old_are_left_alone(give: Give, caplog: pytest.LogCaptureFixture) -> None:
    assert [gpu.name for gpu in of_this_machine(give([OLD, BIG]), {}, 6.0)] == ["Big"]
    assert [gpu.number for gpu in of_this_machine(give([OLD, BIG]), {}, 6.0)] == [1]
    assert "GPU 0 (Old) is not used: its compute capability 3.5 is below the 6.0 of" in caplog.text


def test_the_package_itself_whether_there_is_a_driver_or_not() -> None:
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        assert of_this_machine(open_library(), {}, 0.0) == []
    else:
        found = of_this_machine(open_library(), {}, 0.0)
        assert all(gpu.uuid.startswith("GPU-") and gpu.capability > 0 for gpu in found)


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        (False, "an NVIDIA driver is loaded, but GPUs cannot be used: pip install 'nerite[gpu]'"),
        (True, "but GPUs cannot be used: NVML says 'Driver/library version mismatch'"),
    ],
)
def test_a_driver_that_cannot_be_asked(
    installed: bool,
    said: str,
    give: Give,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    driver = tmp_path / "driver"
    monkeypatch.setattr(gpus, "DRIVER_VERSION_FILE", driver)
    assert of_this_machine(open_library(), {}, 0.0) == []
    assert not caplog.text
    driver.touch()
    assert of_this_machine(open_library(), {}, 0.0) == []
    assert said in caplog.text


def reported(metrics: GpuMetrics) -> dict[tuple[str, str], float]:
    return {
        (name, labels.removeprefix('gpu_uuid="').removesuffix('"')): value
        for name, values in samples(metrics.write_metrics).items()
        for labels, value in values.items()
    }


def test_what_is_reported(give: Give) -> None:
    library = give([BIG, OLD])
    metrics = GpuMetrics(library, of_this_machine(library, {}, 0.0), 0.01)
    try:
        assert reported(metrics) == {
            ("nv_gpu_utilization", "GPU-aa01"): 0.37,
            ("nv_gpu_memory_total_bytes", "GPU-aa01"): 1000,
            ("nv_gpu_memory_used_bytes", "GPU-aa01"): 250,
            ("nv_gpu_power_usage", "GPU-aa01"): 120.5,
            ("nv_gpu_power_limit", "GPU-aa01"): 700,
            # Since the server started.
            ("nv_energy_consumption", "GPU-aa01"): 0,
            # What a GPU does not tell is not made up.
            ("nv_gpu_memory_total_bytes", "GPU-ab02"): 500,
            ("nv_gpu_memory_used_bytes", "GPU-ab02"): 0,
        }
        give([{**BIG, "millijoules": 7500, "percent": 99}, OLD])
        eventually(lambda: reported(metrics)["nv_gpu_utilization", "GPU-aa01"] == 0.99)
        eventually(lambda: reported(metrics)["nv_energy_consumption", "GPU-aa01"] == 2.5)
    finally:
        metrics.close()


def test_when_nothing_is_reported(give: Give, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    library = give([BIG])
    found = of_this_machine(library, {}, 0.0)
    assert start_gpu_metrics(library, found, MetricsOptions(gpu=False), {}) is None
    assert start_gpu_metrics(library, found, MetricsOptions(), {"TRITON_SERVER_CPU_ONLY": "1"}) is None
    assert start_gpu_metrics(library, [], MetricsOptions(), {}) is None
    metrics = start_gpu_metrics(library, found, MetricsOptions(), {})
    assert metrics is not None
    metrics.close()
    assert caplog.messages == ["Collecting metrics for GPU 0: Big"]
