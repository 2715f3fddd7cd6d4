"""scikit-learn: a pickle, which can run any code when it is read. With trust it is converted to ONNX."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Final

from nerite.artifacts import pickles
from nerite.artifacts.artifact import Artifact, Unusable
from nerite.artifacts.candidate import Candidate
from nerite.config.model_config import ModelConfig
from nerite.core.errors import Internal, Unsupported

_SAVE: Final = {
    "xgboost.": "Save the model as XGBoost does, in the program that made it: model.save_model('model.ubj')",
    "lightgbm.": "Save the model as LightGBM does, in the program that made it: model.booster_.save_model('model.txt')",
    "catboost.": "Save the model as ONNX, in the program that made it: model.save_model('model.onnx', format='onnx')",
    "cuml.": "Export the forest: model.convert_to_treelite_model().to_treelite_checkpoint('checkpoint.tl')",
    "torch.": "Export a program: torch.export.save(torch.export.export(module.eval(), (example_input,)), 'model.pt2')",
    "keras.": "Export the model: model.export('directory')",
}
_CONVERTER: Final = "nerite.artifacts.conversion.scikit_learn"
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


def recognise(candidate: Candidate) -> Artifact | None:
    """Return an estimator, to be converted. Refuses pickles of others, and all that are not trusted."""
    head = pickles.unpacked(candidate.head)
    if candidate.is_directory or not pickles.is_pickle(head):
        return None
    path = candidate.path
    names = pickles.names(head)
    for name in names:
        for package, remedy in _SAVE.items():
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
