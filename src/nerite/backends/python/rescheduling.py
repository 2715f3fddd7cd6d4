"""Requests that a model wants once more: what it may say of them, and what becomes of that.

A model says so with ``set_release_flags(TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)``. Its sequences have to be iterative.
In the place of such a request in the list that ``execute`` returns stands None, or a response with nothing but states:
these are kept for the next time. (Triton allows None only; a Python model cannot leave states there.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from nerite.core.errors import Internal
from nerite.core.request import InferenceRequest
from nerite.core.response import Again, InferenceResponse
from triton_python_backend_utils.response import InferenceResponse as ModelResponse

NOT_ITERATIVE: Final = InferenceResponse.failed(
    Internal(
        "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to "
        "handle such a flag. Write into its configuration: sequence_batching { iterative_sequence: true }"
    )
)
"""The answer to a request that a model wants once more, and may not have."""


class Rescheduling:
    """What one model may do with requests that it wants once more."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """``config`` is in JSON form."""
        batching: Mapping[str, Any] = config.get("sequence_batching") or {}
        self.iterative = bool(batching.get("iterative_sequence"))
        """Whether it may have any of them."""
        self._states = frozenset(state["output_name"] for state in batching.get("state", ()))

    def wrong(self, response: object) -> str:
        """Return what is wrong with a response to such a request; nothing if it is what is expected."""
        if response is None or self._only_states(response):
            return ""
        # The spelling is Triton's.
        return (
            "Expected a None object in the execute function return list for reschduled request, found type "
            f"'{type(response)}'. A response is allowed if it has no outputs but states of the sequence."
        )

    def outcome(
        self,
        request: InferenceRequest,
        response: ModelResponse | None,
        reply: Callable[[InferenceRequest, ModelResponse], InferenceResponse],
    ) -> InferenceResponse | None:
        """Return what the server is told of such a request; None if the model has ended it by its sender."""
        if not self.iterative:
            return NOT_ITERATIVE
        if request.finished:
            return None
        if response is None:
            return Again(None)
        states = reply(request, response)
        if states.error is not None:
            return states
        return Again(states.header, states.data)

    def _only_states(self, response: object) -> bool:
        if not isinstance(response, ModelResponse) or response.has_error():
            return False
        return all(tensor.name() in self._states for tensor in response.output_tensors())
