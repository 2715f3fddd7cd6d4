"""Converts a pickled estimator to ONNX. Run as a separate process, because reading a pickle can run any code."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np

_OPSET = 17
"""Supported by every version of ONNX Runtime that Nerite supports."""


def main(source: str, target: str) -> int:
    """Convert; return 0, or print a one-line reason and return 1 if conversion fails, 2 if the pickle is unreadable."""
    try:
        model = _read(Path(source))
    except Exception as error:  # code in the pickle may raise anything
        return _complain(error, 2)
    count = getattr(model, "n_features_in_", None)
    if count is None:
        print("it was not fitted, or does not say how many features it takes (n_features_in_)", file=sys.stderr)
        return 1
    try:
        Path(target).write_bytes(_converted(model, count).SerializeToString())
    except Exception as error:  # so may the converters of the many kinds of estimators
        return _complain(error, 1)
    return 0


def _complain(error: Exception, status: int) -> int:
    line = next(iter(str(error).strip().splitlines()), "")
    print(f"{type(error).__name__}: {line}", file=sys.stderr)
    return status


def _converted(model: Any, count: int) -> Any:
    """Return the ONNX model of an estimator that takes ``count`` features."""
    import skl2onnx
    from skl2onnx.common.data_types import FloatTensorType

    inputs = [("features", FloatTensorType([None, count]))]
    # zipmap would return a list of dictionaries, one per row, which a tensor cannot hold.
    options = {id(model): {"zipmap": False}} if hasattr(model, "predict_proba") else None
    converted = skl2onnx.convert_sklearn(model, initial_types=inputs, options=options, target_opset=_OPSET)
    _free_the_batch(converted)
    if hasattr(model, "predict") and not hasattr(model, "predict_proba"):
        _count_the_targets(converted, model.predict(np.zeros((2, count), np.float32)))
    return converted


def _read(source: Path) -> Any:
    try:
        import joblib  # reads plain pickles as well

        return joblib.load(source)
    except ModuleNotFoundError as error:
        if error.name != "joblib":
            raise
    return pickle.loads(source.read_bytes())


def _free_the_batch(converted: Any) -> None:
    """Give each output a variable first dimension, which the converter omits for some estimators."""
    for output in converted.graph.output:
        shape = output.type.tensor_type.shape
        if not shape.dim:
            shape.dim.add().dim_param = "N"


def _count_the_targets(converted: Any, predicted: Any) -> None:
    """Correct the number of values per row, which the converter gives as 1 even if the model has several targets."""
    (*_, last) = converted.graph.output
    dims = last.type.tensor_type.shape.dim
    if len(converted.graph.output) == 1 and np.ndim(predicted) == len(dims) == 2:
        dims[1].dim_value = np.shape(predicted)[1]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
