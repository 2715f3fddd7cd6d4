"""Rules of other judges on the same streams, as their documentation describes them.

- Flagger (docs.flagger.app, metrics and canary analysis): each minute the success rate of the canary must be at least
  99 % and its p99 at most a fixed limit; after five failed checks it is rolled back. The limit is 1.5 times the p99
  that the version had before the rollout. A minute without requests is no failed check here.
- Argo Rollouts (analysis): each five minutes the success rate must be at least 95 % (99 %); after three failed
  measurements the rollout is aborted. A third template compares with the stable version instead: errors at most 1.2
  times as often.
- Mann-Whitney test of the latencies so far, with normal approximation, at 98 % confidence as in Kayenta's default
  judge: looked at as often as the judge here, and each five minutes. That judge compares averages over time and has a
  tolerance, which are left out: this row shows what looking again and again does.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from rollout_streams import BUCKETS, LEAST, Batch

PER_MINUTE: Final = 2
PER_FIVE: Final = 10
_FAILED_CHECKS: Final = 5
_FAILURE_LIMIT: Final = 3
_Z: Final = 2.3263
_WIDTH: Final = np.log(1.02)
RULES: Final = (
    "Flagger: success 99 %, p99 ≤ 1.5 x before",
    "Argo: success 99 %",
    "Argo: success 95 %",
    "Argo: errors ≤ 1.2 x stable",
    "Mann-Whitney 98 %, each 30 s",
    "Mann-Whitney 98 %, each 5 min",
)


class FixedRules:
    """The rules of all runs."""

    def __init__(self, runs: int) -> None:
        """Begin with no requests."""
        self.runs = runs
        self.seen = np.zeros((runs, 2, BUCKETS))
        """Latencies so far: of the baseline, of the candidate."""
        self.minute = np.zeros((runs, BUCKETS))
        self.minute_errors = np.zeros(runs)
        self.counts = np.zeros((runs, 2, 2))
        """Of five minutes: arm, errors and requests."""
        self.limit = np.zeros(runs)
        self.failed = np.zeros(runs, int)
        self.measured = np.zeros((3, runs), int)
        self.batches = 0

    def take(self, batch: Batch) -> np.ndarray:
        """Count a batch; return by rule and run whether the rule rolls back now."""
        places = np.arange(self.runs)[:, None] * 2 + batch.candidate
        buckets = (batch.latency / _WIDTH).astype(int) - LEAST
        size = self.runs * 2 * BUCKETS
        counted = np.bincount((places * BUCKETS + buckets).ravel(), minlength=size).reshape(self.runs, 2, BUCKETS)
        if batch.step < 0:
            self.limit = _bucket_at(counted[:, 0], 0.99) + np.log(1.5) / _WIDTH
            return np.zeros((len(RULES), self.runs), bool)
        self.seen += counted
        self.minute += counted[:, 1]
        errors = np.stack(
            [(batch.error & ~batch.candidate).sum(axis=1), (batch.error & batch.candidate).sum(axis=1)], 1
        )
        self.minute_errors += errors[:, 1]
        self.counts[..., 0] += errors
        self.counts[..., 1] += counted.sum(axis=-1)
        self.batches += 1
        if self.batches % PER_MINUTE == 0:
            requests = self.minute.sum(axis=-1)
            slow = _bucket_at(self.minute, 0.99) > self.limit
            self.failed += (requests > 0) & (slow | (self.minute_errors > 0.01 * requests))
            self.minute[:] = self.minute_errors[:] = 0
        found = [self.failed >= _FAILED_CHECKS]
        if self.batches % PER_FIVE == 0:
            (stable_errors, stable), (canary_errors, canary) = self.counts[:, 0].T, self.counts[:, 1].T
            rate = canary_errors / np.maximum(canary, 1)
            self.measured[0] += rate > 0.01
            self.measured[1] += rate > 0.05
            self.measured[2] += (canary > 0) & (rate > 1.2 * stable_errors / np.maximum(stable, 1))
            self.counts[:] = 0
        found += list(self.measured >= _FAILURE_LIMIT)
        shifted = self._mann_whitney() > _Z
        found += [shifted, shifted & (self.batches % PER_FIVE == 0)]
        return np.array(found)

    def _mann_whitney(self) -> np.ndarray:
        stable, canary = self.seen[:, 0], self.seen[:, 1]
        n, m = stable.sum(axis=1), canary.sum(axis=1)
        both = stable + canary
        below = stable.cumsum(axis=1) - stable / 2
        wins = (canary * below).sum(axis=1)
        size = n + m
        ties = (both**3 - both).sum(axis=1) / np.maximum(size * (size - 1), 1)
        spread = np.sqrt(np.maximum(n * m / 12 * (size + 1 - ties), 1e-9))
        return np.where(m > 0, (wins - n * m / 2) / spread, 0.0)


def _bucket_at(counts: np.ndarray, quantile: float) -> np.ndarray:
    rank = np.ceil(counts.sum(axis=-1) * quantile)
    found: np.ndarray = (counts.cumsum(axis=-1) >= rank[..., None]).argmax(axis=-1)
    return found
