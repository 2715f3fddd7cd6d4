"""What has to hold between an ensemble and the models that it is put together from: types, shapes, batches, streams.

What an ensemble has to say by itself is checked in ``validate_ensemble``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nerite.config.mistake import FieldPath, Mistake
from nerite.config.model_config import ModelConfig
from nerite.config.near import nearest
from nerite.config.scheduling_choice import EnsembleStep
from nerite.config.tensors import ModelInput, ModelOutput


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What a model, or the ensemble itself, says of a tensor."""

    model: str
    data_type: str
    dims: tuple[int, ...]
    batched: bool

    @property
    def full_dims(self) -> tuple[int, ...]:
        """The dimensions with that of the batch."""
        return (-1, *self.dims) if self.batched else self.dims


def check_wiring(config: ModelConfig, parts: Sequence[ModelConfig]) -> Iterator[Mistake]:
    """Find what does not fit together. ``parts`` are the complete configurations of the models of the steps."""
    assert config.ensemble_scheduling is not None
    steps = config.ensemble_scheduling.step
    declared: list[ModelInput | ModelOutput] = [*config.input, *config.output]
    # Its own tensors have the shapes of ``reshape`` inside; those of its models are as callers have them.
    tensors = {tensor.name: _said(config, tensor, reshaped=True) for tensor in declared}
    for index, (step, part) in enumerate(zip(steps, parts, strict=True)):
        path = ("ensemble_scheduling", "step", index)
        if 0 < part.max_batch_size < config.max_batch_size:
            yield Mistake(
                message=f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but it contains "
                f"model {part.name} which only allows maximum batch size to be {part.max_batch_size}",
                path=("max_batch_size",),
                remedy=f"Write max_batch_size: {part.max_batch_size} here, or raise it in '{part.name}'.",
            )
        yield from _check_inputs(config.name, step, part, tensors, path)
        yield from _check_outputs(config.name, step, part, tensors, path)
    yield from _check_streams(config, steps, parts)
    if config.response_cache is not None and config.response_cache.enable and any(map(is_decoupled, parts)):
        yield Mistake(
            message=f"Response Cache does not currently support model {config.name} with 'decoupled' transaction "
            "policy. Please disable the response cache.",
            path=("response_cache",),
            remedy="Remove 'response_cache', or enable it in those models of the ensemble that have one response.",
        )


def _said(config: ModelConfig, tensor: ModelInput | ModelOutput, *, reshaped: bool = False) -> _Tensor:
    dims = tensor.reshape.shape if reshaped and tensor.reshape is not None else tensor.dims
    return _Tensor(config.name, tensor.data_type, dims, config.max_batch_size > 0)


def _check_inputs(
    ensemble: str, step: EnsembleStep, part: ModelConfig, tensors: dict[str, _Tensor], path: FieldPath
) -> Iterator[Mistake]:
    declared = {tensor.name: tensor for tensor in part.input}
    for name, tensor in step.input_map.items():
        where = (*path, "input_map", name)
        if name not in declared:
            yield Mistake(
                message=f"in ensemble {ensemble}, ensemble tensor {tensor} is mapping to non-existing input {name} in "
                f"model {step.model_name}",
                path=where,
                remedy=_spelled(name, list(declared)),
            )
        else:
            yield from _check_agreement(ensemble, tensor, _said(part, declared[name]), tensors, where)
    for name, taken in declared.items():
        if name not in step.input_map and not taken.optional:
            yield Mistake(
                message=f"in ensemble {ensemble}, input {name} in model {part.name} is not mapped to any ensemble "
                "tensors",
                path=path,
                remedy=f'Write input_map {{ key: "{name}" value: "the ensemble\'s tensor" }}.',
            )


def _check_outputs(
    ensemble: str, step: EnsembleStep, part: ModelConfig, tensors: dict[str, _Tensor], path: FieldPath
) -> Iterator[Mistake]:
    declared = {tensor.name: tensor for tensor in part.output}
    for name, tensor in step.output_map.items():
        where = (*path, "output_map", name)
        if name not in declared:
            yield Mistake(
                message=f"in ensemble {ensemble}, ensemble tensor {tensor} is mapped from non-existing output {name} "
                f"in model {step.model_name}",
                path=where,
                remedy=_spelled(name, list(declared)),
            )
        else:
            yield from _check_agreement(ensemble, tensor, _said(part, declared[name]), tensors, where)


def _check_agreement(
    ensemble: str, name: str, tensor: _Tensor, tensors: dict[str, _Tensor], path: FieldPath
) -> Iterator[Mistake]:
    """Compare what a model says of a tensor with what was said of it before."""
    before = tensors.setdefault(name, tensor)
    start = f"in ensemble {ensemble}, ensemble tensor {name}: inconsistent"
    if before.data_type != tensor.data_type:
        yield Mistake(
            message=f"{start} data type: {before.data_type} is inferred from model {before.model} while "
            f"{tensor.data_type} is inferred from model {tensor.model}",
            path=path,
            remedy=f"Give it one data_type in '{before.model}' and '{tensor.model}', or put a step between them.",
        )
    elif not (_agree(before.dims, tensor.dims) or _agree(before.full_dims, tensor.full_dims)):
        yield Mistake(
            message=f"{start} shape: {_shape(before.full_dims)} is inferred from model {before.model} while "
            f"{_shape(tensor.full_dims)} is inferred from model {tensor.model}",
            path=path,
            remedy=f"Give it the same dims in '{before.model}' and '{tensor.model}', or put a step between them.",
        )


def _agree(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def _shape(dims: Sequence[int]) -> str:
    return f"[{','.join(map(str, dims))}]"


def _check_streams(
    config: ModelConfig, steps: Sequence[EnsembleStep], parts: Sequence[ModelConfig]
) -> Iterator[Mistake]:
    """Find where tensors of which there are several meet others: what belongs to which would be anybody's guess."""
    origins = {tensor.name: -1 for tensor in config.input}
    waiting = list(enumerate(zip(steps, parts, strict=True)))
    while waiting:
        ready = [each for each in waiting if origins.keys() >= set(each[1][0].input_map.values())]
        if not ready:
            return  # a circle, or a tensor that nobody gives: told elsewhere
        waiting = [each for each in waiting if each not in ready]
        for index, (step, part) in ready:
            found = {origins[tensor] for tensor in step.input_map.values()}
            if len(found) > 1:
                yield _mixed(config.name, ("ensemble_scheduling", "step", index), f"step {index + 1}", step.model_name)
            origin = index if is_decoupled(part) else max(found, default=-1)
            origins |= dict.fromkeys(step.output_map.values(), origin)
    if len({origins[tensor.name] for tensor in config.output if tensor.name in origins}) > 1:
        yield _mixed(config.name, ("output",), "the answer", config.name)


def _mixed(ensemble: str, path: FieldPath, who: str, model: str) -> Mistake:
    return Mistake(
        # Triton names the ensemble, wherever in it the mistake is.
        message=f"in ensemble {ensemble}, step of model '{ensemble}' receives inputs originated from different "
        "decoupled models",
        path=path,
        remedy=f"All that {who} (model '{model}') is made of must follow from one decoupled step, or from none: have "
        "the decoupled model pass on what is needed later.",
    )


def is_decoupled(config: ModelConfig) -> bool:
    """Return whether a model may have any number of responses to a request."""
    return bool(config.model_transaction_policy and config.model_transaction_policy.decoupled)


def _spelled(wrong: str, known: Sequence[str]) -> str:
    meant = nearest(wrong, known, 0.75)
    return f"Did you mean '{meant}'?" if meant else f"There are: {', '.join(known) or 'none'}."
