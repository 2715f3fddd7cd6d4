"""Writes OpenVINO's files of checkpoints of known families, without torch, transformers and optimum."""

from typing import Final

PROGRAM: Final = f"{__name__}.program"
"""The module that converts a checkpoint, in a process of its own."""
FORMATS: Final = ("fp16", "fp32", "int8", "int4")
"""Formats of weights that it writes."""
