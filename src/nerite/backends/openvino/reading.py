"""Reading a model file: what OpenVINO makes of it, and what to do about one that is broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from nerite.backends.openvino import framework
from nerite.backends.openvino.plan import Source
from nerite.core.errors import Internal

_HEAD: Final = 4096

_REMEDIES: Final = (
    ("Empty weights data", "The weights lie in a file of their own: copy '{weights}', too"),
    ("weights in bin file", "'{weights}' is cut off, or of another model: copy both files once more"),
    ("ONNX operations", "Serve it with another backend, or name a library that has them: CPU_EXTENSION_PATH"),
    ("No conversion rule", "Serve it with another backend, or name a library that has them: CPU_EXTENSION_PATH"),
    ("doesn't contain the operation", "Install a newer OpenVINO, or name a library that has it: CPU_EXTENSION_PATH"),
    ("", "Is '{path}' complete? Copy it once more, or export it anew"),
)
"""What to do, by a part of what OpenVINO says."""


def read(source: Source) -> Any:
    """Return an ``openvino.Model``. Raises ``NeriteError`` with what is wrong with the file, and what to do."""
    path = source.path
    _check_head(path)
    core = framework.core(source.extension)
    try:
        if source.map_weights:
            return core.read_model(str(path))
        return core.read_model(str(path), config={"ENABLE_MMAP": "NO"})
    except Exception as error:  # Whatever the framework raises says what is wrong with the file.
        said = str(error)
        remedy = next(remedy for part, remedy in _REMEDIES if part in said)
        raise framework.translated(
            error, "reading model", remedy.format(path=path, weights=path.with_suffix(".bin"))
        ) from error


def _check_head(path: Path) -> None:
    """Refuse what is plainly something else; OpenVINO would try each of its readers on it, and they are noisy."""
    if path.is_dir():
        return
    with path.open("rb") as file:
        head = file.read(_HEAD)
    said = "openvino error in reading model : "
    if not head:
        raise Internal(f"{said}'{path}' is empty: copy it once more")
    if path.suffix == ".xml" and b"<net" not in head:
        raise Internal(f"{said}'{path}' is no OpenVINO IR: export the model with openvino.save_model")
    if path.suffix == ".tflite" and head[4:8] != b"TFL3":
        raise Internal(f"{said}'{path}' is no TFLite model: export it once more")
