"""One object of a model's class, and the calls of its methods."""

from __future__ import annotations

import functools
import inspect
import json
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from nerite.backends.configuration import all_outputs
from nerite.backends.interface import InstanceContext, Marks, ModelContext
from nerite.backends.python.event_loop import EventLoop
from nerite.backends.python.failure import CAUSES, describe
from nerite.backends.python.replies import Replies
from nerite.backends.python.rescheduling import NOT_ITERATIVE, Rescheduling
from nerite.core.errors import Internal
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from triton_python_backend_utils import InferenceResponse as ModelResponse
from triton_python_backend_utils import TritonModelException
from triton_python_backend_utils.request import ServedRequest

_log = logging.getLogger("nerite.python")

_READY_LIMIT = 5.0
"""Seconds that an asynchronous ``is_ready`` may take."""


class PythonInstance:
    """A ``TritonPythonModel`` at work. Used by one thread at a time."""

    def __init__(
        self, model: ModelContext, model_class: type, context: InstanceContext, file: Path | None = None
    ) -> None:
        """Make an object of the class, which is in ``file``, and initialize it.

        Raises ``Internal`` with what the model raises.
        """
        self._name = context.name
        self._file = file or model_file(model)
        outputs = [output["name"] for output in all_outputs(model.config)]
        self._decoupled = bool(model.config.get("model_transaction_policy", {}).get("decoupled"))
        self._replies = Replies(model.name, str(model.version), outputs, decoupled=self._decoupled)
        self._rescheduling = Rescheduling(model.config)
        self._loop = EventLoop(context.name)
        try:
            self.model: Any = model_class()
            if hasattr(self.model, "initialize"):
                self._finished(self.model.initialize(_arguments(model, context)))
        except CAUSES as error:
            self._loop.close()
            raise Internal(describe(error)) from error

    def execute(self, requests: Sequence[InferenceRequest], marks: Marks) -> Sequence[InferenceResponse | None]:
        """Call the model with the whole batch, a list of requests of whatever shapes; nothing is stacked.

        The answer is None for a request whose responses the model sends by its sender, and an ``Again`` for one that
        it wants once more.

        Raises ``Internal`` with what the model raises, or with what is wrong with what it returned.
        """
        replies = self._replies
        served = [ServedRequest(request, replies) for request in requests]
        marks.inputs_ready()
        try:
            returned = self.model.execute(served)
            if self._decoupled and inspect.iscoroutine(returned) and not self._rescheduling.iterative:
                self._loop.start(returned, functools.partial(self._ended, served))
                returned = None
            elif type(returned) is not list:
                returned = self._finished(returned)
        except CAUSES as error:
            replies.again.difference_update(served)
            raise self._failed(self._reason(error)) from error
        marks.computed()
        if replies.again:
            return self._some_again(requests, served, returned)
        wrong = self._wrong(returned, served)
        if wrong:
            raise self._failed(wrong)
        if self._decoupled:
            return [None] * len(requests)
        reply = replies.reply
        return [
            None if response is None else reply(request, response)
            for request, response in zip(requests, returned, strict=True)
        ]

    def is_ready(self) -> bool:
        """Return what the model's ``is_ready`` says, True if it has none, False if it fails."""
        if not hasattr(self.model, "is_ready"):
            return True
        try:
            ready = self._finished(self.model.is_ready(), _READY_LIMIT)
            if not isinstance(ready, bool):
                raise TritonModelException("is_ready() must return a boolean value")
        except CAUSES as error:
            _log.error("is_ready of '%s' failed: %s", self._name, describe(error))
            return False
        return ready

    def close(self) -> None:
        """Finalize the model. What it raises is logged."""
        try:
            if hasattr(self.model, "finalize"):
                self._finished(self.model.finalize())
        except CAUSES as error:
            _log.error("finalize of '%s' failed: %s", self._name, describe(error))
        finally:
            self._loop.close()
            self.model = None

    def _some_again(
        self, requests: Sequence[InferenceRequest], served: Sequence[ServedRequest], returned: Any
    ) -> list[InferenceResponse | None]:
        """Return the answers to a batch of which the model wants some requests once more."""
        again = self._replies.again.intersection(served)
        self._replies.again -= again
        wrong = self._wrong(returned, served, again)
        if wrong:
            raise self._failed(wrong)
        listed = [None] * len(requests) if self._decoupled else returned
        reply = self._replies.reply
        return [
            self._rescheduling.outcome(request, response, reply)
            if one in again
            else (None if response is None else reply(request, response))
            for one, request, response in zip(served, requests, listed, strict=True)
        ]

    def _ended(self, served: Sequence[ServedRequest], returned: Any, error: BaseException | None) -> None:
        """Answer what is still open of a batch whose ``async execute`` has ended badly."""
        if error is not None and not isinstance(error, CAUSES):
            raise error
        wrong = self._reason(error) if error is not None else self._wrong(returned, ())
        if wrong:
            failed = InferenceResponse.failed(self._failed(wrong))
            for request in served:
                request.core.respond(failed)
        again = self._replies.again.intersection(served)
        self._replies.again -= again
        for request in again:
            request.core.respond(NOT_ITERATIVE)

    def _finished(self, returned: Any, timeout: float | None = None) -> Any:
        """Return what a method of the model returned; run it on the loop if it is a coroutine."""
        return self._loop.run(returned, timeout) if inspect.iscoroutine(returned) else returned

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, AttributeError) and not hasattr(self.model, "execute"):
            return f"Python model {self._file} does not implement `execute` method."
        return describe(error)

    def _wrong(self, returned: Any, served: Sequence[ServedRequest], again: Collection[ServedRequest] = ()) -> str:
        """Return what is wrong with what ``execute`` returned, in Triton's words; nothing if it is what is expected.

        ``again`` are the requests that the model wants once more.
        """
        if self._decoupled:
            if returned is None:
                return ""
            return f"Python model '{self._name}' is using the decoupled mode and the execute function must return None."
        if not isinstance(returned, list):
            return f"Expected a list in the execute return, found type '{type(returned)}'."
        if len(returned) != len(served):
            return (
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(served)}, and InferenceResponse(s) size is:{len(returned)}\n"
            )
        for response, request in zip(returned, served, strict=True):
            if again and request in again:
                if wrong := self._rescheduling.wrong(response):
                    return wrong
            elif not isinstance(response, ModelResponse) and (response is not None or not request.has_sender):
                return (
                    "Expected an 'InferenceResponse' object in the execute function return list, found type "
                    f"'{type(response)}'."
                )
        return ""

    def _failed(self, reason: str) -> Internal:
        message = f"Failed to process the request(s) for model '{self._name}', message: {reason}"
        _log.error("%s", message)
        return Internal(message)


def model_file(model: ModelContext) -> Path:
    """Return where the code of a model is: ``default_model_filename``, or model.py."""
    return model.version_directory / (model.config.get("default_model_filename") or "model.py")


def _arguments(model: ModelContext, context: InstanceContext) -> dict[str, str]:
    """Return what ``initialize`` is told. All values are strings, numbers too."""
    return {
        "model_config": json.dumps(dict(model.config), separators=(",", ":")),
        "model_instance_kind": context.kind,
        "model_instance_name": context.name,
        "model_instance_device_id": str(context.device),
        "model_repository": str(model.directory),
        "model_version": str(model.version),
        "model_name": model.name,
    }
