"""Requests with sample data for trials of a version: its first warm-up sample, or made-up data."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from nerite.core import tensor as dtypes
from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest, ReplySink, RequestHeader, RequestRoute
from nerite.core.sample_inputs import constant_value, sample_shapes
from nerite.core.signature import shape_text
from nerite.core.tensor import Buffer, TensorSpec, join_bytes
from nerite.models.running_version import RunningVersion
from nerite.models.warm_up import configured_samples

_PROMPT: Final = "text_input"
_SAMPLING: Final = "sampling_parameters"
_STREAM: Final = "stream"
_TEXT: Final = "The quick brown fox jumps over the lazy dog."


class TrialSample(NamedTuple):
    """The tensors of a request, and where they come from."""

    origin: str
    specs: tuple[TensorSpec, ...]
    data: Sequence[Buffer]

    def sent_to(
        self, running: RunningVersion, sink: ReplySink, now_ns: int, *, tokens: int = 0, timeout_us: int = 0
    ) -> InferenceRequest:
        """Return a request to a version; ``tokens``: as many are generated, one by one, if the model generates text.

        Raises ``InvalidArgument`` if the version does not accept the tensors.
        """
        specs, data = list(self.specs), list(self.data)
        signature = running.signature
        if tokens and _PROMPT in signature.inputs:
            settings = json.dumps({"max_tokens": tokens, "ignore_eos": True})
            for name, value in ((_STREAM, True), (_SAMPLING, settings)):
                declared = signature.inputs.get(name)
                if declared is not None and all(spec.name != name for spec in specs):
                    shape = (1,) * (len(declared.dims) + bool(signature.max_batch_size))
                    spec = TensorSpec(name, declared.datatype, shape)
                    specs.append(spec)
                    data.append(join_bytes([value]) if declared.datatype is dtypes.BYTES else _constant(spec))
        sequence = random.getrandbits(62) | 1 if running.config.sequence_batching is not None else 0
        header = RequestHeader(
            running.name,
            running.label,
            specs,
            timeout_us=timeout_us,
            sequence_id=sequence,
            sequence_start=bool(sequence),
            sequence_end=bool(sequence),
        )
        signature.bind(header)
        header.route = RequestRoute(self, running)
        return InferenceRequest(header, [bytearray(each) for each in data], sink, now_ns, "rollout-check")


def samples_of(running: RunningVersion, directory: Path | None) -> Sequence[TrialSample]:
    """Return the first warm-up sample of a version whose model is in ``directory``, or made-up data. Blocks.

    There are several of made-up data if the model has variable dimensions: the most plausible sizes come first.
    """
    if directory is not None:
        try:
            samples = configured_samples(running.config, running.signature, directory, lambda _: None)
        except NeriteError:
            samples = []
        for sample in samples:
            if not sample.said:
                return [TrialSample(f"warm-up sample '{sample.name}'", sample.header.inputs, sample.data)]
    wanted = [declared for declared in running.signature.inputs.values() if not declared.optional]
    free = [declared.name for declared in wanted if -1 in declared.dims and declared.datatype is not dtypes.BYTES]
    found = []
    for shapes in sample_shapes(running.signature, streams=running.decoupled):
        specs = tuple(TensorSpec(each.name, each.datatype, shapes[each.name]) for each in wanted)
        sizes = ", ".join(f"{name} {shape_text(shapes[name])}" for name in free)
        origin = f"made-up data, {sizes}" if sizes else "made-up data"
        found.append(TrialSample(origin, specs, [_constant(spec) for spec in specs]))
    return found


def _constant(spec: TensorSpec) -> bytes:
    """Return ones, a sentence for each string, and zeros where ones would name a second segment of a text."""
    if spec.datatype is dtypes.BYTES:
        return join_bytes([_TEXT] * spec.elements)
    number = constant_value(spec.name, spec.datatype)
    if number is None:
        number = 1
    if spec.datatype is dtypes.BF16:
        return np.full(spec.elements, 0x3F80 * number, "<u2").tobytes()
    return np.full(spec.elements, number, spec.datatype.numpy).tobytes()
