"""MLflow's model directories: an MLmodel file that says in which flavours the model is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, NamedTuple

from nerite.artifacts.artifact import Unusable
from nerite.artifacts.candidate import Candidate

_FILE: Final = "MLmodel"
_PLACES: Final = {
    "triton": "data",
    "onnx": "data",
    "xgboost": "data",
    "lightgbm": "data",
    "catboost": "data",
    "tensorflow": "data",
    "transformers": "model_binary",
    "pytorch": "model_data",
    "sklearn": "pickled_model",
}
"""The flavours that can be served, the best first, and which of their entries says where the model is."""
_DEEPER: Final = {"pytorch": ("model.pt2", "model.pth"), "tensorflow": ("model", "tfmodel", "model.keras")}
"""What to take in the directory that a flavour names."""
_LINE: Final = re.compile(r"( *)([^\s:#][^:]*):(?: (.*))?")


class LoggedModel(NamedTuple):
    """What MLflow has logged: the model itself is in ``place``."""

    flavor: str
    place: Path
    config: Path | None
    """A config.pbtxt that was logged with it."""


def logged_model(candidate: Candidate) -> LoggedModel | None:
    """Return where the model is, in the best flavour or the one that is asked for; None if this is not MLflow's.

    Raises ``Unusable`` if there is no flavour that can be served.
    """
    path = candidate.path
    if not candidate.is_directory or not (path / _FILE).is_file():
        return None
    flavors = read_yaml((path / _FILE).read_text(errors="replace")).get("flavors") or {}
    wanted = [candidate.flavor] if candidate.flavor else [name for name in _PLACES if name in flavors]
    if not wanted or wanted[0] not in flavors or wanted[0] not in _PLACES:
        what = f"the flavour '{candidate.flavor}'" if candidate.flavor else "a flavour"
        remedy = (
            "Log it in another flavour as well, as in mlflow.onnx.log_model(...). "
            f"Those that can be served: {', '.join(_PLACES)}. Or load it in a model.py: mlflow.pyfunc.load_model(...)"
        )
        raise Unusable(
            path, f"this MLflow model has not {what} that can be served; it has: {', '.join(flavors)}", remedy
        )
    flavor = wanted[0]
    place = path / str(flavors[flavor].get(_PLACES[flavor]) or "data")
    place = next((place / name for name in _DEEPER.get(flavor, ()) if (place / name).exists()), place)
    if not place.exists():
        raise Unusable(path, f"{place} is missing, which {_FILE} names", "Download the whole directory again.")
    config = path / "config.pbtxt"
    return LoggedModel(flavor, place, config if config.is_file() else None)


def read_yaml(text: str) -> dict[str, Any]:
    """Return what MLmodel says, in the part of YAML that MLflow writes: mappings of texts. Lists are left out."""
    document: dict[str, Any] = {}
    open_mappings: list[tuple[int, dict[str, Any]]] = [(-1, document)]
    for line in text.splitlines():
        found = _LINE.fullmatch(line.rstrip())
        if found is None:
            continue
        indent, key, value = len(found[1]), found[2].strip("'\""), (found[3] or "").strip()
        while open_mappings[-1][0] >= indent:
            open_mappings.pop()
        mapping = open_mappings[-1][1]
        if value:
            mapping[key] = value.strip("'\"") if value not in ("null", "{}", "[]") else None
        else:
            mapping[key] = {}
            open_mappings.append((indent, mapping[key]))
    return document
