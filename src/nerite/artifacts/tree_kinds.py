"""Recognisers for tree models: LightGBM, XGBoost, treelite checkpoints and pickled scikit-learn estimators.

Forests are served by the backend ``fil``; scikit-learn models are converted to ONNX.
"""

from __future__ import annotations

import importlib.util
import re
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Final

from nerite.artifacts import readers
from nerite.artifacts.artifact import Artifact, Candidate, Unusable, cut_off
from nerite.config.model_config import ModelConfig, ModelParameter
from nerite.core.errors import Internal, Unsupported


def forest_artifact(candidate: Candidate, kind: str, filename: str, model_type: str) -> Artifact:
    """Return a forest whose file will be named ``filename``; ``model_type`` is FIL's name of the format."""
    config = ModelConfig(backend="fil", parameters={"model_type": ModelParameter(string_value=model_type)})
    return candidate.artifact(kind, config, {filename: candidate.path})


def recognise_lightgbm(candidate: Candidate) -> Artifact | None:
    """Recognise a booster written by ``save_model`` in LightGBM's text format."""
    if not candidate.head.replace(b"\r\n", b"\n").startswith((b"tree\nversion=", b"tree\nnum_class=")):
        return None
    # The trees are followed by importances and parameters of any length.
    if b"end of trees" not in candidate.head and b"end of trees" not in candidate.path.read_bytes():
        raise cut_off(candidate.path, "the line 'end of trees' is missing")
    return forest_artifact(candidate, "LightGBM model", "model.txt", "lightgbm")


# XGBoost, in its three formats: JSON, universal binary JSON (UBJSON), and the binary format used before 3.1.

_BINARY = re.compile(rb"\{(?:[iU].|I..|l.{4}|L.{8})(?:learner|version)", re.DOTALL)
_JSON = re.compile(rb'\{\s*"(?:learner|version)"')
_DUMP = re.compile(rb'booster\[0\]:|\s*(?:\[\s*)?\{\s*"nodeid"')
_LEGACY_MAGIC = b"binf"
_LEGACY_NUMBERS = 136
_LONGEST_NAME = 64
_BOOSTERS = (b"gbtree", b"dart", b"gblinear")
_SAVE = "Save it with booster.save_model('model.ubj')"


def recognise_xgboost(candidate: Candidate) -> Artifact | None:
    """Recognise a booster written by ``save_model``."""
    head = candidate.head
    if _DUMP.match(head):
        raise Unusable(candidate.path, "this is a human-readable dump of XGBoost's trees", f"{_SAVE}.")
    if _JSON.match(head) and b'"generic_param"' in head:
        raise Unusable(candidate.path, "this is a booster's configuration (save_config), without trees", f"{_SAVE}.")
    if _JSON.match(head) and b'"learner"' in head:
        if b'"gradient_booster"' not in head + candidate.tail:
            return None
        _check_end(candidate)
        return forest_artifact(candidate, "XGBoost model", "xgboost.json", "xgboost_json")
    if _BINARY.match(head) and b"learner" in head:
        _check_end(candidate)
        return forest_artifact(candidate, "XGBoost model", "xgboost.ubj", "xgboost_ubj")
    if _is_legacy(head):
        return forest_artifact(candidate, "XGBoost model", "xgboost.model", "xgboost")
    return None


def _is_legacy(head: bytes) -> bool:
    """Return whether the fixed-size header is followed by the names of an objective and a booster."""
    at = _LEGACY_NUMBERS + (len(_LEGACY_MAGIC) if head.startswith(_LEGACY_MAGIC) else 0)
    names = []
    for _ in range(2):
        size = int.from_bytes(head[at : at + 8], "little")
        names.append(head[at + 8 : at + 8 + size])
        at += 8 + size
        if not 0 < size <= _LONGEST_NAME:
            return False
    return names[1] in _BOOSTERS


def _check_end(candidate: Candidate) -> None:
    if not candidate.tail.rstrip().endswith(b"}"):
        raise cut_off(candidate.path, "the closing brace at its end is missing")


# Checkpoints of treelite, to which forests of scikit-learn and cuML are exported.

_HEADER = struct.Struct("<iii")
_NEWEST_MINOR = 100
_MAX_TREES = 10_000_000
_TYPES = (2, 3)
"""Type codes of float32 and float64."""


