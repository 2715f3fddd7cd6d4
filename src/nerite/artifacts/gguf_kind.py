"""Recognises GGUF files, the format of llama.cpp, by their header. OpenVINO GenAI reads some of their architectures.

Beside the file, the chat template and the length of the context are written as a checkpoint has them, so that the
server need not read GGUF.
"""

from __future__ import annotations

import importlib.util
import json
import math
import struct
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

from nerite.artifacts.artifact import Artifact, Candidate, Unusable, cut_off
from nerite.config.model_config import ModelConfig

FILE: Final = "model.gguf"
ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
"""What OpenVINO GenAI reads."""
_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value by the number of its type; texts and arrays have no fixed size."""
_FORMS: Final = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _ARRAY = 8, 9
_MOST_VALUES: Final = 65_536
_MOST_ELEMENTS: Final = 4_000_000
_LONGEST_TEXT: Final = 16 << 20
_MOST_TENSORS: Final = 1_000_000
_MOST_DIMENSIONS: Final = 8
_BLOCKS: Final = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 30: (1, 2),
}  # fmt: skip
"""Numbers and bytes of a block of weights, by the number of their type."""
_TOKENS: Final = "tokenizer.ggml.tokens"


class _InvalidHeader(Exception):
    """The header cannot be that of a GGUF file."""


def recognise_gguf(candidate: Candidate) -> Artifact | None:
    """Recognise a GGUF file. Rejects architectures that no engine here can read, and truncated files."""
    if not candidate.head.startswith(_MAGIC):
        return None
    path = candidate.path
    try:
        with path.open("rb") as file:
            values = _values(file, candidate.size)
    except _InvalidHeader as error:
        raise cut_off(path, str(error)) from None
    architecture = str(values.get("general.architecture", ""))
    if architecture not in ARCHITECTURES:
        remedy = (
            "Serve the Hugging Face checkpoint that it was made from: nerite serve ORG/NAME. Or run it with the server "
            "of llama.cpp."
        )
        what = f"a GGUF file of the architecture '{architecture}'; OpenVINO GenAI reads {', '.join(ARCHITECTURES)}"
        raise Unusable(path, f"this is {what}", remedy)
    if importlib.util.find_spec("openvino_genai") is None:
        raise Unusable(path, "this is a GGUF file, which OpenVINO GenAI reads", "Install it: pip install 'nerite[llm]'")
    return Artifact(
        f"GGUF model ({architecture})",
        path,
        candidate.name,
        ModelConfig(backend="llm"),
        {FILE: path},
        make=partial(_describe, values, architecture),
        remarks=("OpenVINO GenAI runs it. It is converted when it is first loaded, with its own quantization.",),
    )


def _describe(values: dict[str, Any], architecture: str, directory: Path) -> None:
    """Write what the server needs of the header into the version directory."""
    config: dict[str, Any] = {"model_type": architecture}
    positions = values.get(f"{architecture}.context_length")
    if isinstance(positions, int) and positions > 0:
        config["max_position_embeddings"] = positions
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    tokenizer: dict[str, str] = {}
    tokens = values.get(_TOKENS, [])
    for name in ("bos", "eos"):
        number = values.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            tokenizer[f"{name}_token"] = tokens[number]
    if isinstance(template := values.get("tokenizer.chat_template"), str):
        tokenizer["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2))


def _values(file: BinaryIO, size: int) -> dict[str, Any]:
    """Return the header's values but for arrays, of which only the tokens are kept. Raises ``_InvalidHeader``."""
    _, version, tensors, count = _unpack(file, "<4sIQQ")
    if version not in _VERSIONS:
        raise _InvalidHeader(f"version {version} of the format is not known")
    if count > _MOST_VALUES or tensors > _MOST_TENSORS:
        raise _InvalidHeader(f"its header has {count} values and {tensors} tensors")
    found: dict[str, Any] = {}
    for _ in range(count):
        key = _text(file, size)
        (kind,) = _unpack(file, "<I")
        value = _value(file, size, kind, keep=key == _TOKENS)
        if value is not None:
            found[key] = value
    end = 0
    for _ in range(tensors):
        _text(file, size)
        (dimensions,) = _unpack(file, "<I")
        if dimensions > _MOST_DIMENSIONS:
            raise _InvalidHeader(f"a tensor has {dimensions} dimensions")
        *shape, kind, offset = _unpack(file, f"<{dimensions}QIQ")
        block, length = _BLOCKS.get(kind, (1, 0))
        end = max(end, offset + math.prod(shape) // block * length)
    if (missing := file.tell() + end - size) > 0:
        raise _InvalidHeader(f"{missing:,} bytes of its weights are missing")
    return found


def _value(file: BinaryIO, size: int, kind: int, *, keep: bool) -> Any:
    if kind == _TEXT:
        return _text(file, size)
    if kind == _ARRAY:
        inner, count = _unpack(file, "<IQ")
        if count > _MOST_ELEMENTS or inner == _ARRAY or (inner != _TEXT and inner not in _SIZES):
            raise _InvalidHeader(f"its header has an array of {count} values")
        if inner == _TEXT:
            texts = [_text(file, size) for _ in range(count)]
            return texts if keep else None
        file.seek(count * _SIZES[inner], 1)
        return None
    if kind not in _FORMS:
        raise _InvalidHeader(f"its header has a value of the unknown type {kind}")
    return _unpack(file, _FORMS[kind])[0]


def _text(file: BinaryIO, size: int) -> str:
    (length,) = _unpack(file, "<Q")
    if length > min(size, _LONGEST_TEXT):
        raise _InvalidHeader(f"its header has a text of {length:,} bytes")
    raw = file.read(length)
    if len(raw) < length:
        raise _InvalidHeader("its header is incomplete")
    return raw.decode(errors="replace")


def _unpack(file: BinaryIO, form: str) -> tuple[Any, ...]:
    raw = file.read(struct.calcsize(form))
    if len(raw) < struct.calcsize(form):
        raise _InvalidHeader("its header is incomplete")
    return struct.unpack(form, raw)
