"""Validates ensembles: their own tensors, and how they fit the models of their steps.

By itself, an ensemble must write and use each of its tensors. The rest is checked when the models are known:
``find_step_models`` finds the models, ``check_wiring`` compares types, shapes, batch sizes and streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nerite.config.defaults import ENSEMBLE
from nerite.config.mistake import FieldPath, Mistake, nearest
from nerite.config.model_config import ModelConfig, ModelEnsembling, ModelInput, ModelOutput


@dataclass(slots=True)
class _Tensor:
    """A tensor of the ensemble, with the tensors it is computed from and those computed from it."""

    path: FieldPath
    """Its first occurrence."""
    written: bool = False
    ready: bool = False
    sources: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)


def check_ensemble(config: ModelConfig) -> Iterator[Mistake]:
    """Find mistakes in ``ensemble_scheduling``, or report that it is missing."""
    if config.ensemble_scheduling is None:
        if config.platform == ENSEMBLE:
            yield Mistake(
                message=f"ensemble scheduling must be set for ensemble {config.name} whose platform is {ENSEMBLE}",
                path=("platform",),
                remedy="Write ensemble_scheduling { step [ … ] }.",
            )
        return
    yield from _check_fields(config)
    graph: dict[str, _Tensor] = {}
    broken = not config.ensemble_scheduling.step
    for index, step in enumerate(config.ensemble_scheduling.step):
        for mistake in _add_step(config.name, graph, index, step):
            broken = True
            yield mistake
    # Mistakes of one kind usually cause those of the next kinds, so that only the first kind found is reported.
    for find in () if broken else (_check_inputs, _check_outputs, _check_use):
        mistakes = list(find(config, graph))
        yield from mistakes
        if mistakes:
            return


def _check_fields(config: ModelConfig) -> Iterator[Mistake]:
    name = config.name
    if config.platform != ENSEMBLE:
        yield Mistake(
            message=f"ensemble scheduling cannot be set for model '{name}' whose platform is not {ENSEMBLE}",
            path=("ensemble_scheduling",),
            remedy=f'Write platform: "{ENSEMBLE}" and no backend.',
        )
    if config.instance_group:
        yield Mistake(
            message=f"instance group should not be specified for ensemble '{name}'",
            path=("instance_group",),
            remedy="Remove 'instance_group': the models of the ensemble have their own.",
        )
    if config.optimization is not None:
        yield Mistake(
            message=f"optimization should not be specified for ensemble '{name}'",
            path=("optimization",),
            remedy="Remove 'optimization': the models of the ensemble have their own.",
        )
    if config.model_warmup:
        yield Mistake(
            message=f"model_warmup can not be specified for ensemble '{name}'",
            path=("model_warmup",),
            remedy="Remove 'model_warmup': warm the models of the ensemble up instead.",
        )
    if config.ensemble_scheduling is not None and not config.ensemble_scheduling.step:
        yield Mistake(
            message=f"must specify 'step' for ensemble '{name}'",
            path=("ensemble_scheduling",),
            remedy='Write step [ { model_name: "…" model_version: -1 input_map { … } output_map { … } } ].',
        )


def _add_step(name: str, graph: dict[str, _Tensor], index: int, step: ModelEnsembling.Step) -> Iterator[Mistake]:
    """Add the tensors of a step to ``graph``, and find mistakes in the step itself."""
    path = ("ensemble_scheduling", "step", index)
    for field_name, value, form in (
        ("model_name", step.model_name, 'model_name: "…"'),
        ("input_map", step.input_map, 'input_map { key: "the model\'s input" value: "the ensemble\'s tensor" }'),
        ("output_map", step.output_map, 'output_map { key: "the model\'s output" value: "the ensemble\'s tensor" }'),
    ):
        if not value:
            message = f"must specify '{field_name}' in step {index} of ensemble '{name}'"
            yield Mistake(message=message, path=path, remedy=f"Write {form}.")
    for output, tensor in step.output_map.items():
        where = (*path, "output_map", output)
        node = graph.setdefault(tensor, _Tensor(where))
        if node.written:
            yield Mistake(
                message=f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}' "
                f"step {index}",
                path=where,
                remedy="Give the tensor another name here.",
            )
        node.written = True
        node.sources += step.input_map.values()
    for given, tensor in step.input_map.items():
        node = graph.setdefault(tensor, _Tensor((*path, "input_map", given)))
        node.results += step.output_map.values()


def _check_inputs(config: ModelConfig, graph: dict[str, _Tensor]) -> Iterator[Mistake]:
    """Find inputs that no step uses."""
    for index, tensor in enumerate(config.input):
        if tensor.name not in graph:
            yield Mistake(
                # The single quote is Triton's.
                message=f"ensemble input '{tensor.name}' for ensemble {config.name}' is not used",
                path=("input", index, "name"),
                remedy=_did_you_mean(tensor.name, graph)
                or "Remove this input, or map it to an input of a model in a step.",
            )


def _check_outputs(config: ModelConfig, graph: dict[str, _Tensor]) -> Iterator[Mistake]:
    """Find outputs that no step writes, or that depend on a tensor that is not connected."""
    _flow(config, graph)
    for index, tensor in enumerate(config.output):
        path = ("output", index, "name")
        node = graph.get(tensor.name)
        if node is None:
            yield Mistake(
                message=f"ensemble output '{tensor.name}' for ensemble {config.name}' is not used",
                path=path,
                remedy=_did_you_mean(tensor.name, graph)
                or "Remove this output, or map an output of a model in a step to it.",
            )
        elif not node.ready:
            message = f"output '{tensor.name}' for ensemble '{config.name}' is not written"
            missing = _missing_source(tensor.name, graph)
            if missing == tensor.name:
                yield Mistake(
                    message=message,
                    path=path,
                    remedy="Map an output of a model in a step to it, or remove this output.",
                )
                continue
            spelled = _did_you_mean(missing, [name for name in graph if graph[name].ready])
            yield Mistake(
                message=f"{message}: at least one of its depending tensors, '{missing}', is not connected",
                path=graph[missing].path,
                remedy=spelled or f"Declare '{missing}' as an input of the ensemble, or map an output of a step to it.",
            )


def _check_use(config: ModelConfig, graph: dict[str, _Tensor]) -> Iterator[Mistake]:
    """Find tensors that are not used."""
    outputs = {tensor.name for tensor in config.output}
    for name, node in graph.items():
        if name in outputs or (node.ready and node.results):
            continue
        if node.ready:
            remedy = "Remove it from the output map, or declare it as an output of the ensemble."
        else:
            ready = [other for other in graph if graph[other].ready]
            remedy = (
                _did_you_mean(name, ready) or f"Declare '{name}' as an input of the ensemble, or map an output to it."
            )
        yield Mistake(
            message=f"ensemble tensor '{name}' is unused in ensemble '{config.name}'", path=node.path, remedy=remedy
        )


def _flow(config: ModelConfig, graph: dict[str, _Tensor]) -> None:
    """Mark the tensors that can be computed from the ensemble's inputs."""
    waiting = [tensor.name for tensor in config.input]
    for name in waiting:
        graph[name].ready = True
    while waiting:
        for result in graph[waiting.pop()].results:
            node = graph[result]
            if not node.ready and all(graph[source].ready for source in node.sources):
                node.ready = True
                waiting.append(result)


