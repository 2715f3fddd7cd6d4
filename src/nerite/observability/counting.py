"""What is counted of a model version, as the options of the metrics and its configuration have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nerite.config.model_config import ModelConfig
from nerite.config.options import MetricsOptions
from nerite.observability.optional_times import FIRST_RESPONSE_MS, OptionalTimes
from nerite.observability.stage_times import StageTimes
from nerite.observability.statistics import VersionStatistics

FIRST_RESPONSE: Final = "nv_inference_first_response_histogram_ms"


def begin(options: MetricsOptions, config: ModelConfig) -> VersionStatistics:
    """Return the statistics of a version that was loaded just now."""
    if not options.enabled:
        return VersionStatistics()
    optional = None
    if options.histogram_latencies or options.summary_latencies:
        optional = OptionalTimes(
            _buckets(config) if options.histogram_latencies else None,
            [quantile for quantile, _ in options.summary_quantiles] if options.summary_latencies else None,
        )
    return VersionStatistics(StageTimes() if options.stage_histograms else None, optional)


def _buckets(config: ModelConfig) -> Sequence[float]:
    """Return the bounds of the histogram of first responses: those of the configuration, if it has some."""
    for control in config.model_metrics.metric_control if config.model_metrics else ():
        if control.metric_identifier is not None and control.metric_identifier.family == FIRST_RESPONSE:
            assert control.histogram_options is not None  # as was checked
            return control.histogram_options.buckets
    return FIRST_RESPONSE_MS
