"""What the parameters of a model say: those of Triton's FIL backend, old and new, and ``engine``. Pure."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

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
"""Of FIL on a GPU as it was, or of an engine that it had: they change no answer."""
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


@dataclass(frozen=True)
class Parameters:
    """The parameters of one model, as values."""

    model_type: str
    """A format of Triton's FIL backend; empty where the file has to tell."""
    is_classifier: bool | None
    """Whether classes are wanted; None: what the model itself gives, values or probabilities."""
    predict_proba: bool
    threshold: float
    """The probability above which a row is of the second of two classes."""
    allow_unknown_field: bool
    engine: str
    threads: int
    """0: as many as the instance has cores."""
    layout: str
    chunk_size: int
    """0: the engine's own choice."""

    @property
    def classes(self) -> bool:
        """Whether the answer is the number of a class."""
        return bool(self.is_classifier) and not self.predict_proba


def read(name: str, config: Mapping[str, Any]) -> Parameters:
    """Read the parameters of a model, and note in the log which have no meaning here.

    Raises ``InvalidArgument`` for a parameter that nobody knows and for a value that makes no sense.
    """
    given = {key: str(value["string_value"]) for key, value in config.get("parameters", {}).items()}
    for key in given:
        # What is in capitals is not of the backend: EXECUTION_MODE and the like.
        if key not in _KNOWN and not key.isupper():
            near = nearest(key, _KNOWN)
            remedy = f"Did you mean '{near}'?" if near else f"There are: {', '.join(sorted(_KNOWN))}."
            raise InvalidArgument(f"model '{name}' has the parameter '{key}', which tree models do not have. {remedy}")
    on_gpu = any(group.get("kind") == "KIND_GPU" for group in config.get("instance_group", ()))
    if idle := sorted(given.keys() & (_WITHOUT_MEANING if on_gpu else _WITHOUT_MEANING | _ON_GPU)):
        _log.info("parameters of model '%s' that have no meaning here, and change no answer: %s", name, ", ".join(idle))
    reader = _Reader(name, given)
    return Parameters(
        model_type=reader.choice("model_type", ("", *MODEL_TYPES)),
        is_classifier=reader.is_classifier(),
        predict_proba=reader.boolean("predict_proba"),
        threshold=reader.number("threshold", 0.5),
        allow_unknown_field=reader.boolean("xgboost_allow_unknown_field"),
        engine=reader.choice("engine", ENGINES),
        threads=max(0, reader.integer("cpu_nthread")),
        layout=reader.choice("layout", LAYOUTS),
        chunk_size=max(0, reader.integer("chunk_size")),
    )


class _Reader:
    """Values of one model's parameters."""

    def __init__(self, name: str, given: Mapping[str, str]) -> None:
        self._name = name
        self._given = given

    def is_classifier(self) -> bool | None:
        names = [name for name in ("is_classifier", "output_class") if name in self._given]
        values = {self.boolean(name) for name in names}
        if len(values) > 1:
            raise InvalidArgument(
                f"model '{self._name}': 'output_class' is the old name of 'is_classifier', and they contradict each "
                "other. Leave out 'output_class'."
            )
        return values.pop() if values else None

    def boolean(self, key: str) -> bool:
        value = self._given.get(key, "false").lower()
        if value not in ("true", "1", "false", "0"):
            raise self._refusal(key, "true or false")
        return value in ("true", "1")

    def number(self, key: str, default: float) -> float:
        try:
            return float(self._given.get(key, default))
        except ValueError:
            raise self._refusal(key, "a number") from None

    def integer(self, key: str) -> int:
        try:
            return int(self._given.get(key, "0"))
        except ValueError:
            raise self._refusal(key, "a whole number") from None

    def choice(self, key: str, values: tuple[str, ...]) -> str:
        value = self._given.get(key, values[0])
        if value not in values:
            near = nearest(value, values)
            expected = f"one of {', '.join(filter(None, values))}"
            raise self._refusal(key, expected, f" Did you mean '{near}'?" if near else "")
        return value

    def _refusal(self, key: str, expected: str, more: str = "") -> InvalidArgument:
        return InvalidArgument(
            f"parameter '{key}' of model '{self._name}' is '{self._given[key]}', and has to be {expected}.{more}"
        )