def _missing_source(name: str, graph: dict[str, _Tensor]) -> str:
    """Return the unconnected tensor that ``name`` finally depends on; in a cycle, the last one before it closes."""
    seen: set[str] = set()
    while True:
        unready = (source for source in graph[name].sources if not graph[source].ready and source not in seen)
        source = next(unready, None)
        if source is None:
            return name
        seen.add(source)
        name = source


def _did_you_mean(wrong: str, known: Iterable[str]) -> str:
    meant = nearest(wrong, known, 0.75)
    return f"Did you mean '{meant}'?" if meant and meant != wrong else ""


# Checks between an ensemble and the models of its steps: types, shapes, batches, streams.


@dataclass(frozen=True, slots=True)
class _DeclaredTensor:
    """A tensor as a model, or the ensemble itself, declares it."""

    model: str
    data_type: str
    dims: tuple[int, ...]
    batched: bool

    @property
    def full_dims(self) -> tuple[int, ...]:
        """The dimensions, including that of the batch."""
        return (-1, *self.dims) if self.batched else self.dims


def check_wiring(config: ModelConfig, parts: Sequence[ModelConfig]) -> Iterator[Mistake]:
    """Find contradictions between an ensemble and ``parts``, the complete configurations of the models of its steps."""
    assert config.ensemble_scheduling is not None
    steps = config.ensemble_scheduling.step
    declared: list[ModelInput | ModelOutput] = [*config.input, *config.output]
    # Inside the ensemble its own tensors have the shapes of ``reshape``; those of its models are as callers see them.
    tensors = {tensor.name: _declared_tensor(config, tensor, reshaped=True) for tensor in declared}
    for index, (step, part) in enumerate(zip(steps, parts, strict=True)):
        if 0 < part.max_batch_size < config.max_batch_size:
            yield Mistake(
                message=f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but it contains "
                f"model {part.name} which only allows maximum batch size to be {part.max_batch_size}",
                path=("max_batch_size",),
                remedy=f"Write max_batch_size: {part.max_batch_size} here, or raise it in '{part.name}'.",
            )
        yield from _check_step(config.name, index, step, part, tensors)
    yield from _check_streams(config, steps, parts)
    if config.response_cache is not None and config.response_cache.enable and any(map(is_decoupled, parts)):
        yield Mistake(
            message=f"Response Cache does not currently support model {config.name} with 'decoupled' transaction "
            "policy. Please disable the response cache.",
            path=("response_cache",),
            remedy="Remove 'response_cache', or enable it in those models of the ensemble that have one response.",
        )


