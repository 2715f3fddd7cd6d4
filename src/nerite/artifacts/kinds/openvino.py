"""OpenVINO's intermediate representation: a graph in XML, and its weights beside it."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from nerite.artifacts.artifact import Artifact, Unusable
from nerite.artifacts.candidate import Candidate, cut_off
from nerite.config.model_config import ModelConfig

_AGAIN = "Save the model again: openvino.save_model(model, 'model.xml')"


def recognise(candidate: Candidate) -> Artifact | None:
    """Return a graph with its weights."""
    path = candidate.path
    if candidate.suffix == ".bin" and path.with_suffix(".xml").is_file():
        candidate = candidate.at(path.with_suffix(".xml"))
        path = candidate.path
    head = candidate.head.lstrip()
    if not head.startswith((b"<?xml", b"<net")) or b"<net" not in head:
        return None
    needed = _weights(path)
    files = {"model.xml": path}
    weights = path.with_suffix(".bin")
    if weights.is_file():
        if weights.stat().st_size < needed:
            raise cut_off(
                weights, f"{needed - weights.stat().st_size:,} bytes of the weights of {path.name} are missing"
            )
        files["model.bin"] = weights
    elif needed:
        remedy = f"Copy {weights.name} beside it: it was written together with {path.name}."
        raise Unusable(path, f"its weights are missing: there is no {weights}", remedy)
    return Artifact("OpenVINO model", path, candidate.name, ModelConfig(backend="openvino"), files)


def _weights(path: Path) -> int:
    """Return how many bytes the weights have to have. Raises ``Unusable``."""
    needed = 0
    try:
        for _, element in ElementTree.iterparse(path):
            if element.tag == "data" and "offset" in element.attrib and "size" in element.attrib:
                needed = max(needed, int(element.attrib["offset"]) + int(element.attrib["size"]))
            element.clear()
    except ElementTree.ParseError as error:
        raise Unusable(path, f"the XML is broken: {error}", _AGAIN) from None
    return needed
