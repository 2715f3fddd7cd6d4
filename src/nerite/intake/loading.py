"""A model is loaded where it is tried; what a load complains of is told with what to do about it here."""

from __future__ import annotations

from typing import Final

from nerite.client import Client, ClientError
from nerite.config.json_form import to_json
from nerite.config.model_config import ModelConfig
from nerite.core.errors import Internal
from nerite.intake.outcome import Outcome
from nerite.intake.trial import Trial

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


def load(trial: Trial, client: Client, outcome: Outcome, config: ModelConfig | None) -> None:
    """Load the model, as it is laid out or with another configuration. Raises ``NeriteError``."""
    try:
        client.load(outcome.destination.name, config=None if config is None else to_json(config))
    except ClientError as error:
        reason = f"the server ended while it was loaded:\n{trial.last_words}" if trial.ended else str(error)
        # Where it was tried is nothing that anybody will find.
        reason = reason.replace(str(trial.repository), str(outcome.destination.repository))
        remedies = "".join(f"\n    {remedy}" for sign, remedy in _REMEDIES if sign in reason)
        raise Internal(f"{outcome.artifact.source} cannot be served: {_indented(reason)}{remedies}") from None


def _indented(text: str) -> str:
    return text.strip().replace("\n", "\n    ")