def _declared_tensor(
    config: ModelConfig, tensor: ModelInput | ModelOutput, *, reshaped: bool = False
) -> _DeclaredTensor:
    dims = tensor.reshape.shape if reshaped and tensor.reshape is not None else tensor.dims
    return _DeclaredTensor(config.name, tensor.data_type, dims, config.max_batch_size > 0)


def _check_step(
    ensemble: str, index: int, step: ModelEnsembling.Step, part: ModelConfig, tensors: dict[str, _DeclaredTensor]
) -> Iterator[Mistake]:
    """Compare the maps of a step with the tensors of its model."""
    path = ("ensemble_scheduling", "step", index)
    sides: list[tuple[str, str, dict[str, str], Sequence[ModelInput | ModelOutput]]] = [
        ("input", "mapping to", step.input_map, part.input),
        ("output", "mapped from", step.output_map, part.output),
    ]
    for side, mapped, names, declared in sides:
        known = {tensor.name: tensor for tensor in declared}
        for name, tensor in names.items():
            where = (*path, f"{side}_map", name)
            if name in known:
                yield from _check_agreement(ensemble, tensor, _declared_tensor(part, known[name]), tensors, where)
                continue
            yield Mistake(
                message=f"in ensemble {ensemble}, ensemble tensor {tensor} is {mapped} non-existing {side} {name} in "
                f"model {step.model_name}",
                path=where,
                remedy=_did_you_mean(name, known) or f"There are: {', '.join(known) or 'none'}.",
            )
        for given in declared:
            if isinstance(given, ModelInput) and given.name not in names and not given.optional:
                yield Mistake(
                    message=f"in ensemble {ensemble}, input {given.name} in model {part.name} is not mapped to any "
                    "ensemble tensors",
                    path=path,
                    remedy=f'Write input_map {{ key: "{given.name}" value: "the ensemble\'s tensor" }}.',
                )


