"""The steps of an ensemble, and the tensors that connect them: what the configuration says, ready to be followed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from nerite.config.scheduling_choice import EnsembleStep
from nerite.core.signature import Signature
from nerite.scheduling.ensemble.link import Link, Source

_MOST_PLANS = 64
"""Sets of wanted outputs whose steps are remembered."""


class Part(NamedTuple):
    """The model of a step, as the ensemble was checked against it."""

    signature: Signature
    decoupled: bool = False
    worker: str = ""
    """The worker that it shares with other models, where a request can go on from one to the other; or nothing."""


class Step(NamedTuple):
    """A model to be asked."""

    number: int
    """Its place among the steps; from 0."""
    model: str
    version: str
    """Empty for the latest."""
    namespace: str
    """The repository that the model is of, where models of one name are told apart by it; else empty."""
    inputs: tuple[tuple[str, str], ...]
    """Each input of the model with the tensor of the ensemble that it takes."""
    outputs: tuple[tuple[str, str], ...]
    """Each output of the model that is used, with the tensor that it gives."""
    dims: Mapping[str, tuple[int, ...]]
    """What the model declares of its inputs, without the batch dimension."""
    batched: bool
    """The model has a batch dimension."""
    decoupled: bool
    """The model may have any number of responses."""
    worker: str
    """As ``Part`` has it."""
    signature: Signature
    """Of the model."""


class Stretch:
    """Steps that may follow a first one in its worker, each as soon as the one before has its answer.

    Nobody else takes what they give each other, and they take nothing else but what the first was given. So it can end
    after any of them, and go on from there as if it had never been one.
    """

    __slots__ = ("links", "steps")

    def __init__(self, steps: Sequence[Step], links: Sequence[Link]) -> None:
        """``steps`` begin with the first; there is a link for each of the others."""
        self.steps = tuple(steps)
        self.links = tuple(links)


class Plan(NamedTuple):
    """What a request needs that wants certain outputs."""

    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    """In the order in which they are answered: the last declared first, as with Triton."""
    shared: frozenset[str]
    """Tensors that have several takers: steps, and the caller."""
    stretches: Mapping[int, Stretch]
    """By the number of the first step."""


class Graph:
    """An ensemble. ``signature`` is its own."""

    def __init__(
        self, signature: Signature, version: str, steps: Sequence[EnsembleStep], parts: Sequence[Part]
    ) -> None:
        """``parts`` are the models of ``steps``, which say their namespace; the ensemble was checked against them."""
        self.signature = signature
        self.version = version
        self.steps = tuple(_step(number, *each) for number, each in enumerate(zip(steps, parts, strict=True)))
        self._plans: dict[frozenset[str], Plan] = {}

    def plan(self, wanted: frozenset[str]) -> Plan:
        """Return which steps a request needs that wants these outputs; none means all."""
        plan = self._plans.get(wanted)
        if plan is None:
            plan = self._planned(wanted or frozenset(self.signature.outputs))
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[wanted] = plan
        return plan

    def _planned(self, wanted: frozenset[str]) -> Plan:
        """Go from the outputs back to what they are made from."""
        givers = {tensor: step for step in self.steps for _, tensor in step.outputs}
        needed: set[int] = set()
        todo = list(wanted)
        while todo:
            step = givers.get(todo.pop())
            if step is not None and step.number not in needed:
                needed.add(step.number)
                todo += [tensor for _, tensor in step.inputs]
        outputs = tuple(name for name in reversed(self.signature.outputs) if name in wanted)
        steps = tuple(step for step in self.steps if step.number in needed)
        takers = Counter([*outputs, *(tensor for step in steps for _, tensor in step.inputs)])
        shared = frozenset(name for name, count in takers.items() if count > 1)
        stretches = self._stretches(steps, shared.union(outputs))
        return Plan(steps, outputs, shared, {stretch.steps[0].number: stretch for stretch in stretches})

    def _stretches(self, steps: Sequence[Step], elsewhere: frozenset[str]) -> Iterator[Stretch]:
        """Yield what the steps form where they live together. Tensors ``elsewhere`` are not just for the next step."""
        after = {step.number: _next(step, steps, elsewhere) for step in steps}
        for first in steps:
            way, links = [first], []
            while (step := after[way[-1].number]) is not None:
                sources = _sources(step, way[-1], first)
                if sources is None:
                    break
                links.append(self._link(step, sources, way[-1], first))
                way.append(step)
            if links:
                yield Stretch(way, links)

    def _link(self, step: Step, sources: tuple[Source, ...], before: Step, first: Step) -> Link:
        ensemble = self.signature.model_name
        outputs = tuple(name for name, _ in step.outputs)
        return Link(
            ensemble,
            step.number,
            step.version,
            step.namespace,
            step.signature,
            sources,
            outputs,
            before.batched,
            first.batched,
        )


def _step(number: int, step: EnsembleStep, part: Part) -> Step:
    signature = part.signature
    return Step(
        number,
        step.model_name,
        "" if step.model_version == -1 else str(step.model_version),
        step.model_namespace,
        tuple(step.input_map.items()),
        tuple(step.output_map.items()),
        {name: declared.dims for name, declared in signature.inputs.items()},
        signature.max_batch_size > 0,
        part.decoupled,
        part.worker,
        signature,
    )


def _next(step: Step, steps: Sequence[Step], elsewhere: frozenset[str]) -> Step | None:
    """Return the step that takes everything that is taken of what ``step`` gives, if one does, and lives with it."""
    given = {tensor for _, tensor in step.outputs}
    takers = [each for each in steps if any(tensor in given for _, tensor in each.inputs)]
    if not step.worker or given & elsewhere or len(takers) != 1 or takers[0].worker != step.worker:
        return None
    return takers[0]


def _sources(step: Step, before: Step, first: Step) -> tuple[Source, ...] | None:
    """Return where a step takes its inputs from: the step before, and what the first was given. None if elsewhere."""
    given = {tensor: name for name, tensor in before.outputs}
    had = {tensor: name for name, tensor in first.inputs}
    sources: list[Source] = []
    for name, tensor in step.inputs:
        if tensor in given:
            sources.append(Source(name, given[tensor], True))
        elif tensor in had:
            sources.append(Source(name, had[tensor], False))
        else:
            return None
    return tuple(sources)
