"""What all kinds of forests have in common: the backend ``fil``, which is told which of them it gets."""

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
    """Return a forest whose file is to be called ``filename``; ``model_type`` is FIL's word for it."""
    config = ModelConfig(backend="fil", parameters={"model_type": ModelParameter(string_value=model_type)})
    return Artifact(kind, candidate.path, candidate.name, config, {filename: candidate.path})


# LightGBM, in its text format.


def recognise_lightgbm(candidate: Candidate) -> Artifact | None:
    """Return a booster that ``save_model`` has written."""
    if not candidate.head.replace(b"\r\n", b"\n").startswith((b"tree\nversion=", b"tree\nnum_class=")):
        return None
    # Behind the trees stand importances and parameters, of any length.
    if b"end of trees" not in candidate.head and b"end of trees" not in candidate.path.read_bytes():
        raise cut_off(candidate.path, "the line 'end of trees' is missing")
    return forest_artifact(candidate, "LightGBM model", "model.txt", "lightgbm")


# XGBoost, in its three formats: JSON, universal binary JSON, and the binary one of before 3.1.

_BINARY = re.compile(rb"\{(?:[iU].|I..|l.{4}|L.{8})(?:learner|version)", re.DOTALL)
_JSON = re.compile(rb'\{\s*"(?:learner|version)"')
_DUMP = re.compile(rb'booster\[0\]:|\s*(?:\[\s*)?\{\s*"nodeid"')
_LEGACY_MAGIC = b"binf"
_LEGACY_NUMBERS = 136
_LONGEST_NAME = 64
_BOOSTERS = (b"gbtree", b"dart", b"gblinear")
_SAVE = "Save it with booster.save_model('model.ubj')"


def recognise_xgboost(candidate: Candidate) -> Artifact | None:
    """Return a booster that ``save_model`` has written."""
    head = candidate.head
    if _DUMP.match(head):
        raise Unusable(candidate.path, "this is a dump of XGBoost's trees for people to read", f"{_SAVE}.")
    if _JSON.match(head) and b'"generic_param"' in head:
        raise Unusable(candidate.path, "these are a booster's settings (save_config), without its trees", f"{_SAVE}.")
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
    """Say whether numbers of a fixed size are followed by the names of an objective and of a booster."""
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
        raise cut_off(candidate.path, "it does not end with the brace that its first one needs")


# Checkpoints of treelite: what forests of scikit-learn and cuML are exported to.

_HEADER = struct.Struct("<iii")
_NEWEST_MINOR = 100
_MOST_TREES = 10_000_000
_TYPES = (2, 3)
"""Numbers of the types float32 and float64."""


def recognise_treelite(candidate: Candidate) -> Artifact | None:
    """Return a checkpoint: its head has a version, the types of thresholds and leaves, and the number of trees."""
    named = candidate.suffix == ".tl"
    head = candidate.head
    fits = len(head) > _HEADER.size + 10 and _fits(head)
    if not fits and named:
        remedy = "Write it again: treelite.sklearn.import_model(model).serialize('checkpoint.tl')"
        raise Unusable(candidate.path, "this is no checkpoint of treelite", remedy)
    return forest_artifact(candidate, "treelite checkpoint", "checkpoint.tl", "treelite_checkpoint") if fits else None


def _fits(head: bytes) -> bool:
    major, minor, patch = _HEADER.unpack_from(head)
    if not (major in (3, 4, 5) and 0 <= minor < _NEWEST_MINOR and 0 <= patch < _NEWEST_MINOR):
        return False
    threshold, leaf = head[_HEADER.size], head[_HEADER.size + 1]
    (trees,) = struct.unpack_from("<Q", head, _HEADER.size + 2)
    return threshold in _TYPES and leaf in (1, *_TYPES) and 0 < trees < _MOST_TREES


# scikit-learn: a pickle, which can run any code when it is read. With trust it is converted to ONNX.

_SCIKIT_LEARN_SAVE: Final = {
    "xgboost.": "Save the model as XGBoost does, in the program that made it: model.save_model('model.ubj')",
    "lightgbm.": "Save the model as LightGBM does, in the program that made it: model.booster_.save_model('model.txt')",
    "catboost.": "Save the model as ONNX, in the program that made it: model.save_model('model.onnx', format='onnx')",
    "cuml.": "Export the forest: model.convert_to_treelite_model().to_treelite_checkpoint('checkpoint.tl')",
    "torch.": "Export a program: torch.export.save(torch.export.export(module.eval(), (example_input,)), 'model.pt2')",
    "keras.": "Export the model: model.export('directory')",
}
_CONVERTER: Final = "nerite.artifacts.convert_scikit_learn"
_FAILURES: Final = {
    1: (
        "the model could not be converted to ONNX",
        "Convert it yourself with skl2onnx, which takes more options, or serve it from a model.py.",
    ),
    2: (
        "the pickle could not be read",
        "If it is cut off, copy it again. Otherwise install what it was made with, in the same version.",
    ),
}
"""By the exit status of the converter: what failed, and what to do."""
_NEEDED: Final = ("sklearn", "skl2onnx")


def recognise_scikit_learn(candidate: Candidate) -> Artifact | None:
    """Return an estimator, to be converted. Refuses pickles of others, and all that are not trusted."""
    head = readers.unpacked_pickle(candidate.head)
    if candidate.is_directory or not readers.is_pickle(head):
        return None
    path = candidate.path
    names = readers.pickle_names(head)
    for name in names:
        for package, remedy in _SCIKIT_LEARN_SAVE.items():
            # What is pickled is named first; parts of scikit-learn may be in it, as it may be in theirs.
            if name.startswith(package) and (name == names[0] or not any(map(_is_ours, names))):
                raise Unusable(path, f"this is a pickle of {name}", remedy)
    estimator = next(filter(_is_ours, names), "")
    if not estimator:
        what = f"a pickle of {names[0]}" if names else "a pickle"
        remedy = (
            "Pickles are read by the program that made them. Write a model.py that does that: docs/python-models.md"
        )
        raise Unusable(path, f"this is {what}, and nothing that can be converted", remedy)
    if not candidate.trusted:
        raise Unusable(
            path,
            f"this is a pickle ({estimator}), and reading a pickle runs whatever code is in it",
            "If you know who made it, say --trust: it is read once, in a process of its own, and converted to ONNX.",
        )
    return Artifact(
        f"scikit-learn model ({estimator.rpartition('.')[2]})",
        path,
        candidate.name,
        ModelConfig(backend="onnxruntime"),
        make=partial(_convert, path),
        remarks=("It was converted to ONNX. Compare its answers with those of the original before you rely on them.",),
    )


def _is_ours(name: str) -> bool:
    return name.startswith("sklearn.")


def _convert(source: Path, directory: Path) -> None:
    """Convert in a process of its own: what the pickle does there, it does not do here."""
    missing = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise Unsupported(
            f"to convert models of scikit-learn, {' and '.join(missing)} must be installed. "
            "Install it with: pip install 'nerite[sklearn]'"
        )
    command = [sys.executable, "-m", _CONVERTER, str(source.resolve()), str(directory / "model.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        failed, remedy = _FAILURES.get(done.returncode, _FAILURES[1])
        raise Internal(f"{source}: {failed}: {reason}\n    {remedy}")