def _check_agreement(
    ensemble: str, name: str, tensor: _DeclaredTensor, tensors: dict[str, _DeclaredTensor], path: FieldPath
) -> Iterator[Mistake]:
    """Compare the declaration of a tensor with its first declaration."""
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
    config: ModelConfig, steps: Sequence[ModelEnsembling.Step], parts: Sequence[ModelConfig]
) -> Iterator[Mistake]:
    """Find steps that receive tensors of several streams, whose responses cannot be matched with each other."""
    origins = {tensor.name: -1 for tensor in config.input}
    waiting = list(enumerate(zip(steps, parts, strict=True)))
    while waiting:
        ready = [each for each in waiting if origins.keys() >= set(each[1][0].input_map.values())]
        if not ready:
            return  # a cycle, or a tensor that no step writes: reported elsewhere
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


# Checks that the models of the steps exist in the requested versions.


@dataclass(frozen=True, slots=True)
class EnsembleCandidate:
    """A model that a step may call."""

    name: str
    configs: Mapping[int, ModelConfig]
    """The versions that can serve requests, with their complete configurations."""
    latest: int = -1
    failure: str = ""
    """Why no version can serve requests, in the words of the failed load."""

    def version(self, step: ModelEnsembling.Step) -> int | None:
        """Return the version that a step requests; ``None`` if it cannot serve requests."""
        wanted = self.latest if step.model_version < 0 else step.model_version
        return wanted if wanted in self.configs else None


def find_step_models(
    config: ModelConfig, candidates: Sequence[EnsembleCandidate | None]
) -> tuple[list[ModelConfig], list[Mistake]]:
    """Return the configurations of the models of the steps, and mistakes: missing models, or else contradictions.

    A candidate is ``None`` if the model does not exist.
    """
    assert config.ensemble_scheduling is not None
    steps = config.ensemble_scheduling.step
    missing = [index for index, candidate in enumerate(candidates) if candidate is None]
    if missing:
        return [], [_missing(config.name, steps, missing)]
    mistakes: list[Mistake] = []
    parts: list[ModelConfig] = []
    for index, (step, candidate) in enumerate(zip(steps, candidates, strict=True)):
        assert candidate is not None
        version = candidate.version(step)
        if version is None:
            mistakes.append(_absent(config.name, step, candidate, index))
        else:
            parts.append(candidate.configs[version])
    return parts, mistakes or list(check_wiring(config, parts))


def circular_ensembles(ensemble: str, before: str) -> Mistake:
    """Return the mistake of an ensemble that contains itself; ``before`` is the last one before the cycle closes."""
    return Mistake(
        message=f"circular dependency between ensembles: {ensemble} -> ... -> {before} -> {ensemble}",
        path=("ensemble_scheduling",),
        remedy="Take the step out that leads back: no ensemble can be a part of itself.",
    )


def _missing(ensemble: str, steps: Sequence[ModelEnsembling.Step], missing: Sequence[int]) -> Mistake:
    names = ", ".join(dict.fromkeys(steps[index].model_name for index in missing))
    return Mistake(
        message=f"ensemble {ensemble} contains models that are not available or ambiguous: {names}",
        path=_path(missing[0]),
        remedy="Put the model into the repository and load it, or correct the name.",
    )


def _absent(ensemble: str, step: ModelEnsembling.Step, candidate: EnsembleCandidate, index: int) -> Mistake:
    start = f"ensemble '{ensemble}' depends on '{candidate.name}'"
    if candidate.configs:
        there = ", ".join(map(str, sorted(candidate.configs)))
        return Mistake(
            message=f"{start} whose required version {step.model_version} is not loaded.",
            path=(*_path(index), "model_version"),
            remedy=f"Write model_version: -1 for the latest version, or one that is loaded: {there}.",
        )
    return Mistake(
        message=f"{start} {candidate.failure}",
        path=(*_path(index), "model_name"),
        remedy=f"Make '{candidate.name}' load first.",
    )


def _path(step: int) -> FieldPath:
    return ("ensemble_scheduling", "step", step)
