// Difference between two readings of the counters: rates, means and percentiles.

import { emptyHistogram } from "./exposition.js";

const NONE = {};

/** Change of the metrics of one version between two readings, `before` and `now`, that are `seconds` apart. */
export class Change {
  constructor(now = NONE, before = NONE, seconds = 0) {
    this.now = now;
    this.seconds = seconds;
    // The counters of a reloaded version restart at zero.
    this.before = (now.success ?? 0) < (before.success ?? 0) ? NONE : before;
  }

  count(name) {
    return (this.now[name] ?? 0) - (this.before[name] ?? 0);
  }

  /** Rate per second; null if it is not known yet. */
  rate(name) {
    return this.seconds && name in this.now ? this.count(name) / this.seconds : null;
  }

  /** Completed requests per second, successful or not. */
  get requests() {
    const good = this.rate("success");
    return good === null ? null : good + (this.rate("failures") ?? 0);
  }

  histogram(name) {
    const now = this.now[name] ?? emptyHistogram();
    const before = this.before[name] ?? emptyHistogram();
    return {
      bounds: now.bounds,
      counts: now.counts.map((count, at) => count - (before.counts[at] ?? 0)),
      sum: now.sum - before.sum,
    };
  }

  mean(name) {
    const { counts, sum } = this.histogram(name);
    return counts.at(-1) ? sum / counts.at(-1) : null;
  }

  /** Like Prometheus's histogram_quantile: linear interpolation within a bucket. Null if nothing was counted. */
  quantile(name, share) {
    const { bounds, counts } = this.histogram(name);
    const total = counts.at(-1);
    if (!total) return null;
    const rank = share * total;
    const at = counts.findIndex((count) => count >= rank);
    const low = at ? bounds[at - 1] : 0;
    if (bounds[at] === Infinity) return low;
    const below = at ? counts[at - 1] : 0;
    return low + (bounds[at] - low) * ((rank - below) / (counts[at] - below));
  }
}
