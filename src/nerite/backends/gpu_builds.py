"""Whether a framework that is installed was built for GPUs. Found by its files: no framework is imported for it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final, NamedTuple


class _Sign(NamedTuple):
    """A file that a build for GPUs has, and words in it that one for processors lacks."""

    package: str
    file: str
    words: str = ""


_SIGNS: Final[dict[str, _Sign]] = {
    "onnxruntime": _Sign("onnxruntime", "capi/libonnxruntime_providers_cuda.so"),
    "pytorch": _Sign("torch", "lib/libtorch_cuda.so"),
    "tensorflow": _Sign("tensorflow", "python/platform/build_info.py", "('is_cuda_build', True)"),
}


def can_use_gpus(backend: str) -> bool:
    """Return False for a backend whose framework, as it is installed, computes on processors alone."""
    sign = _SIGNS.get(backend)
    if sign is None:
        return True
    spec = importlib.util.find_spec(sign.package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(folder, sign.file)
        if file.is_file() and (not sign.words or sign.words in file.read_text()):
            return True
    return False
