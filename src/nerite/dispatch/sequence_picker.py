"""Instance picker of a model with sequences: each sequence stays on one instance, and keeps state between requests."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from time import monotonic_ns

from nerite.config.model_config import ModelConfig
from nerite.core.errors import NeriteError
from nerite.core.failures import report
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.dispatch.dispatcher import Dispatcher
from nerite.dispatch.interface import Ended, May, Refusal
from nerite.dispatch.sequence_inputs import SequenceInputs, SequenceRequirements
from nerite.instances.instance import Batch, ModelInstance
from nerite.scheduling.decider import BatchReason
from nerite.scheduling.sequence import SequenceRequest, SequenceRules
from nerite.scheduling.sequence_batcher import SequenceBatcher

_log = logging.getLogger("nerite.execution")
_ID_BITS = 62


class SequenceDispatcher(Dispatcher):
    """Dispatcher of a model with sequences."""

    __slots__ = ()

    def submit(self, request: InferenceRequest) -> None:
        """Queue a request in its sequence; its responses come through ``request.respond``."""
        super().submit(SequenceRequest(request))


class SequencePicker:
    """Combines a sequence batcher with sequence inputs and states. All its requests are ``SequenceRequest``."""

    timed = True
    ahead = False
    settles = True

    def __init__(self, config: ModelConfig, attach: SequenceInputs, rules: SequenceRules) -> None:
        """``attach`` adds controls and states to requests, and takes states out of responses."""
        self._config = config
        self._rules = rules
        self._model = rules.model
        self._batcher: SequenceBatcher[ModelInstance] = SequenceBatcher(rules, self._prepare)
        self._attach = attach
        batching = config.sequence_batching
        self._iterative = batching is not None and batching.iterative_sequence
        self._by_slot = rules.batching is None
        # A tenant cannot guess what is assigned to others, so a model that knows requests by id keeps them apart.
        self._ids = itertools.count(1 if rules.share_of is None else secrets.randbits(_ID_BITS))
        self._requirements = SequenceRequirements(config)
        batcher = self._batcher
        self.add_instance = batcher.add_instance
        self.retire = batcher.retire
        self.holds = batcher.holds
        self.wake_at = batcher.wake_at
        self.expire = batcher.expire
        self.server_stops = batcher.server_stops
        self.finish = batcher.finish

    @property
    def idle(self) -> Collection[ModelInstance]:
        """Instances that are up and execute nothing."""
        return self._batcher.idle

    @property
    def size(self) -> int:
        """Number of requests that wait."""
        return self._batcher.size

    @property
    def waiting(self) -> Mapping[int, int]:
        """Number of requests that wait; sequences have no priorities."""
        return {0: self._batcher.size}

    @property
    def releases(self) -> Mapping[BatchReason, int]:
        """Number of batches by the reason for their release."""
        return self._batcher.releases

    def renewed(self) -> SequencePicker:
        """Return an empty picker with the same rules, no instances and no sequences."""
        return SequencePicker(self._config, self._attach, self._rules)

    def alone(self, batch: Batch, index: int) -> Batch:
        """Return a batch with one request of ``batch`` in its slot; the slots before it are empty."""
        request = batch[index]
        return [*(self._attach.null(request) for _ in range(index)), request] if self._by_slot else [request]

    def offer(self, request: InferenceRequest, now: int) -> NeriteError | None:
        """Queue ``request`` for its turn in its sequence, or return why it is refused."""
        assert isinstance(request, SequenceRequest)
        if self._iterative:
            self._make_iterative(request)
        refusal = self._requirements.refusal(request.header, request.sequence_id, request.id)
        if refusal is not None:
            return refusal
        if request.starts and self._batcher.begun(request.sequence_key):
            _log.warning(
                "sequence %s for model '%s' has a conflict. The previous sequence did not end before this sequence "
                "start. Previous sequence will be terminated early.",
                request.sequence_id,
                self._model,
                extra={"request_id": request.id},
            )
        return self._batcher.offer(request, now)

    def displace(self, request: InferenceRequest) -> InferenceRequest | None:
        """Return ``request`` if it would start a sequence; sequences that have begun go on."""
        return request if self._iterative or request.header.sequence_start else None

    def choose(self, now: int, may: May | None = None) -> tuple[ModelInstance, Batch] | None:
        """Return an instance and the batch to start on it now; None if nothing should start."""
        chosen = self._batcher.choose(now, may)
        if chosen is None:
            return None
        instance, slots = chosen
        some = next(request for request in slots if request is not None)
        return instance, [self._attach.null(some) if request is None else request for request in slots]

    def ended(
        self, instance: ModelInstance, batch: Batch, responses: Sequence[InferenceResponse | None], took_ns: int
    ) -> Ended:
        """Record that ``instance`` has finished a batch, and keep the states for the next requests."""
        real: list[SequenceRequest] = []
        settled: list[InferenceResponse | None] = []
        again: list[SequenceRequest] = []
        nulls: Batch = []
        for request, response in zip(batch, responses, strict=True):
            if not isinstance(request, SequenceRequest):
                nulls.append(request)
                continue
            kept = None if response is None else self._settled(request, response)
            if response is not None and response.again:
                again.append(request)
                continue
            real.append(request)
            settled.append(kept)
        self._batcher.ended(instance, real, monotonic_ns(), again)
        return [*real], settled, [*nulls, *again]

    def _settled(self, request: SequenceRequest, response: InferenceResponse) -> InferenceResponse | None:
        """Return the result of ``settle``; an error if that fails, so that the rest of the batch is not affected."""
        try:
            return self.settle(request, response)
        except Exception as error:
            return InferenceResponse.failed(report("dispatcher", error, f"of model '{self._model}'", request.id))

    def settle(self, request: InferenceRequest, response: InferenceResponse) -> InferenceResponse | None:
        """Keep the state in a response for the next request of the sequence; return the response for the caller.

        A slot without a request has no caller.
        """
        if not isinstance(request, SequenceRequest):
            return None
        return self._attach.settle(request, response, request.sequence)

    def resume(self, request: InferenceRequest) -> None:
        """Run ``request`` again if it waited for its caller."""
        assert isinstance(request, SequenceRequest)
        self._batcher.resume(request)

    def remove_instance(self, instance: ModelInstance) -> Sequence[Refusal]:
        """Remove ``instance``, and with it its sequences."""
        return self._batcher.remove_instance(instance, f"the instance that had it, '{instance.name}', died")

    def withdraw(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Drop ``request`` if it waits, and all other requests of its sequence."""
        assert isinstance(request, SequenceRequest)
        return self._batcher.withdraw(request)

    def drain(self) -> list[InferenceRequest]:
        """Drop and return all waiting requests."""
        return [*self._batcher.drain()]

    def _prepare(self, request: SequenceRequest) -> NeriteError | None:
        """Attach controls and states to a request; return the error if that failed."""
        try:
            request.detach()
            end = request.header.sequence_end and bool(request.header.sequence_id)
            self._attach.attach(request, request.sequence, start=request.starts, end=end)
        except Exception as error:
            return report("dispatcher", error, f"of model '{self._model}'", request.id)
        return None

    def _make_iterative(self, request: SequenceRequest) -> None:
        """Make a request a sequence of its own, with a generated id if it has none: its model decides when it ends."""
        request.ends = True
        if not request.sequence_id:
            request.starts = True
            request.assign(next(self._ids))
            while self._batcher.lives(request.sequence_key):
                request.assign(next(self._ids))
