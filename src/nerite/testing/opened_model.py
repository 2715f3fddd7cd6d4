"""A model version that a backend has open, as the server would open it, in the hands of a test."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from nerite.backends.interface import Backend, Instance, InstanceContext, Marks, ModelContext
from nerite.config.json_form import to_json
from nerite.config.loading import finish_config, poll_model_directory
from nerite.config.model_config import ModelConfig
from nerite.config.signature import signature_of
from nerite.core.errors import NeriteError
from nerite.execution import guard
from nerite.testing.arrays import Answer
from nerite.testing.requests import SentRequest, answer_of


class OpenedModel:
    """Version 1 of the model in a directory. A context manager that closes it, and the instances that are left."""

    def __init__(
        self, backend: Backend, directory: Path, settings: Mapping[str, str], *, elsewhere: bool = False
    ) -> None:
        """``elsewhere``: what completes the configuration is in another process than what opens the model.

        Raises ``NeriteError`` with what the backend has to say about the model, or about its configuration.
        """
        memo: dict[Any, Any] = {}

        def context(config: ModelConfig) -> ModelContext:
            return ModelContext(config.name, 1, directory, to_json(config), settings, memo)

        def complete(config: ModelConfig, version: int) -> Mapping[str, Any]:
            return backend.complete(context(config))

        polled = poll_model_directory(directory)
        finished = finish_config(polled, 1, complete=complete)
        for mistake in (*polled.mistakes, *finished.mistakes):
            raise mistake.as_error()
        self.config = finished.config
        self.context = context(self.config)
        if elsewhere:
            sent = json.loads(json.dumps(self.context.config))
            self.context = replace(self.context, config=sent, memo={})
        self.signature = signature_of(finished.config, directory)
        self._model = backend.open(self.context)
        self._instances: list[Instance] = []

    def instance(self) -> Instance:
        """Make one more instance."""
        made = self._model.instance(InstanceContext(f"{self.context.name}_0_{len(self._instances)}"))
        self._instances.append(made)
        return made

    def close_instance(self, instance: Instance) -> None:
        """Close one that ``instance`` has made."""
        self._instances.remove(instance)
        instance.close()

    def close(self) -> None:
        """Close everything."""
        while self._instances:
            self._instances.pop().close()
        self._model.close()

    def __enter__(self) -> OpenedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def executed(instance: Instance, batch: Sequence[SentRequest]) -> list[Answer | NeriteError]:
    """Have an instance execute a batch, as the server does; return one answer for each request."""
    responses = guard.run(instance, "under test", batch, Marks())
    return [
        request.only() if response is None else answer_of(response)
        for request, response in zip(batch, responses, strict=True)
    ]
