"""LoRA: one adapter beside the model, which all requests are answered with.

The pipeline ignores in silence the adapters that requests choose, and tensors that fit no layer; and it knows nothing
of how far an adapter is to count. So there is one for all, its file is compared with the layers of the model, and what
its configuration says beyond that is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nerite.backends.interface import ModelContext
from nerite.backends.llm import checkpoint
from nerite.core.errors import InvalidArgument, Unavailable, Unsupported

FILE: Final = "multi_lora.json"
"""As Triton's vLLM backend has it: names of adapters, and where each lies."""
_WEIGHTS: Final = "adapter_model.safetensors"
_CONFIG: Final = "adapter_config.json"
_PREFIX: Final = "base_model.model."
_PART: Final = re.compile(r"(.+)[_.]lora[_.](?:A|B|up|down)\.weight")
_PLAIN: Final[dict[str, tuple[Any, ...]]] = {
    "alpha_pattern": (None, {}),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "peft_type": (None, "LORA"),
    "rank_pattern": (None, {}),
    "use_dora": (None, False),
}
"""What the engine would not do, and the values that ask for nothing."""


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter that lies beside a model."""

    name: str
    file: Path
    scale: float
    """What its product is multiplied with."""


def find(context: ModelContext) -> LoraAdapter | None:
    """Return the adapter of a model; None if it has none. Raises ``NeriteError``."""
    place = context.version_directory / FILE
    if not place.is_file():
        return None
    named = checkpoint.described(context.version_directory, FILE)
    if not named or not all(isinstance(path, str) and path for path in named.values()):
        raise InvalidArgument(f"model '{context.name}': '{place}' has to be names of adapters and their directories")
    if len(named) > 1:
        raise Unsupported(
            f"model '{context.name}' has {len(named)} adapters in {FILE} ({', '.join(sorted(named))}), and the engine "
            "openvino_genai takes one, for all requests: leave one there, or make a model of each"
        )
    ((name, path),) = named.items()
    directory = context.version_directory / path
    file = directory / _WEIGHTS
    if not file.is_file():
        raise Unavailable(f"model '{context.name}': the adapter '{name}' of {FILE} has no '{file}'")
    return LoraAdapter(name, file, _scale(f"model '{context.name}': the adapter '{name}'", directory))


def _scale(adapter: str, directory: Path) -> float:
    described = checkpoint.described(directory, _CONFIG)
    for key, plain in _PLAIN.items():
        if described.get(key) not in plain:
            raise Unsupported(f"{adapter} has '{key}' in {_CONFIG}, which the engine openvino_genai does not do")
    rank, alpha = described.get("r"), described.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)):
        raise InvalidArgument(f"{adapter} has no {_CONFIG} with 'r' and 'lora_alpha', which say how far it counts")
    return alpha / (math.sqrt(rank) if described.get("use_rslora") else rank)


def check(adapter: LoraAdapter, layers: Iterable[str]) -> None:
    """Raise ``InvalidArgument`` if a tensor of an adapter belongs to none of the ``layers`` of its model."""
    spellings = [spelling for layer in layers for spelling in (layer, layer.replace(".", "_"))]
    for tensor in _tensors(adapter.file):
        part = _PART.fullmatch(tensor)
        layer = part[1].removeprefix(_PREFIX) if part and part[1].startswith(_PREFIX) else ""
        if not layer or not any(layer in spelling for spelling in spellings):
            raise InvalidArgument(
                f"the adapter '{adapter.name}' has the tensor '{tensor}', for which the model has no layer: it was "
                "made for another model"
            )


def _tensors(file: Path) -> list[str]:
    """Return the names of the tensors in a file. Raises ``InvalidArgument`` if it is not in the format safetensors."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(size, file.stat().st_size)))
        return [name for name in header if name != "__metadata__"]
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"'{file}' is no file of the format safetensors: {error}") from None
