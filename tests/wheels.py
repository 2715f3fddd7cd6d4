"""Wheels that are made on the spot, so that tests install packages without an index."""

from __future__ import annotations

import importlib.metadata
import zipfile
from pathlib import Path


def wheel(folder: Path, name: str, version: str, source: str, module: str = "") -> Path:
    """Write a wheel with one module, which is called as the package unless said otherwise; return its path."""
    return _written(
        folder / f"{name}-{version}-py3-none-any.whl",
        {
            f"{module or name}.py": source,
            f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            f"{name}-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        },
    )


def wheel_of_installed(folder: Path, name: str) -> Path:
    """Write a wheel of a package that is installed here, without its scripts; return its path."""
    package = importlib.metadata.distribution(name)
    lines = (package.read_text("WHEEL") or "").splitlines()
    tag = next(line.partition(": ")[2] for line in lines if line.startswith("Tag: "))
    left_out = ("__pycache__/", "../", "RECORD", "INSTALLER", "REQUESTED")
    files = {
        str(path): Path(str(package.locate_file(path))).read_bytes()
        for path in package.files or ()
        if not any(part in str(path) for part in left_out)
    }
    return _written(folder / f"{name}-{package.version}-{tag}.whl", files)


def _written(path: Path, files: dict[str, str] | dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    record = next(name for name in files if name.endswith(".dist-info/WHEEL")).replace("WHEEL", "RECORD")
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(record, "".join(f"{name},,\n" for name in (*files, record)))
    return path
