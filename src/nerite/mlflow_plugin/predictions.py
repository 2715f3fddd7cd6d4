"""Inputs as MLflow brings them, and outputs as it wants them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from mlflow.deployments import PredictionsResponse
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from nerite.client import Model


class Predictions(PredictionsResponse):
    """The outputs of a model by name, under the key ``outputs``."""

    def get_predictions(self, predictions_format: str = "dataframe", dtype: Any = None) -> Any:
        """Return the outputs as a pandas DataFrame, a column each; or the only output as an ``ndarray``."""
        outputs = self["outputs"]
        if predictions_format == "dataframe":
            import pandas

            return pandas.DataFrame({name: list(array) for name, array in outputs.items()})
        if predictions_format == "ndarray" and len(outputs) == 1:
            return np.asarray(next(iter(outputs.values())), dtype)
        raise MlflowException(
            f"The outputs {', '.join(outputs)} cannot be one '{predictions_format}'. Take them from ['outputs'].",
            error_code=INVALID_PARAMETER_VALUE,
        )

    def to_json(self, path: str | None = None) -> str | None:
        """Return the outputs as JSON, or write them to ``path``."""
        text = json.dumps({"outputs": {name: _as_lists(array) for name, array in self["outputs"].items()}})
        if path is None:
            return text
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return None


def arrays_of(model: Model, inputs: Any) -> dict[str, Any]:
    """Return what is given for each input of a model. Raises ``MlflowException`` for what cannot be told apart."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    only = model.inputs[0].name if len(model.inputs) == 1 else ""
    columns = getattr(inputs, "columns", None)
    if columns is not None:
        names = [str(column) for column in columns]
        if set(names) <= {tensor.name for tensor in model.inputs}:
            ranks = {tensor.name: len(tensor.shape) for tensor in model.inputs}
            return {
                name: _rows(inputs[column].tolist(), ranks[name]) for name, column in zip(names, columns, strict=True)
            }
        if only:
            return {only: inputs.to_numpy().tolist()}
    elif only and inputs is not None:
        return {only: inputs}
    wanted = ", ".join(map(str, model.inputs))
    raise MlflowException(
        f"The inputs have to be given by their names, for the model '{model.name}' has these: {wanted}",
        error_code=INVALID_PARAMETER_VALUE,
    )


def _rows(column: list[Any], rank: int) -> list[Any]:
    """Return a column as the rows of a tensor: a number that stands alone is a row of one."""
    return [[value] for value in column] if rank > 1 and not np.ndim(column[0] if column else ()) else column


def _as_lists(array: Any) -> Any:
    if array.dtype != object:
        return array.tolist()
    return [_as_lists(row) if isinstance(row, np.ndarray) else row.decode(errors="replace") for row in array]
