"""What is known, and neither served nor converted here: each with what to make of it."""

from __future__ import annotations

from typing import Final, NamedTuple

from nerite.artifacts.artifact import Artifact, Unusable
from nerite.artifacts.candidate import Candidate


class _Format(NamedTuple):
    """A format, the bytes that it begins with, and its remedy."""

    magic: bytes
    what: str
    remedy: str


_KERAS: Final = "Export it: keras.models.load_model('{name}').export('directory'), and add the directory."
_FORMATS: Final = (
    _Format(b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras wrote its models", _KERAS),
    _Format(b"CBM1", "a CatBoost model", "Save it as ONNX: model.save_model('model.onnx', format='onnx')"),
    _Format(b"GGUF", "a GGUF file, for llama.cpp", "Add the Hugging Face directory that it was made from."),
    _Format(b"\x93NUMPY", "an array of numpy, not a model", "Name the file that training has saved."),
)


def recognise(candidate: Candidate) -> Artifact | None:
    """Refuse the formats of others."""
    path = candidate.path
    if "model.weights.h5" in candidate.members:
        raise Unusable(path, "this is a Keras model", _KERAS.format(name=path.name))
    for known in _FORMATS:
        if candidate.head.startswith(known.magic):
            raise Unusable(path, f"this is {known.what}", known.remedy.format(name=path.name))
    return None
