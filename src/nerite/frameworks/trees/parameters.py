"""Reads the parameters of a tree model: those of Triton's FIL backend, old and new, and ``engine``. Pure."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from nerite.backends.configuration import flag, integer_parameter, parameter, thread_count
from nerite.backends.interface import ModelContext
from nerite.config.mistake import nearest
from nerite.core.errors import InvalidArgument
from nerite.frameworks.trees.forest import MODEL_TYPES

_log = logging.getLogger("nerite.frameworks.trees")

ENGINES: Final = ("auto", "treelite", "xgboost", "lightgbm", "onnxruntime")
LAYOUTS: Final = ("depth_first", "breadth_first", "layered")
_WITHOUT_MEANING: Final = frozenset(
    {
        "algo",
        "blocks_per_sm",
        "storage_type",
        "threads_per_tree",
        "transfer_threshold",
        "use_experimental_optimizations",
    }
)
"""Parameters of older FIL versions on GPUs; they do not affect predictions."""
_ON_GPU: Final = frozenset({"chunk_size", "layout"})
_KNOWN: Final = frozenset(
    {
        "cpu_nthread",
        "engine",
        "is_classifier",
        "model_type",
        "output_class",
        "predict_proba",
        "threshold",
        "xgboost_allow_unknown_field",
        *_WITHOUT_MEANING,
        *_ON_GPU,
    }
)


class Parameters(NamedTuple):
    """The parameters of one model, as values."""

    model_type: str
    """A format of Triton's FIL backend; empty to detect it from the file."""
    is_classifier: bool | None
    """Whether the model predicts classes; None: what the model itself predicts, values or probabilities."""
    predict_proba: bool
    threshold: float
    """The probability above which a row belongs to the second of two classes."""
    allow_unknown_field: bool
    engine: str
    threads: int
    """0: the number of cores of the instance."""
    layout: str
    chunk_size: int
    """0: the engine's own choice."""

    @property
    def classes(self) -> bool:
        """Whether predictions are numbers of classes."""
        return bool(self.is_classifier) and not self.predict_proba


def read_parameters(context: ModelContext) -> Parameters:
    """Read the parameters of a model, and log those that have no effect here.

    Raises ``InvalidArgument`` for unknown parameters and invalid values.
    """
    given = context.config.get("parameters", {})
    for key in given:
        # Parameters in capitals, such as EXECUTION_MODE, are the server's.
        if key not in _KNOWN and not key.isupper():
            near = nearest(key, _KNOWN)
            remedy = f"Did you mean '{near}'?" if near else f"There are: {', '.join(sorted(_KNOWN))}."
            raise InvalidArgument(
                f"model '{context.name}' has the parameter '{key}', which tree models do not have. {remedy}"
            )
    on_gpu = any(group.get("kind") == "KIND_GPU" for group in context.config.get("instance_group", ()))
    if idle := sorted(given.keys() & (_WITHOUT_MEANING if on_gpu else _WITHOUT_MEANING | _ON_GPU)):
        _log.info("parameters of model '%s' that have no effect here: %s", context.name, ", ".join(idle))
    classifier = {flag(context, name, default=False) for name in ("is_classifier", "output_class") if name in given}
    if len(classifier) > 1:
        raise InvalidArgument(
            f"model '{context.name}': 'output_class' is the old name of 'is_classifier', and they contradict each "
            "other. Leave out 'output_class'."
        )
    return Parameters(
        model_type=_choice(context, "model_type", ("", *MODEL_TYPES)),
        is_classifier=classifier.pop() if classifier else None,
        predict_proba=flag(context, "predict_proba", default=False),
        threshold=parameter(context, "threshold", "0.5", _number, "a number"),
        allow_unknown_field=flag(context, "xgboost_allow_unknown_field", default=False),
        engine=_choice(context, "engine", ENGINES),
        threads=max(0, thread_count(context, "cpu_nthread")),
        layout=_choice(context, "layout", LAYOUTS),
        chunk_size=max(0, parameter(context, "chunk_size", "0", integer_parameter, "a number of rows")),
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidArgument(f"failed to convert '{text}' to a number") from None


def _choice(context: ModelContext, key: str, values: Sequence[str]) -> str:
    """Return a parameter that is one of ``values``, by default the first. Raises ``InvalidArgument``."""
    value = context.parameter(key, values[0])
    if value not in values:
        near = nearest(value, values)
        raise InvalidArgument(
            f"parameter '{key}' of model '{context.name}' is '{value}', and has to be one of "
            f"{', '.join(filter(None, values))}." + (f" Did you mean '{near}'?" if near else "")
        )
    return value
