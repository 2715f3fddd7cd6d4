"""Converts a pickled estimator to ONNX. Run as a separate process, because reading a pickle can run any code."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

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
    if count is None and not _vectorizers(model):
        print("it was not fitted, or does not say how many features it takes (n_features_in_)", file=sys.stderr)
        return 1
    try:
        content = _converted_text(model) if count is None else _converted(model, count).SerializeToString()
        Path(target).write_bytes(content)
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


# Text pipelines: vectorizers turn strings into features. ONNX has their operations, with regular expressions of RE2
# instead of Python's, and without stop words within texts, so the result is compared with the original.

_WORDS: Final = {
    r"(?u)\b\w\w+\b": r"[\pL\pN_][\pL\pN_]+",
    r"(?u)\b\w+\b": r"[\pL\pN_]+",
}
"""RE2's form of the token patterns that are in use, the first of which is scikit-learn's default."""
_LOCALE: Final = "C.UTF-8"
"""For lower case; every Linux image has it, unlike en_US."""
_TEXTS: Final = 200
_TEXT_LENGTH: Final = 12
_CLOSE: Final = 1e-4
_HARD_TEXTS: Final = (
    "",
    " ",
    "I",
    "a b",
    "don't",
    "no-one",
    "x_1 22 3,5",
    "\tNEW\nline ",
    "Ärger über ÉTÉ, naïve",
    "…?!",
)


def _vectorizers(model: Any) -> list[Any]:
    """Return the vectorizers of texts that an estimator begins with; none if it also has other inputs."""
    if hasattr(model, "steps"):
        return _vectorizers(model.steps[0][1])
    if hasattr(model, "best_estimator_"):
        return _vectorizers(model.best_estimator_)
    if hasattr(model, "transformer_list"):
        found = [_vectorizers(each) for _, each in model.transformer_list]
        return [each for several in found for each in several] if all(found) else []
    return [model] if hasattr(model, "vocabulary_") and hasattr(model, "token_pattern") else []


def _converted_text(model: Any) -> bytes:
    """Return the ONNX model of a pipeline that takes texts. Raises ``ValueError`` if its answers differ."""
    import skl2onnx
    from skl2onnx.common.data_types import StringTensorType

    texts = _sample_texts([word for each in _vectorizers(model) for word in each.vocabulary_])
    wanted = _answers(model, texts)
    options: dict[int, dict[str, Any]] = {}
    for each in _vectorizers(model):
        # Stop words are not in the vocabulary. The converter would remove texts that are equal to one.
        each.stop_words = None
        options[id(each)] = {"locale": _LOCALE}
        if each.analyzer == "word":
            options[id(each)]["tokenexp"] = _WORDS.get(each.token_pattern, each.token_pattern.removeprefix("(?u)"))
    if hasattr(model, "predict_proba"):
        options[id(model)] = {"zipmap": False}
    converted = skl2onnx.convert_sklearn(
        model, initial_types=[("text", StringTensorType([None, 1]))], options=options, target_opset=_OPSET
    )
    _free_the_batch(converted)
    content: bytes = converted.SerializeToString()
    _compare(content, texts, wanted)
    return content


def _sample_texts(vocabulary: Sequence[str]) -> list[str]:
    """Return texts of words that the model knows, and some that are hard to split into words."""
    generator = np.random.default_rng(0)
    words = sorted({part for word in vocabulary for part in str(word).split()}) or ["word"]
    texts = [*_HARD_TEXTS]
    for _ in range(_TEXTS):
        chosen = [str(word) for word in generator.choice(words, generator.integers(1, _TEXT_LENGTH))]
        texts.append(" ".join(generator.permutation([*chosen, str(generator.choice(_HARD_TEXTS))])))
    return [text.title() if at % 3 else text for at, text in enumerate(texts)]


def _answers(model: Any, texts: list[str]) -> list[Any]:
    """Return what the original gives for texts, in the order of the outputs of a converted model."""
    if hasattr(model, "predict_proba"):
        return [model.predict(texts), model.predict_proba(texts)]
    if hasattr(model, "predict"):
        return [model.predict(texts)]
    features = model.transform(texts)
    return [features.toarray() if hasattr(features, "toarray") else features]


def _compare(content: bytes, texts: list[str], wanted: list[Any]) -> None:
    """Raise ``ValueError`` if a converted model answers otherwise than its original."""
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    found = session.run(None, {"text": np.array(texts, object).reshape(-1, 1)})
    for own, other in zip(wanted, found, strict=False):
        own, other = np.asarray(own), np.asarray(other)
        if own.dtype.kind == "f":
            same = np.abs(own - other.reshape(own.shape)).reshape(len(texts), -1).max(axis=1) <= _CLOSE
        else:
            same = np.array([one == two for one, two in zip(own.ravel().tolist(), other.ravel().tolist(), strict=True)])
        if not same.all():
            text = texts[int(np.argmin(same))]
            raise ValueError(f"in ONNX it answers {np.sum(~same)} of {len(texts)} texts differently, such as {text!r}")


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
