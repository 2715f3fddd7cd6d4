"""Queue pipeline of a model version: which stages its requests pass, and in which order."""

from __future__ import annotations

import logging
from collections.abc import Callable

from nerite.admission.queue import EngineAdmissionQueue
from nerite.admission.tenants import TenantAdmission
from nerite.backends.registry import GENERATING
from nerite.cache.frontend import ResponseCacheFrontend
from nerite.cache.interface import ResponseCache
from nerite.config.model_config import ModelConfig
from nerite.config.model_parameters import tenants_share_cache
from nerite.config.options import QueueOptions
from nerite.core.queue_stage import QueueStage
from nerite.core.signature import Signature
from nerite.dispatch.dispatcher import Dispatcher
from nerite.dispatch.interface import VersionScheduler
from nerite.ledger.meter import VersionMeter
from nerite.ledger.stage import LedgerStage
from nerite.observability.statistics import VersionStatistics
from nerite.scheduling.load_shedding import LoadShedder

_log = logging.getLogger("nerite.repository")


class QueuePipeline:
    """Stages of one model version, as chosen by its configuration and the server's.

    0. Inputs on GPUs, if the server has any: they are brought to where the model takes them.
    1. Idempotency keys, if an engine generates tokens. In front of the cache, so that a key belongs to one request
       whether the model or the cache answers it.
    2. The account in the ledger, if the server has one. Behind idempotency keys, because a key is one execution.
    3. The response cache, if the model enables it. In front of admission, because a hit needs no capacity.
    4. Admission control: by the load of the engines if they generate tokens, and by tenant if a policy is in force.
    5. The scheduler: a dispatcher, or the steps of an ensemble.
    """

    def __init__(
        self,
        config: ModelConfig,
        signature: Signature,
        scheduler: VersionScheduler,
        statistics: VersionStatistics,
        tenant_admission: TenantAdmission,
        cache: ResponseCache | None,
        bounds: QueueOptions,
        meter: VersionMeter | None = None,
        device_inputs: Callable[[QueueStage], QueueStage] | None = None,
    ) -> None:
        """``bounds`` are the limits of the queue while no policy is in force. Without ``meter`` there is no ledger.

        ``device_inputs`` returns the stage in front of another one that brings inputs on GPUs to the model.
        """
        self.scheduler = scheduler
        self.engine_admission: EngineAdmissionQueue | None = None
        """Stage that needs the reports of the engines."""
        self.cache_frontend: ResponseCacheFrontend | None = None
        """Stage that needs the origin of the model's responses."""
        stage: QueueStage = scheduler
        if config.backend in GENERATING:
            assert isinstance(scheduler, Dispatcher)
            engine = self.engine_admission = tenant_admission.engine_admission_queue(
                config.name, scheduler, statistics, LoadShedder(bounds, config.name)
            )
            scheduler.on_usable = lambda: engine.set_ready(scheduler.makes_progress)
            stage = engine
        elif tenant_admission.in_force:
            stage = tenant_admission.admission_queue(config.name, scheduler, statistics)
        if config.response_cache and config.response_cache.enable:
            if cache is None:
                _log.warning(
                    "model '%s' enables the response cache, but the server has none: every response is computed. "
                    "Start the server with --cache-config=local,size=<bytes>",
                    config.name,
                )
            else:
                stage = self.cache_frontend = ResponseCacheFrontend(
                    cache, stage, statistics, signature.outputs, shared=tenants_share_cache(config)
                )
        if meter is not None:
            stage = LedgerStage(meter, stage)
        if self.engine_admission is not None:
            stage = idempotent = tenant_admission.idempotent_queue(stage, self.engine_admission.controller)
            if meter is not None:
                idempotent.on_joined = meter.joined
        self.first = stage if device_inputs is None else device_inputs(stage)
        """Stage that requests enter."""
