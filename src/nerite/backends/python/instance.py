"""One object of a model's class, and the calls of its methods."""

from __future__ import annotations

import functools
import inspect
import json
import logging
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from nerite.backends.configuration import all_outputs
from nerite.backends.interface import InstanceContext, Marks, ModelContext
from nerite.backends.python.event_loop import EventLoop
from nerite.backends.python.failure import CAUSES, describe
from nerite.backends.python.replies import Replies
from nerite.backends.python.rescheduling import NOT_ITERATIVE, Rescheduling
from nerite.backends.python.reshape import Reshape
from nerite.core.errors import Internal
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from triton_python_backend_utils.response import InferenceResponse as ModelResponse
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
        # Not a method: a model that fails to initialize is collected at once only if nothing refers back to it.
        self._failed = functools.partial(_failed, context.name)
        self._replies = Replies(
            model.name,
            str(model.version),
            outputs,
            self._failed,
            decoupled=self._decoupled,
            reshape=Reshape(model.config) or None,
        )
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
        it wants once more. A response that cannot be sent fails its own request, and no other of the batch.

        Raises ``Internal`` with what the model raises, or with what is wrong with what it returned as a whole.
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
        again: Set[ServedRequest] = frozenset()
        if replies.again:
            again = replies.again.intersection(served)
            replies.again -= again
        if returned is None and not self._decoupled and all(one.has_sender for one in served):
            returned = [None] * len(served)
        wrong = self._wrong(returned, len(served))
        if wrong:
            raise self._failed(wrong)
        if self._decoupled:
            returned = [None] * len(requests)
            if not again:
                return returned
        return [
            replies.reply(one.core, response)
            if isinstance(response, ModelResponse) and not (again and one in again)
            else self._without_reply(one, response, again)
            for one, response in zip(served, returned, strict=True)
        ]

    @property
    def checks_readiness(self) -> bool:
        """Whether the model has an ``is_ready`` of its own."""
        return hasattr(self.model, "is_ready")

    def is_ready(self) -> bool:
        """Return what the model's ``is_ready`` says, True if it has none, False if it fails."""
        if not self.checks_readiness:
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

    def _without_reply(
        self, request: ServedRequest, returned: Any, again: Set[ServedRequest]
    ) -> InferenceResponse | None:
        """Return the answer to a request that is in ``again``, or that the model returned no response for."""
        if request in again:
            try:
                wrong = self._rescheduling.wrong(returned)
                if not wrong:
                    return self._rescheduling.outcome(request.core, returned, self._replies.reply)
            except Exception as error:  # a class of the model's own may be anything inside
                wrong = describe(error)
        elif returned is None and (self._decoupled or request.has_sender):
            return None
        else:
            wrong = (
                "Expected an 'InferenceResponse' object in the execute function return list, found type "
                f"'{type(returned)}'."
            )
        return InferenceResponse.failed(self._failed(wrong))

    def _ended(self, served: Sequence[ServedRequest], returned: Any, error: BaseException | None) -> None:
        """Answer what is still open of a batch whose ``async execute`` has ended badly."""
        if error is not None and not isinstance(error, CAUSES):
            raise error
        wrong = self._reason(error) if error is not None else self._wrong(returned, 0)
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

    def _wrong(self, returned: Any, count: int) -> str:
        """Return what is wrong with what ``execute`` returned for ``count`` requests, in Triton's words.

        Nothing if it is a list of as many elements, whatever they are, or None from a decoupled model.
        """
        if self._decoupled:
            if returned is None:
                return ""
            return f"Python model '{self._name}' is using the decoupled mode and the execute function must return None."
        if not isinstance(returned, list):
            return f"Expected a list in the execute return, found type '{type(returned)}'."
        if len(returned) != count:
            return (
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{count}, and InferenceResponse(s) size is:{len(returned)}\n"
            )
        return ""


def _failed(name: str, reason: str) -> Internal:
    """Log why instance ``name`` cannot answer, and return it as the error of its requests."""
    message = f"Failed to process the request(s) for model '{name}', message: {reason}"
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
