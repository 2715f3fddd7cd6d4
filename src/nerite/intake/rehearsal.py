"""The model in a server of its own: whether it loads, what it takes and gives, how long it needs."""

from __future__ import annotations

import dataclasses
import time
from typing import Final

from nerite.client import Client, ClientError, Model
from nerite.config.json_form import from_json, to_json
from nerite.config.loading import CONFIG_FILE
from nerite.config.model_config import ModelConfig
from nerite.core.errors import Internal, NeriteError
from nerite.intake import measurement
from nerite.intake.measurement import Throughput
from nerite.intake.order import Order, Watcher
from nerite.intake.outcome import Outcome
from nerite.intake.proposal import propose
from nerite.intake.staging import Staging
from nerite.intake.trial import Trial

_COUNTS: Final = (1, 2, 2, 1)
"""Numbers of instances that are compared, in an order that lets no number have the better moment."""
_ELSEWHERE: Final = "--no-load adds it all the same, for a server that has what it needs."
_REMEDIES: Final = (
    ("unable to find backend", _ELSEWHERE),
    ("which is not installed", _ELSEWHERE),
    ("ModuleNotFoundError", _ELSEWHERE),
    ("unsupported gpu id", _ELSEWHERE),
    ("no GPUs are available", _ELSEWHERE),
    ("supports only GPU device", _ELSEWHERE),
    ("needs its inputs and outputs", "Here you say so with --input x:FP32:-1,4 and --output …, or with --config FILE."),
)
"""What to do, by what a load says."""
_FOUND: Final = (
    "max_batch_size", "input", "output", "dynamic_batching", "sequence_batching", "model_transaction_policy",
)  # fmt: skip
"""What is completed from a model, and written."""


def rehearse(order: Order, watcher: Watcher, staging: Staging, outcome: Outcome, *, own_config: bool) -> None:
    """Load the model, complete its configuration, and measure it. Raises ``NeriteError`` if it cannot be loaded.

    ``own_config``: the configuration is somebody's work, and not ours to change.
    """
    name = outcome.destination.name
    watcher.doing("starting a server to try it in")
    with Trial(staging.repository) as trial, trial.client as client:
        before = trial.memory()
        watcher.doing("loading")
        began = time.monotonic()
        _load(trial, client, outcome, None)
        outcome.load_seconds = time.monotonic() - began
        loaded = trial.memory()
        outcome.memory = max(0, loaded - before)
        outcome.signature = client.model(name)
        complete = from_json(client.config(name))
        if not (complete.input or complete.output):
            raise Internal(
                f"{outcome.artifact.source} cannot be served: its configuration has neither inputs nor outputs.\n"
                "    Write auto_complete_config in the model, or name a config.pbtxt with --config."
            )
        if own_config:
            outcome.config = complete
        else:
            found = {each: getattr(complete, each) for each in _FOUND}
            outcome.config = dataclasses.replace(outcome.artifact.config, **found)
        if order.measure:
            may_grow = not own_config and complete.backend != "python"
            largest = max(complete.max_batch_size, order.largest_batch) if may_grow else complete.max_batch_size
            grown = dataclasses.replace(complete, max_batch_size=largest if complete.max_batch_size else 0)
            _measure(order, watcher, trial, client, outcome, outcome.signature, grown)
            outcome.memory_at_work = max(0, trial.memory() - loaded)
        if outcome.proposal is not None and outcome.proposal.advice and not own_config:
            outcome.accepted = watcher.accepts(outcome)
            if outcome.accepted:
                outcome.config = outcome.proposal.applied(outcome.config)
        if not own_config:
            staging.write(CONFIG_FILE, outcome.config_text())
            if outcome.accepted:
                watcher.doing("loading it as it will be served")
                _load(trial, client, outcome, None)


def _load(trial: Trial, client: Client, outcome: Outcome, config: ModelConfig | None) -> None:
    try:
        client.load(outcome.destination.name, config=None if config is None else to_json(config))
    except ClientError as error:
        reason = f"the server ended while it was loaded:\n{trial.last_words}" if trial.ended else str(error)
        # Where it was tried is nothing that anybody will find.
        reason = reason.replace(str(trial.repository), str(outcome.destination.repository))
        remedies = "".join(f"\n    {remedy}" for sign, remedy in _REMEDIES if sign in reason)
        raise Internal(f"{outcome.artifact.source} cannot be served: {_indented(reason)}{remedies}") from None


def _measure(
    order: Order, watcher: Watcher, trial: Trial, client: Client, outcome: Outcome, model: Model, config: ModelConfig
) -> None:
    """Measure what can be measured with random data, and make a proposal of it."""
    obstacle = _obstacle(config)
    if obstacle:
        outcome.remarks.append(f"It was not measured: {obstacle}.")
        return
    needed = [tensor.name for tensor in config.input if not tensor.optional]
    largest = config.max_batch_size
    try:
        if largest:
            _load(trial, client, outcome, config)
        outcome.latencies = measurement.latencies(client, model, needed, largest, order.shapes, watcher.doing)
        inputs = measurement.inputs_of(model, needed, min(largest, 1), order.shapes)
        throughputs: list[Throughput] = []
        for count in _counts(config):
            watcher.doing(f"measuring {count} instance{'s' if count > 1 else ''}")
            groups = tuple(dataclasses.replace(group, count=count) for group in config.instance_group[:1])
            _load(trial, client, outcome, dataclasses.replace(config, instance_group=groups))
            throughputs.append(measurement.throughput(client, trial.url, model, inputs, count))
    except (ClientError, NeriteError) as error:
        said = str(error).strip().partition("\n")[0]
        outcome.remarks.append(f"It does not take random data, and was not measured: {said}")
        return
    outcome.throughputs = measurement.best_of_each(throughputs)
    outcome.proposal = propose(config, outcome.latencies, outcome.throughputs)


def _counts(config: ModelConfig) -> tuple[int, ...]:
    """Return the numbers of instances to compare: none where it is not for processors to say."""
    return () if any(group.kind == "KIND_GPU" for group in config.instance_group) else _COUNTS


def _obstacle(config: ModelConfig) -> str:
    """Return why a model cannot be measured by itself, with requests of random data; empty if it can."""
    if config.model_transaction_policy is not None and config.model_transaction_policy.decoupled:
        return "it has any number of responses to a request"
    if config.sequence_batching is not None:
        return "its requests are those of sequences"
    if config.ensemble_scheduling is not None:
        return "it is made of other models"
    return ""


def _indented(text: str) -> str:
    return text.strip().replace("\n", "\n    ")
