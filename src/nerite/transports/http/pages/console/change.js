// What happened between two looks at counters: rates, means and percentiles.

import { emptyHistogram } from "./exposition.js";

const NONE = {};

/** Between `before` and `now`, the numbers of one version at two times that lie `seconds` apart. */
export class Change {
  constructor(now = NONE, before = NONE, seconds = 0) {
    this.now = now;
    this.seconds = seconds;
    // A version that was loaded again counts from nothing.
    this.before = (now.success ?? 0) < (before.success ?? 0) ? NONE : before;
  }

  count(name) {
    return (this.now[name] ?? 0) - (this.before[name] ?? 0);
  }

  /** How many a second; null where nobody knows yet. */
  rate(name) {
    return this.seconds && name in this.now ? this.count(name) / this.seconds : null;
  }

  /** How many requests a second were answered, well or not. */
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

  /** As Prometheus's histogram_quantile: evenly spread between two bounds. Null where nothing was counted. */
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
