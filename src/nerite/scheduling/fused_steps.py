"""What one step of an ensemble asks of its model, given the answers of others. Workers know no more of ensembles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.request import RequestedOutput, RequestHeader
from nerite.core.response import ResponseHeader
from nerite.core.signature import Signature, SignatureInput, SignatureOutput, shape_text
from nerite.core.tensor import TensorSpec

_MOST = 128
"""Requests that are remembered of a link."""


class StepHeader(RequestHeader):
    """What a step asks: it says of which repository the model is."""

    __slots__ = ("namespace",)

    namespace: str


class TensorSource(NamedTuple):
    """Where an input of a model comes from."""

    input: str
    name: str
    """What it is called where it comes from."""
    before: bool
    """An output of the step before; else an input of the first step."""


class StepQuestion(NamedTuple):
    """What a model is asked, and where the bytes are."""

    header: RequestHeader
    places: tuple[tuple[bool, int], ...]
    """Of each input: whether it is of the step before, and which of the tensors there."""


class FusedLink(NamedTuple):
    """A step that follows another one in the same worker."""

    ensemble: str
    number: int
    """Of the step; from 0."""
    version: str
    """Empty for the latest."""
    namespace: str
    """The repository that the model is of, where models of one name are told apart by it; else empty."""
    signature: Signature
    """Of the model."""
    sources: tuple[TensorSource, ...]
    outputs: tuple[str, ...]
    """Those that are used."""
    after_batched: bool
    """The model of the step before has a batch dimension."""
    first_batched: bool
    """The model of the first step has one."""

    def question(self, first: RequestHeader, before: ResponseHeader) -> StepQuestion | None:
        """Return what is asked, given what the first step was asked, and what the step before has answered.

        None if that does not fit the model.
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
        """Return the error of the model as the caller of the ensemble is told."""
        return explain_step_failure(error, self.ensemble, self.number, self.signature.model_name, version, header)


def explain_step_failure(
    error: NeriteError, ensemble: str, number: int, model: str, version: str, header: RequestHeader
) -> NeriteError:
    """Return the error of a step as the caller is told: Triton's words, and then where it was."""
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
    """Return the header of what a model is asked: everything but the tensors is as the caller said it."""
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
    """Return the shape of a tensor as its taker wants it, who may have a batch dimension where the giver has none.

    As in Triton, what fits neither way stays as it is, and is judged by the taker.
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


# Links as JSON: how they cross to a worker.


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
    """Return the link that ``describe`` was given."""
    name, max_batch_size, inputs, outputs = value["signature"]
    signature = Signature(
        name,
        max_batch_size,
        [SignatureInput(name, dtypes.BY_NAME[datatype], tuple(dims), *rest) for name, datatype, dims, *rest in inputs],
        [SignatureOutput(name, dtypes.BY_NAME[datatype], tuple(dims)) for name, datatype, dims in outputs],
    )
    sources = tuple(TensorSource(*each) for each in value["sources"])
    return FusedLink(**{**value, "signature": signature, "sources": sources, "outputs": tuple(value["outputs"])})
