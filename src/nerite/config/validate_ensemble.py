"""What has to hold for an ensemble by itself: that every tensor in it comes from somewhere and goes somewhere.

What depends on the models that an ensemble is made of is checked where those are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nerite.config.backend_choice import ENSEMBLE
from nerite.config.mistake import FieldPath, Mistake
from nerite.config.model_config import ModelConfig
from nerite.config.near import nearest
from nerite.config.scheduling_choice import EnsembleStep


@dataclass(slots=True)
class _Tensor:
    """A tensor of the ensemble: what it is computed from, and what is computed from it."""

    path: FieldPath
    """Where it is named first."""
    written: bool = False
    ready: bool = False
    sources: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)


def check_ensemble(config: ModelConfig) -> Iterator[Mistake]:
    """Find what is wrong with ``ensemble_scheduling``, or that there is none where there has to be."""
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
    # Each of these makes the ones after it likely, so only the first kind that is there is told.
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


def _add_step(name: str, graph: dict[str, _Tensor], index: int, step: EnsembleStep) -> Iterator[Mistake]:
    """Put the tensors of a step into ``graph``, and find what is wrong with the step itself."""
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
    """Find the inputs that no step takes."""
    for index, tensor in enumerate(config.input):
        if tensor.name not in graph:
            yield Mistake(
                # The single quote is Triton's.
                message=f"ensemble input '{tensor.name}' for ensemble {config.name}' is not used",
                path=("input", index, "name"),
                remedy=_spelled(tensor.name, graph) or "Remove this input, or map it to an input of a model in a step.",
            )


def _check_outputs(config: ModelConfig, graph: dict[str, _Tensor]) -> Iterator[Mistake]:
    """Find the outputs that no step gives."""
    _flow(config, graph)
    for index, tensor in enumerate(config.output):
        path = ("output", index, "name")
        node = graph.get(tensor.name)
        if node is None:
            yield Mistake(
                message=f"ensemble output '{tensor.name}' for ensemble {config.name}' is not used",
                path=path,
                remedy=_spelled(tensor.name, graph)
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
            spelled = _spelled(missing, [name for name in graph if graph[name].ready])
            yield Mistake(
                message=f"{message}: at least one of its depending tensors, '{missing}', is not connected",
                path=graph[missing].path,
                remedy=spelled or f"Declare '{missing}' as an input of the ensemble, or map an output of a step to it.",
            )


def _check_use(config: ModelConfig, graph: dict[str, _Tensor]) -> Iterator[Mistake]:
    """Find the tensors that lead nowhere."""
    outputs = {tensor.name for tensor in config.output}
    for name, node in graph.items():
        if name in outputs or (node.ready and node.results):
            continue
        if node.ready:
            remedy = "Remove it from the output map, or declare it as an output of the ensemble."
        else:
            ready = [other for other in graph if graph[other].ready]
            remedy = _spelled(name, ready) or f"Declare '{name}' as an input of the ensemble, or map an output to it."
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
    """Return the tensor that ``name`` waits for in the end; in a circle, the last one before it closes."""
    seen: set[str] = set()
    while True:
        unready = (source for source in graph[name].sources if not graph[source].ready and source not in seen)
        source = next(unready, None)
        if source is None:
            return name
        seen.add(source)
        name = source


def _spelled(wrong: str, known: Iterator[str] | dict[str, _Tensor] | list[str]) -> str:
    meant = nearest(wrong, known, 0.75)
    return f"Did you mean '{meant}'?" if meant and meant != wrong else ""
