"""Whole requests that warm a model up: a file in ``warmup/`` with a request a line, as clients send it.

The parameter ``WARMUP_REQUESTS`` of the configuration names the file. Triton gives that no meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from nerite.config.mistake import Mistake
from nerite.config.model_config import ModelConfig
from nerite.core.errors import NeriteError
from nerite.core.signature import Signature
from nerite.execution.sequence_terms import SequenceTerms
from nerite.execution.surroundings import ReadRequest
from nerite.execution.warm_up_data import FOLDER, Sample, checked, read_file

PARAMETER: Final = "WARMUP_REQUESTS"


def samples(config: ModelConfig, signature: Signature, directory: Path, read: ReadRequest) -> list[Sample]:
    """Return the requests recorded for a model whose files are in ``directory``. Blocks. Raises ``NeriteError``."""
    made = []
    for place, line in _lines(config, directory):
        try:
            made.append(_sample(place, line, config, signature, read))
        except NeriteError as error:
            raise type(error)(f"{error.message}\n    {_which(place)}") from None
    return made


def mistakes(config: ModelConfig, signature: Signature, directory: Path, read: ReadRequest) -> list[Mistake]:
    """Return what is wrong with the requests recorded for a model. Blocks, and raises nothing."""
    path = ("parameters", PARAMETER)
    found: list[Mistake] = []
    try:
        for place, line in _lines(config, directory):
            try:
                _sample(place, line, config, signature, read)
            except NeriteError as error:
                found.append(Mistake(message=error.message, path=path, remedy=_which(place), error=type(error)))
    except NeriteError as error:
        remedy = f"Write the name of a file in {directory / FOLDER}, with a request in each line."
        found.append(Mistake(message=error.message, path=path, remedy=remedy, error=type(error)))
    return found


def _lines(config: ModelConfig, directory: Path) -> Iterator[tuple[str, bytes]]:
    """Yield where each request is, and what it is. Raises ``NeriteError`` if the file cannot be read."""
    parameter = config.parameters.get(PARAMETER)
    if parameter is None:
        return
    name = parameter.string_value
    for number, line in enumerate(read_file(name, f"parameter '{PARAMETER}'", directory / FOLDER).split(b"\n"), 1):
        if line.strip():
            yield f"{name}:{number}", line


def _sample(place: str, line: bytes, config: ModelConfig, signature: Signature, read: ReadRequest) -> Sample:
    header, data = read(signature.model_name, line)
    signature.bind(header)
    if config.sequence_batching is not None:
        # One without a correlation id is a sequence by itself.
        refusal = SequenceTerms(config).refusal(header, header.sequence_id or 1, "")
        if refusal is not None:
            raise refusal
    return checked(Sample(place, 1, 1, header, data), signature)


def _which(place: str) -> str:
    return f"It is the request at {FOLDER}/{place} that is wrong."
