"""The steps of an ensemble, and the tensors that connect them: what the configuration says, ready to be followed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nerite.config.scheduling_choice import EnsembleStep
from nerite.core.signature import Signature

_MOST_PLANS = 64
"""Sets of wanted outputs whose steps are remembered."""


class Part(NamedTuple):
    """The model of a step, as the ensemble was checked against it."""

    signature: Signature
    decoupled: bool = False
    namespace: str = ""
    """The repository that it is of, where models of one name are told apart by it."""


class Step(NamedTuple):
    """A model to be asked."""

    number: int
    """Its place among the steps; from 0."""
    model: str
    version: str
    """Empty for the latest."""
    namespace: str
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


class Plan(NamedTuple):
    """What a request needs that wants certain outputs."""

    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    """In the order in which they are answered: the last declared first, as with Triton."""
    shared: frozenset[str]
    """Tensors that have several takers: steps, and the caller."""


class Graph:
    """An ensemble. ``signature`` is its own."""

    def __init__(
        self, signature: Signature, version: str, steps: Sequence[EnsembleStep], parts: Sequence[Part]
    ) -> None:
        """``parts`` are the models of ``steps``; the ensemble was checked against them."""
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
        return Plan(steps, outputs, frozenset(name for name, count in takers.items() if count > 1))


def _step(number: int, step: EnsembleStep, part: Part) -> Step:
    signature = part.signature
    return Step(
        number,
        step.model_name,
        "" if step.model_version == -1 else str(step.model_version),
        part.namespace,
        tuple(step.input_map.items()),
        tuple(step.output_map.items()),
        {name: declared.dims for name, declared in signature.inputs.items()},
        signature.max_batch_size > 0,
        part.decoupled,
    )
