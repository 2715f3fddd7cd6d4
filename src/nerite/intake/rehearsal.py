"""The model in a server of its own: whether it loads, what it takes and gives, how long it needs."""

from __future__ import annotations

import dataclasses
import time
from typing import Final

from nerite.config.json_form import from_json
from nerite.config.loading import CONFIG_FILE
from nerite.core.errors import Internal
from nerite.intake.examination import Examination, rivals_of
from nerite.intake.loading import load
from nerite.intake.order import Order, Watcher
from nerite.intake.outcome import Outcome
from nerite.intake.staging import Staging
from nerite.intake.trial import Trial

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
        load(trial, client, outcome, None)
        outcome.load_seconds = time.monotonic() - began
        outcome.memory = max(0, trial.memory() - before)
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
            rivals = [] if own_config or order.backend else rivals_of(complete)
            Examination(order, watcher, trial, client, outcome).run(grown, rivals)
        if outcome.proposal is not None and outcome.proposal.advice and not own_config:
            outcome.accepted = watcher.accepts(outcome)
            if outcome.accepted:
                outcome.config = outcome.proposal.applied(outcome.config)
        if not own_config:
            staging.write(CONFIG_FILE, outcome.config_text())
            if outcome.accepted:
                watcher.doing("loading it as it will be served")
                load(trial, client, outcome, None)
