"""Builds the request of an ensemble step from the responses of earlier steps, and the links of fused steps.

Used by the server and by workers; workers know nothing else about ensembles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.request import RequestedOutput, RequestHeader
from nerite.core.response import ResponseHeader
from nerite.core.signature import Signature, SignatureInput, SignatureOutput, shape_text
from nerite.core.tensor import TensorSpec

_MAX_COUNT = 128
"""Maximum number of memoized requests per link."""


class StepHeader(RequestHeader):
    """Header of a step's request, which also names the repository of the model."""

    __slots__ = ("namespace",)

    namespace: str


class TensorSource(NamedTuple):
    """Source of a model's input in a fused step."""

    input: str
    name: str
    """Name of the tensor at its source."""
    before: bool
    """The source is an output of the previous step; else an input of the first step."""


class StepQuestion(NamedTuple):
    """Request of a fused step: its header, and where the data of its inputs is."""

    header: RequestHeader
    places: tuple[tuple[bool, int], ...]
    """For each input, whether it comes from the previous step, and the index of the tensor there."""


class FusedLink(NamedTuple):
    """Step that follows another one in the same worker."""

    ensemble: str
    number: int
    """Number of the step, from 0."""
    version: str
    """Empty for the latest version."""
    namespace: str
    """Repository of the model if names are unique only within a repository; else empty."""
    signature: Signature
    """Signature of the step's model."""
    sources: tuple[TensorSource, ...]
    outputs: tuple[str, ...]
    """Names of the outputs that are used."""
    after_batched: bool
    """The model of the previous step has a batch dimension."""
    first_batched: bool
    """The model of the first step has a batch dimension."""

    def question(self, first: RequestHeader, before: ResponseHeader) -> StepQuestion | None:
        """Return this step's request, given the first step's request and the previous step's response.

        Return None if they do not match the model's signature.
        """
        had = {spec.name: (at, spec) for at, spec in enumerate(first.inputs)}
        came = {spec.name: (at, spec) for at, spec in enumerate(before.outputs)}
        specs: list[TensorSpec] = []
        places: list[tuple[bool, int]] = []
        batched = self.signature.max_batch_size > 0
        for source in self.sources:
            found = (came if source.before else had).get(source.name)
            if found is None:
                continue
            at, spec = found
            dims = self.signature.inputs[source.input].dims
            shape = fitted_inputs(
                spec.shape, self.after_batched if source.before else self.first_batched, dims, batched
            )
            specs.append(TensorSpec(source.input, spec.datatype, shape))
            places.append((source.before, at))
        header = step_inputs(self.signature.model_name, self.version, self.namespace, specs, self.outputs, first)
        try:
            self.signature.bind(header)
        except InvalidArgument:
            return None
        return StepQuestion(header, tuple(places))

    def explained(self, error: NeriteError, header: RequestHeader, version: str) -> NeriteError:
        """Return the error of the model as reported to the caller of the ensemble."""
        return explain_step_failure(error, self.ensemble, self.number, self.signature.model_name, version, header)


def explain_step_failure(
    error: NeriteError, ensemble: str, number: int, model: str, version: str, header: RequestHeader
) -> NeriteError:
    """Return the error of a step for the caller: Triton's text, followed by the location of the step."""
    tensors = ", ".join(f"{spec.name} {spec.datatype.name} {shape_text(spec.shape)}" for spec in header.inputs)
    given = tensors or "no tensors"
    return error.prefixed(
        f"in ensemble '{ensemble}', ",
        f"\n    at step {number + 1} of '{ensemble}': model '{model}', version {version}, given {given}",
    )


def step_inputs(
    model: str,
    version: str,
    namespace: str,
    specs: Sequence[TensorSpec],
    outputs: Sequence[str],
    caller: RequestHeader,
) -> StepHeader:
    """Return the header of a step's request: everything except the tensors is copied from the caller's header."""
    header = StepHeader(
        model,
        version,
        specs,
        [RequestedOutput(name) for name in outputs],
        parameters=caller.parameters,
        priority=caller.priority,
        timeout_us=caller.timeout_us,
        sequence_id=caller.sequence_id,
        sequence_start=caller.sequence_start,
        sequence_end=caller.sequence_end,
        caller=caller.caller,
    )
    header.namespace = namespace
    return header


def fitted_inputs(shape: tuple[int, ...], batched: bool, dims: Sequence[int], wants_batch: bool) -> tuple[int, ...]:
    """Return the shape of a tensor with the batch dimension added or removed as the consuming model requires.

    As in Triton, a shape that fits neither way is left unchanged for the consumer to reject.
    """
    if batched == wants_batch:
        return shape
    if wants_batch:
        return (1, *shape) if _matches(shape, dims) else shape
    if not _matches(shape, dims) and shape[:1] == (1,) and _matches(shape[1:], dims):
        return shape[1:]
    return shape


def _matches(shape: Sequence[int], dims: Sequence[int]) -> bool:
    return len(shape) == len(dims) and all(expected in (-1, size) for size, expected in zip(shape, dims, strict=True))


# Serialisation of links for the transfer to a worker.


def link_to_json(link: FusedLink) -> dict[str, Any]:
    """Return a link as JSON."""
    model = link.signature
    return {
        **link._asdict(),
        "signature": [
            model.model_name,
            model.max_batch_size,
            [(each.name, each.datatype.name, each.dims, each.optional, each.ragged) for each in model.inputs.values()],
            [(each.name, each.datatype.name, each.dims) for each in model.outputs.values()],
        ],
    }


def link_from_json(value: dict[str, Any]) -> FusedLink:
    """Return the link described by ``link_to_json``."""
    name, max_batch_size, inputs, outputs = value["signature"]
    signature = Signature(
        name,
        max_batch_size,
        [SignatureInput(name, dtypes.BY_NAME[datatype], tuple(dims), *rest) for name, datatype, dims, *rest in inputs],
        [SignatureOutput(name, dtypes.BY_NAME[datatype], tuple(dims)) for name, datatype, dims in outputs],
    )
    sources = tuple(TensorSource(*each) for each in value["sources"])
    return FusedLink(**{**value, "signature": signature, "sources": sources, "outputs": tuple(value["outputs"])})
