"""The requests of ``model_warmup``: what the configuration and the files in ``warmup/`` say, as tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from nerite.backends.configuration import made_inputs
from nerite.config.json_form import to_json
from nerite.config.mistake import Mistake
from nerite.config.model_config import ModelConfig, ModelWarmup, WarmupInput
from nerite.core import dtype as dtypes
from nerite.core.dtype import DataType
from nerite.core.errors import Internal, InvalidArgument, NeriteError
from nerite.core.file_names import check_within
from nerite.core.request import NOBODY, InferenceRequest, ReplySink, RequestHeader, labelled
from nerite.core.signature import Input, Signature
from nerite.core.tensor import Buffer, TensorSpec, join_bytes
from nerite.execution.sequence_dress import Said

FOLDER = "warmup"


class Sample(NamedTuple):
    """A request that each instance answers before it takes others."""

    name: str
    rows: int
    """How many requests of one row run as a batch."""
    times: int
    """How often it runs."""
    header: RequestHeader
    data: Sequence[Buffer]
    said: Said = MappingProxyType({})
    """Of a model with sequences: what the sample says itself of inputs that the server makes otherwise."""

    def requests(self, sink: ReplySink, now_ns: int) -> list[InferenceRequest]:
        """Return a batch, whose memory is its own: models may work in place."""
        return [
            InferenceRequest(self.header, [bytearray(each) for each in self.data], sink, now_ns)
            for _ in range(self.rows)
        ]


def samples(config: ModelConfig, signature: Signature, directory: Path, skipped: Callable[[str], None]) -> list[Sample]:
    """Return the samples of a model whose files are in ``directory``. Blocks. Raises Triton's refusals.

    ``skipped`` is told the name of each that has no row, and that nobody will run.
    """
    made = []
    unsaid = _unsaid(config, signature)
    for warmup in config.model_warmup:
        if warmup.batch_size:
            try:
                made.append(_sample(warmup, signature, unsaid, directory))
            except NeriteError as error:
                raise type(error)(f"{error.message}\n    {_which(warmup)}") from None
        else:
            skipped(warmup.name)
    return made


def mistakes(config: ModelConfig, signature: Signature, directory: Path) -> list[Mistake]:
    """Return what is wrong with the samples of a model. Blocks, and raises nothing."""
    found = []
    unsaid = _unsaid(config, signature)
    for index, warmup in enumerate(config.model_warmup):
        try:
            if warmup.batch_size:
                _sample(warmup, signature, unsaid, directory)
        except NeriteError as error:
            place = ("model_warmup", index)
            found.append(Mistake(message=error.message, path=place, remedy=_which(warmup), error=type(error)))
    return found


def _which(warmup: ModelWarmup) -> str:
    return f"It is the sample '{warmup.name}' of 'model_warmup' that cannot be made."


def _unsaid(config: ModelConfig, signature: Signature) -> Signature:
    """Return the inputs that callers do not send, and that a sample may have: controls and states of sequences."""
    given = to_json(config)
    inputs = [
        Input(each["name"], dtypes.BY_CONFIG_NAME[each["data_type"]], tuple(each["dims"]), optional=True)
        for each in made_inputs(given)
    ]
    return Signature(signature.model_name, signature.max_batch_size, inputs, [])


def _sample(warmup: ModelWarmup, signature: Signature, unsaid: Signature, directory: Path) -> Sample:
    limit = signature.max_batch_size
    if warmup.batch_size > max(limit, 1):
        raise InvalidArgument(
            f"failed to run warmup sample '{warmup.name}': batch size {warmup.batch_size} for "
            f"'{signature.model_name}', max allowed is {limit}; "
        )
    batch = (1,) if limit > 0 else ()
    asked: dict[str, tuple[TensorSpec, Buffer]] = {}
    said: dict[str, tuple[TensorSpec, Buffer]] = {}
    for name, declared in warmup.inputs.items():
        if any(size < 0 for size in declared.dims):
            raise InvalidArgument(
                f"warmup setting expects all variable-size dimensions are specified for input '{name}'"
            )
        spec = TensorSpec(name, dtypes.BY_CONFIG_NAME[declared.data_type], (*batch, *declared.dims))
        tensors = said if name in unsaid.inputs else asked
        tensors[name] = spec, _data(declared, spec, directory / FOLDER)
    sample = Sample(warmup.name, warmup.batch_size, max(warmup.count, 1), *_request(signature, asked), said)
    checked(Sample(sample.name, 1, 1, *_request(unsaid, said)), unsaid)
    return checked(sample, signature)


def _request(signature: Signature, tensors: Said) -> tuple[RequestHeader, list[Buffer]]:
    """Return a request with these inputs. Raises what is said to a client if that is not right."""
    header = RequestHeader(signature.model_name, "", [spec for spec, _ in tensors.values()])
    signature.bind(header)
    return header, [data for _, data in tensors.values()]


def checked(sample: Sample, signature: Signature) -> Sample:
    """Return a sample whose data is what its header says. Raises what is said to a client otherwise."""
    wrong = signature.check_data(sample.requests(NOBODY, 0)[0])
    if wrong is not None:
        raise wrong
    return sample


def _data(declared: WarmupInput, spec: TensorSpec, folder: Path) -> bytes:
    """Return the bytes of an input of one row."""
    if declared.input_data_file is not None:
        return _from_file(declared.input_data_file, spec, folder)
    if declared.zero_data is None and declared.random_data is None:
        wrong = f"warmup setting expects input '{spec.name}' to have input_data_type set"
        raise labelled(InvalidArgument(wrong), "")
    if spec.datatype is dtypes.BYTES:
        return bytes(join_bytes([b""] * spec.elements))
    return _random(spec.datatype, spec.elements) if declared.random_data is not None else bytes(spec.byte_size)


def _from_file(name: str, spec: TensorSpec, folder: Path) -> bytes:
    content = read_file(name, f"input '{spec.name}'", folder)
    if len(content) < spec.byte_size:
        wrong = f"warmup setting expects {spec.byte_size} bytes, but the data provided from {name} only has "
        raise labelled(InvalidArgument(f"{wrong}{len(content)} bytes"), "")
    return content if spec.byte_size < 0 else content[: spec.byte_size]


def read_file(name: str, of: str, folder: Path) -> bytes:
    """Return what is in a file of ``folder`` that ``of`` names. Raises ``NeriteError``."""
    path = folder / name
    check_within(name, f"warmup data file '{name}' of {of}", folder)
    try:
        return path.read_bytes()
    except OSError as error:
        raise Internal(f"failed to open text file for read {path}: {error.strerror}") from None


def _random(datatype: DataType, elements: int) -> bytes:
    """Return numbers as they may come: integers of the whole range, fractions below one."""
    if datatype is dtypes.BOOL:
        return bytes(random.choices((0, 1), k=elements))
    if datatype is dtypes.BF16:
        return (np.random.default_rng().random(elements, np.float32).view("<u4") >> 16).astype("<u2").tobytes()
    if datatype.numpy.kind == "f":
        return np.random.default_rng().random(elements).astype(datatype.numpy).tobytes()
    return random.randbytes(elements * datatype.size)
