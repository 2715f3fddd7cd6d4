"""NVIDIA's load generator, installed on first use: the binary in the wheel of tritonclient 2.50.0, the last with one.

It is kept beside Triton (``triton_installation.py``), whose CUDA library it is linked to. It also needs Debian's
libb64-0d.
"""

from __future__ import annotations

import ctypes.util
import subprocess
import sys
import zipfile
from pathlib import Path

from conformance import triton_installation
from conformance.triton_installation import TritonUnavailable

PACKAGE = "tritonclient==2.50.0"
MEMBER = "tritonclient-2.50.0.data/data/bin/perf_analyzer"


def command() -> tuple[list[str], dict[str, str]]:
    """Return the head of its command line, and its environment. Raises ``TritonUnavailable``."""
    if ctypes.util.find_library("b64") is None:
        raise TritonUnavailable("perf_analyzer needs libb64 (Debian: libb64-0d)")
    venv = triton_installation.installation()
    folder = venv / "perf_analyzer"
    binary = folder / "perf_analyzer"
    if not binary.exists():
        install(folder, next((triton_installation.site(venv) / "nvidia_pytriton.libs").glob("libcudart-*.so*")))
    return [str(binary)], {"LD_LIBRARY_PATH": str(folder)}


def install(folder: Path, cuda: Path) -> None:
    """Fetch the wheel, and take the program out of it."""
    folder.mkdir(exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "download", "--no-deps", "--dest", str(folder), PACKAGE], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise TritonUnavailable(f"{PACKAGE} could not be fetched: {done.stderr[-500:]}")
    (wheel,) = folder.glob("*.whl")
    link = folder / "libcudart.so.12"
    link.unlink(missing_ok=True)
    link.symlink_to(cuda)
    with zipfile.ZipFile(wheel) as archive:
        part = folder / "part"
        part.write_bytes(archive.read(MEMBER))
    part.chmod(0o755)
    wheel.unlink()
    part.rename(folder / "perf_analyzer")
