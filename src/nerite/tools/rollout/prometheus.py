"""Reads the counters of a fleet's rollout from Prometheus, or from what answers its queries."""

from __future__ import annotations

import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from nerite.rollouts.fleet_counts import COUNTERS, INFO

FRESH: Final = 90.0
"""Seconds after which what Prometheus has read of a process is out of date."""
_LOOKBACK: Final = 300.0
"""Seconds that each query looks back at least: longer than a scrape interval and a failed scrape."""
_MARGIN: Final = 60.0
_TIMEOUT: Final = 10.0
_LARGEST: Final = 64 * 2**20


class PrometheusError(Exception):
    """Prometheus cannot be asked, or refuses the query."""


class FleetSamples(NamedTuple):
    """Samples of one look."""

    samples: Sequence[tuple[Mapping[str, str], float]]
    boots: Sequence[str]
    """Processes that were read lately."""


class Prometheus:
    """One Prometheus, asked for one rollout."""

    def __init__(self, url: str, headers: Mapping[str, str], model: str, rollout: str) -> None:
        """``url`` is without ``/api/v1``."""
        self._url = url.rstrip("/") + "/api/v1/query"
        self._headers = dict(headers)
        self._matches = f'model="{_escaped(model)}",rollout="{_escaped(rollout)}"'
        self._read_at: float | None = None

    def read(self, now: float, since: float) -> FleetSamples:
        """Return the counters. Times are seconds of any one clock; ``since``: when the rollout began.

        Processes that are gone count with the last value that was read of them, also if that was while this command did
        not run. Raises ``PrometheusError``. Blocks.
        """
        back = max(_LOOKBACK, now - (since if self._read_at is None else self._read_at) + _MARGIN)
        names = "|".join(COUNTERS)
        counters = self._ask(f'last_over_time({{__name__=~"{names}",{self._matches}}}[{back:.0f}s])')
        ages = self._ask(f"time() - timestamp({INFO}{{{self._matches}}})")
        self._read_at = now
        boots = [labels.get("boot", "") for labels, age in ages if age <= FRESH]
        return FleetSamples(counters, boots)

    def _ask(self, query: str) -> list[tuple[Mapping[str, str], float]]:
        body = urllib.parse.urlencode({"query": query}).encode()
        request = urllib.request.Request(self._url, body, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
                data = answer.read(_LARGEST)
        except urllib.error.HTTPError as error:
            with error:
                told = error.read(1000).decode(errors="replace")
            raise PrometheusError(f"Prometheus answers {error.code}: {told}") from None
        except OSError as error:
            raise PrometheusError(f"Prometheus cannot be asked: {error}") from None
        try:
            found: list[Any] = orjson.loads(data)["data"]["result"]
            return [(dict(each["metric"]), float(each["value"][1])) for each in found]
        except (ValueError, LookupError, TypeError) as error:
            raise PrometheusError(f"{self._url} does not answer as Prometheus does: {error!r}") from None


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
