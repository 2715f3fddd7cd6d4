"""Converts a checkpoint: ``python -m nerite.llm.conversion.program CHECKPOINT DIRECTORY FORMAT``, in its own process.

Its memory is that of the tokenizer and of one weight at a time: weights go from file to file.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Final

from nerite.core.errors import NeriteError
from nerite.llm import checkpoint
from nerite.llm.conversion.decoder import HEAD, read_decoder
from nerite.llm.conversion.graph import DecoderGraph, save
from nerite.llm.conversion.tokenizer import write_tokenizer
from nerite.llm.conversion.weights import read_tensors

FILES: Final = (checkpoint.CONFIG, "tokenizer.json", "tokenizer_config.json")
"""Files that are copied."""


def convert(directory: Path, target: Path, weights: str) -> None:
    """Write OpenVINO's files of a checkpoint. Raises ``Unsupported`` if it is not of a known family."""
    decoder = read_decoder(directory)
    tensors = read_tensors(directory, decoder.shapes(), f"{HEAD}.weight")
    write_tokenizer(directory, target)
    graph = DecoderGraph(decoder, tensors, weights, target)
    save(graph.model(), target / "openvino_model.xml", weights)
    for name in FILES:
        if (directory / name).is_file():
            shutil.copyfile(directory / name, target / name)


def main(directory: str, target: str, weights: str) -> int:
    """Convert a checkpoint; print the reason and return 1 if that is not possible."""
    try:
        convert(Path(directory), Path(target), weights)
    except NeriteError as error:
        print(error.message)
    except Exception as error:  # of the libraries, for a file that is not as it should be
        print(f"{type(error).__name__}: {error}".replace("\n", " "))
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
