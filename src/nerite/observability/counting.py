"""What is counted of a model version, as the options of the metrics and its configuration have it."""

from __future__ import annotations

from nerite.config.options import MetricsOptions
from nerite.observability.stage_times import StageTimes
from nerite.observability.statistics import VersionStatistics


def begin(options: MetricsOptions) -> VersionStatistics:
    """Return the statistics of a version that was loaded just now."""
    return VersionStatistics(StageTimes() if options.enabled and options.stage_histograms else None)
