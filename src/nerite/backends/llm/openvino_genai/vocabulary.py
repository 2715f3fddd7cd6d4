"""From tokens to text without the framework, where a text is nothing but the bytes of its tokens.

So it is with most tokenizers of language models (BPE on bytes). The network that the framework decodes with then has
the bytes of all tokens, and a call of it costs 0.4 ms after each step, when it finds nothing in the caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import numpy as np

_NETWORK: Final = "openvino_detokenizer.xml"
_DECODER: Final = "VocabDecoder"
_PLAIN: Final = frozenset(
    {"Parameter", "Const", "Convert", _DECODER, "FuzeRagged", "UTF8Validate", "StringTensorPack", "Result"}
)
"""What such a network is made of. Whatever else is in it does something else to texts."""


class Vocabulary:
    """The bytes of each token. Decodes as the framework's tokenizer does."""

    def __init__(self, begins: Sequence[int], ends: Sequence[int], content: bytes, special: frozenset[int]) -> None:
        """Token ``i`` is ``content[begins[i]:ends[i]]``. ``special`` ones are left out, where that is said."""
        self._begins = begins
        self._ends = ends
        self._content = content
        self._special = special
        self._known: dict[int, bytes] = {}

    def decode(self, tokens: Sequence[Any], *, skip_special_tokens: bool = True) -> Any:
        """Return the text of tokens, or those of several lists of them."""
        if tokens and not isinstance(tokens[0], int):
            return [self._text(each, skip_special_tokens) for each in tokens]
        return self._text(tokens, skip_special_tokens)

    def _text(self, tokens: Sequence[int], skip_special: bool) -> str:
        known, special = self._known, self._special
        pieces = []
        for token in tokens:
            if skip_special and token in special:
                continue
            piece = known.get(token)
            if piece is None:
                piece = known[token] = self._piece(token)
            pieces.append(piece)
        return b"".join(pieces).decode("utf-8", "replace")

    def _piece(self, token: int) -> bytes:
        if token >= len(self._begins):  # Networks may have more of them than there are.
            return b""
        return self._content[self._begins[token] : self._ends[token]]


def read(directory: Path) -> Vocabulary | None:
    """Return the vocabulary of a model, if texts are nothing but the bytes of tokens."""
    network = ElementTree.parse(directory / _NETWORK).getroot()
    layers = {layer.attrib["id"]: layer for layer in network.iterfind("layers/layer")}
    kinds = [layer.attrib["type"] for layer in layers.values()]
    if not _PLAIN.issuperset(kinds) or kinds.count(_DECODER) != 1:
        return None
    decoder = next(id for id, layer in layers.items() if layer.attrib["type"] == _DECODER)
    sources = {
        edge.attrib["to-port"]: layers[edge.attrib["from-layer"]]
        for edge in network.iterfind("edges/edge")
        if edge.attrib["to-layer"] == decoder
    }
    constants = [sources.get(str(port)) for port in range(1, 5)]
    if not all(layer is not None and layer.attrib["type"] == "Const" for layer in constants):
        return None
    weights = (directory / _NETWORK).with_suffix(".bin").read_bytes()
    begins, ends, content, special = (_value(layer, weights) for layer in constants)
    return Vocabulary(begins.tolist(), ends.tolist(), content.tobytes(), frozenset(special.tolist()))


def _value(layer: Any, weights: bytes) -> np.ndarray[Any, Any]:
    data = layer.find("data").attrib
    kind = np.dtype({"i32": np.int32, "i64": np.int64, "u8": np.uint8}[data["element_type"]])
    return np.frombuffer(weights, kind, int(data["size"]) // kind.itemsize, int(data["offset"]))
