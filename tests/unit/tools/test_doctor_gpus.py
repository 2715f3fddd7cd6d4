"""What ``nerite doctor`` says of GPUs and of the frameworks that could use them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributions import install, only_these
from nerite.observability import gpus
from nerite.tools import doctor, doctor_gpus
from nerite.tools.doctor_machine import GB, DoctorFinding, FindingLevel

STAND_IN = Path(__file__).resolve().parents[2] / "stand_ins" / "nvml"
TORCH = """
class cuda:
    is_available = staticmethod(lambda: {available})
    get_arch_list = staticmethod(lambda: {architectures!r}.split())
"""
"""In the place of PyTorch: what the doctor asks it."""


class Machine:
    """A machine with GPUs, and a folder of packages."""

    def __init__(self, site: Path) -> None:
        self.site = site

    def has(self, *found: dict[str, Any]) -> None:
        Path(os.environ["STAND_IN_GPUS"]).write_text(json.dumps(found))

    def has_torch(self, *, available: bool = True, architectures: str = "sm_80 sm_90") -> None:
        install(self.site, "torch 2.13.0")
        (self.site / "torch/__init__.py").write_text(TORCH.format(available=available, architectures=architectures))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """With a driver for CUDA 13.0, without GPUs and frameworks."""
    site = tmp_path / "site"
    site.mkdir()
    only_these(site, monkeypatch)
    monkeypatch.setenv("STAND_IN_GPUS", str(tmp_path / "gpus"))
    monkeypatch.setenv("STAND_IN_CUDA_DRIVER", "13000")
    # For the processes that import frameworks.
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine = Machine(site)
    machine.has()
    yield machine
    sys.modules.pop("pynvml", None)


def gpu(number: int, capability: tuple[int, int] = (9, 0), used: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "uuid": f"GPU-{number}",
        "name": f"G{number}",
        "capability": capability,
        "memory": [80 * GB, used * GB],
    } | more


def found() -> list[DoctorFinding]:
    return list(doctor_gpus.findings())


def of_frameworks() -> list[DoctorFinding]:
    """Return the findings that follow those about the driver and GPU 0."""
    return found()[2:]


def test_no_gpu(machine: Machine) -> None:
    assert found() == [(FindingLevel.OK, "no NVIDIA GPU: models run on the CPU", "")]
    install(machine.site, "torch 2.13.0+cpu", "onnxruntime-gpu 1.31.1", "jax 0.10.2", "tensorrt-cu12 11.4.0.106")
    assert found()[1:] == [
        (FindingLevel.OK, "torch 2.13.0+cpu is a CPU build", ""),
        (FindingLevel.OK, "onnxruntime-gpu 1.31.1 is a build for CUDA 13.0", ""),
        (FindingLevel.OK, "tensorrt-cu12 11.4.0.106 is a build for CUDA 12", ""),
        (FindingLevel.OK, "jax 0.10.2 is a CPU build", ""),
    ]


def test_gpus(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.has(gpu(0), gpu(1, (3, 5), 0), gpu(2, used=79), gpu(3, mig=[1, 1]), gpu(4, mig=[0, 0]))
    driver, good, old, full, divided, whole, _ = found()
    assert driver == (FindingLevel.OK, "driver 570.86.15, up to CUDA 13.0", "")
    assert good == (FindingLevel.OK, "GPU 0: G0, compute capability 9.0, 78.0 GB free of 80.0 GB", "")
    assert {old.level, full.level, divided.level} == {FindingLevel.WARNING}
    assert "--min-supported-compute-capability=3.5" in old.remedy
    assert "nvidia-smi" in full.remedy
    assert divided.text.endswith(", divided by MIG") and "nvidia-smi -i GPU-3 -mig 0" in divided.remedy
    assert whole.level is FindingLevel.OK


@pytest.mark.parametrize(
    ("visible", "text", "remedy"),
    [
        ("", "CUDA_VISIBLE_DEVICES= hides 2 of 2 GPUs: models run on the CPU", ""),
        ("1", "CUDA_VISIBLE_DEVICES=1 hides 1 of 2 GPUs", ""),
        (
            "MIG-7",
            "CUDA_VISIBLE_DEVICES=MIG-7 hides 2 of 2 GPUs: models run on the CPU",
            "Nerite places instances on whole GPUs, not on MIG devices.",
        ),
    ],
)
def test_hidden_gpus(machine: Machine, monkeypatch: pytest.MonkeyPatch, visible: str, text: str, remedy: str) -> None:
    machine.has(gpu(0), gpu(1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (FindingLevel.NOTE, text, remedy) in found()


def test_a_driver_without_the_library(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "version").touch()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(gpus, "DRIVER_VERSION_FILE", tmp_path / "version")
    install(machine.site, "torch 2.13.0")
    library, torch = found()
    assert (library.level, library.remedy) == (FindingLevel.WARNING, "pip install 'nerite[gpu]'")
    assert torch == (FindingLevel.OK, "torch 2.13.0 is a build for CUDA 13.0", "")


def test_builds_that_do_not_fit(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_CUDA_DRIVER", "12040")
    machine.has(gpu(0))
    install(machine.site, "torch 2.13.0", "onnxruntime 1.31.1", "cuda-bindings 13.5.0")
    index = "https://download.pytorch.org/whl/cu126"
    assert of_frameworks() == [
        (
            FindingLevel.WARNING,
            "torch 2.13.0 was built for CUDA 13.0, and the driver supports CUDA up to 12.4",
            "Upgrade the driver to 580 or newer, or install the build for CUDA 12: pip uninstall -y torch && "
            f"pip install torch --index-url {index}",
        ),
        (
            FindingLevel.WARNING,
            "onnxruntime 1.31.1 is a CPU build",
            "Install its build for GPUs: pip uninstall -y onnxruntime && "
            "pip install 'onnxruntime-gpu[cuda,cudnn]<1.27'",
        ),
        (
            FindingLevel.WARNING,
            "cuda-bindings 13.5.0 was built for CUDA 13, and the driver supports CUDA up to 12.4",
            "Upgrade the driver to 580 or newer, or install the build for CUDA 12: pip uninstall -y cuda-bindings && "
            "pip install 'nerite[gpu]' 'cuda-bindings<13'",
        ),
    ]


def test_builds_over_each_other(machine: Machine) -> None:
    install(machine.site, "onnxruntime-gpu 1.31.1", "onnxruntime 1.31.1")
    text = "onnxruntime and onnxruntime-gpu are installed over each other, and overwrite each other's files"
    each = "pip uninstall -y onnxruntime onnxruntime-gpu"
    assert found()[1] == (FindingLevel.WARNING, text, f"{each}, and install one")
    machine.has(gpu(0))
    both = of_frameworks()[0]
    assert both == (FindingLevel.WARNING, text, f"{each} && pip install 'onnxruntime-gpu[cuda,cudnn]'")


@pytest.mark.parametrize(
    ("more", "level"), [([], FindingLevel.NOTE), (["tensorrt-cu13 11.4.0.106"], FindingLevel.WARNING)]
)
def test_no_cuda_bindings(machine: Machine, more: list[str], level: FindingLevel) -> None:
    machine.has(gpu(0))
    install(machine.site, *more)
    assert of_frameworks()[-1] == (
        level,
        "cuda-bindings is not installed, which TensorRT models and tensors in GPU memory need",
        "pip install 'nerite[gpu]'",
    )


def test_a_build_that_fits(machine: Machine) -> None:
    machine.has(gpu(0))
    machine.has_torch()
    assert of_frameworks()[0] == (FindingLevel.OK, "torch 2.13.0 is a build for CUDA 13.0", "")


def test_a_build_that_is_newer_than_the_driver(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_CUDA_DRIVER", "12040")
    machine.has(gpu(0))
    install(machine.site, "vllm 0.13.0+cu129")
    newer = of_frameworks()[0]
    assert (newer.level, newer.text) == (
        FindingLevel.NOTE,
        "vllm 0.13.0+cu129 is a build for CUDA 12.9, which is newer than the driver's 12.4",
    )
    assert "upgrade the driver" in newer.remedy


def test_a_build_without_kernels_for_a_gpu(machine: Machine) -> None:
    machine.has(gpu(0), gpu(1, (12, 0)))
    machine.has_torch()
    torch = found()[3]
    assert torch == (
        FindingLevel.WARNING,
        "torch 2.13.0 is a build for CUDA 13.0, and has no kernels for GPU 1 (compute capability 12.0), but for sm_80, "
        "sm_90",
        "Install a build that has: pip uninstall -y torch && pip install torch --index-url "
        "https://download.pytorch.org/whl/cu130",
    )


def test_a_framework_that_finds_no_gpu(machine: Machine) -> None:
    machine.has(gpu(0))
    machine.has_torch(available=False)
    torch = of_frameworks()[0]
    assert (torch.level, torch.text) == (
        FindingLevel.WARNING,
        "torch 2.13.0 is a build for CUDA 13.0, and finds no GPU",
    )
    assert "NVIDIA_DRIVER_CAPABILITIES" in torch.remedy


def test_a_framework_that_cannot_be_imported(machine: Machine) -> None:
    machine.has(gpu(0))
    install(machine.site, "torch 2.13.0")
    (machine.site / "torch/__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open it')\n")
    torch = of_frameworks()[0]
    assert torch.text == (
        "torch 2.13.0 is a build for CUDA 13.0, and cannot be asked for GPUs: ImportError: libcudart.so.13: cannot "
        "open it"
    )
    assert "torch" not in sys.modules


def test_the_kernels_of_tensorflow_are_in_its_files(machine: Machine) -> None:
    machine.has(gpu(0, (5, 0)), gpu(1, (12, 0)))
    install(machine.site, "tensorflow 2.21.0")
    program = "class config:\n    list_physical_devices = staticmethod(lambda kind: [kind])\n"
    (machine.site / "tensorflow/__init__.py").write_text(program)
    tensorflow = found()[3]
    assert "has no kernels for GPU 0 (compute capability 5.0), but for sm_60, " in tensorflow.text


def test_the_frameworks_of_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs themselves, on what is installed for the tests: builds for CPUs, which find no GPU."""
    for module, program in doctor_gpus.PROBES.items():
        probed = doctor_gpus.probe(program)
        assert (module, probed.finds_gpus, probed.failure) == (module, False, "")


def test_as_json(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.has(gpu(0))
    install(machine.site, "onnxruntime 1.31.1")
    doctor.run(["--json"])
    told = [each for each in json.loads(capsys.readouterr().out) if each["part"] == "gpus"]
    assert told[2] == {
        "part": "gpus",
        "level": "warning",
        "text": "onnxruntime 1.31.1 is a CPU build",
        "remedy": "Install its build for GPUs: pip uninstall -y onnxruntime && "
        "pip install 'onnxruntime-gpu[cuda,cudnn]'",
    }