def recognise_treelite(candidate: Candidate) -> Artifact | None:
    """Recognise a checkpoint by its header: version, types of thresholds and leaves, and number of trees."""
    named = candidate.suffix == ".tl"
    head = candidate.head
    fits = len(head) > _HEADER.size + 10 and _fits(head)
    if not fits and named:
        remedy = "Write it again: treelite.sklearn.import_model(model).serialize('checkpoint.tl')"
        raise Unusable(candidate.path, "this is not a treelite checkpoint", remedy)
    return forest_artifact(candidate, "treelite checkpoint", "checkpoint.tl", "treelite_checkpoint") if fits else None


def _fits(head: bytes) -> bool:
    major, minor, patch = _HEADER.unpack_from(head)
    if not (major in (3, 4, 5) and 0 <= minor < _NEWEST_MINOR and 0 <= patch < _NEWEST_MINOR):
        return False
    threshold, leaf = head[_HEADER.size], head[_HEADER.size + 1]
    (trees,) = struct.unpack_from("<Q", head, _HEADER.size + 2)
    return threshold in _TYPES and leaf in (1, *_TYPES) and 0 < trees < _MAX_TREES


# scikit-learn models are pickles, which can run arbitrary code when read. Trusted ones are converted to ONNX.

_SCIKIT_LEARN_SAVE: Final = {
    "xgboost.": "Save it in XGBoost's format, in the program that made it: model.save_model('model.ubj')",
    "lightgbm.": "Save it in LightGBM's format, in the program that made it: model.booster_.save_model('model.txt')",
    "catboost.": "Save it as ONNX, in the program that made it: model.save_model('model.onnx', format='onnx')",
    "cuml.": "Export the forest: model.convert_to_treelite_model().to_treelite_checkpoint('checkpoint.tl')",
    "torch.": "Export a program: torch.export.save(torch.export.export(module.eval(), (example_input,)), 'model.pt2')",
    "keras.": "Export the model: model.export('directory')",
}
_CONVERTER: Final = "nerite.artifacts.convert_scikit_learn"
_FAILURES: Final = {
    1: (
        "the model could not be converted to ONNX",
        "Convert it yourself with skl2onnx, which has more options, or serve it from a model.py.",
    ),
    2: (
        "the pickle could not be read",
        "If it is truncated, copy it again. Otherwise install the packages it was made with, in the same versions.",
    ),
}
"""Error and remedy for each exit status of the converter."""
_NEEDED: Final = ("sklearn", "skl2onnx")


def recognise_scikit_learn(candidate: Candidate) -> Artifact | None:
    """Recognise a pickled estimator, to be converted to ONNX. Rejects other pickles, and pickles without trust."""
    head = readers.unpacked_pickle(candidate.head)
    if candidate.is_directory or not readers.is_pickle(head):
        return None
    path = candidate.path
    names = readers.pickle_names(head)
    for name in names:
        for package, remedy in _SCIKIT_LEARN_SAVE.items():
            # The pickled object is named first. It may contain parts of scikit-learn, and the other way round.
            if name.startswith(package) and (name == names[0] or not any(map(_is_scikit_learn, names))):
                raise Unusable(path, f"this is a pickle of {name}", remedy)
    estimator = next(filter(_is_scikit_learn, names), "")
    if not estimator:
        what = f"a pickle of {names[0]}" if names else "a pickle"
        remedy = "Only code that has its classes can load it. Write a model.py that does: docs/python-models.md"
        raise Unusable(path, f"this is {what}, which cannot be converted", remedy)
    if not candidate.trusted:
        raise Unusable(
            path,
            f"this is a pickle ({estimator}), and reading a pickle runs any code that it contains",
            "If you trust its origin, pass --trust: it is read once, in a separate process, and converted to ONNX.",
        )
    return Artifact(
        f"scikit-learn model ({estimator.rpartition('.')[2]})",
        path,
        candidate.name,
        ModelConfig(backend="onnxruntime"),
        make=partial(_convert, path),
        remarks=("It was converted to ONNX. Compare its predictions with the original's before you rely on them.",),
    )


def _is_scikit_learn(name: str) -> bool:
    return name.startswith("sklearn.")


def _convert(source: Path, directory: Path) -> None:
    """Convert a pickle to ONNX in a separate process, so that code in the pickle does not run in this one."""
    missing = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise Unsupported(
            f"converting scikit-learn models requires {' and '.join(missing)}. "
            "Install with: pip install 'nerite[sklearn]'"
        )
    command = [sys.executable, "-m", _CONVERTER, str(source.resolve()), str(directory / "model.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["the converter exited without a message"])[-1]
        failed, remedy = _FAILURES.get(done.returncode, _FAILURES[1])
        raise Internal(f"{source}: {failed}: {reason}\n    {remedy}")
