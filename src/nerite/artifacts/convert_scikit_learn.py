"""Reads a pickled estimator, which runs whatever code is in it, and writes it as ONNX."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np

_OPSET = 17
"""What every ONNX Runtime reads that Nerite works with."""


def main(source: str, target: str) -> int:
    """Convert; return 0, or 1 where it cannot be converted and 2 where it cannot be read, with the reason in a line."""
    try:
        model = _read(Path(source))
    except Exception as error:  # a pickle runs code, which may raise whatever it likes
        return _complain(error, 2)
    count = getattr(model, "n_features_in_", None)
    if count is None:
        print("it was not fitted, or does not know how many features it takes (n_features_in_)", file=sys.stderr)
        return 1
    try:
        Path(target).write_bytes(_converted(model, count).SerializeToString())
    except Exception as error:  # so may the converters of all kinds of estimators
        return _complain(error, 1)
    return 0


def _complain(error: Exception, status: int) -> int:
    line = next(iter(str(error).strip().splitlines()), "")
    print(f"{type(error).__name__}: {line}", file=sys.stderr)
    return status


def _converted(model: Any, count: int) -> Any:
    """Return the ONNX model of an estimator that takes so many features."""
    import skl2onnx
    from skl2onnx.common.data_types import FloatTensorType

    inputs = [("features", FloatTensorType([None, count]))]
    # As an array: a list of dictionaries, one for each row, is nothing that a tensor can hold.
    options = {id(model): {"zipmap": False}} if hasattr(model, "predict_proba") else None
    converted = skl2onnx.convert_sklearn(model, initial_types=inputs, options=options, target_opset=_OPSET)
    _free_the_batch(converted)
    if hasattr(model, "predict") and not hasattr(model, "predict_proba"):
        _count_the_targets(converted, model.predict(np.zeros((2, count), np.float32)))
    return converted


def _read(source: Path) -> Any:
    try:
        import joblib  # reads plain pickles, too

        return joblib.load(source)
    except ModuleNotFoundError as error:
        if error.name != "joblib":
            raise
    return pickle.loads(source.read_bytes())


def _free_the_batch(converted: Any) -> None:
    """Give each output a first dimension of any size; for some estimators the converter leaves it out."""
    for output in converted.graph.output:
        shape = output.type.tensor_type.shape
        if not shape.dim:
            shape.dim.add().dim_param = "N"


def _count_the_targets(converted: Any, predicted: Any) -> None:
    """Say how many values there are for a row; of several, the converter says that there is one."""
    (*_, last) = converted.graph.output
    dims = last.type.tensor_type.shape.dim
    if len(converted.graph.output) == 1 and np.ndim(predicted) == len(dims) == 2:
        dims[1].dim_value = np.shape(predicted)[1]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
