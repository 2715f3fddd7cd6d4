"""Reads a pickled estimator, which runs whatever code is in it, and writes it as ONNX."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

_OPSET = 17
"""What every ONNX Runtime reads that Nerite works with."""


def main(source: str, target: str) -> int:
    """Convert; return the exit status. The last line on standard error says what was wrong."""
    model = _read(Path(source))
    count = getattr(model, "n_features_in_", None)
    if count is None:
        print("it was not fitted, or does not know how many features it takes (n_features_in_)", file=sys.stderr)
        return 1
    import skl2onnx
    from skl2onnx.common.data_types import FloatTensorType

    inputs = [("features", FloatTensorType([None, count]))]
    # As an array: a list of dictionaries, one for each row, is nothing that a tensor can hold.
    options = {id(model): {"zipmap": False}} if hasattr(model, "predict_proba") else None
    converted = skl2onnx.convert_sklearn(model, initial_types=inputs, options=options, target_opset=_OPSET)
    _free_the_batch(converted)
    Path(target).write_bytes(converted.SerializeToString())
    return 0


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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
