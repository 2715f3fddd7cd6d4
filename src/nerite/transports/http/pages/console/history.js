// History of the metrics over the last minutes: points for plots, and a recent span for tables.

import { Change } from "./change.js";

const KEPT = 5 * 60;
const RECENT = 10;

/** The lines that plots can show, each a function of a `Change`. */
const LINES = {
  requests: (change) => change.requests,
  failures: (change) => change.rate("failures"),
  rows: (change) => change.rate("rows"),
  p50: (change) => change.quantile("whole", 0.5),
  p90: (change) => change.quantile("whole", 0.9),
  p99: (change) => change.quantile("whole", 0.99),
  queue: (change) => change.now.queue ?? null,
  batch: (change) => change.mean("batch"),
  promptTokens: (change) => change.rate("promptTokens"),
  generatedTokens: (change) => change.rate("generatedTokens"),
  firstToken50: (change) => change.quantile("firstToken", 0.5),
  firstToken99: (change) => change.quantile("firstToken", 0.99),
  between50: (change) => change.quantile("betweenTokens", 0.5),
  between99: (change) => change.quantile("betweenTokens", 0.99),
  running: (change) => change.now.running ?? null,
  waiting: (change) => change.now.waiting ?? null,
  kvUsage: (change) => change.now.kvUsage ?? null,
};
const OF_ALL = ["requests", "failures", "queue"];

export class History {
  constructor() {
    this.times = [];
    this.points = [];
    this.readings = [];
    /** The shadows of routes, in the last reading. */
    this.shadows = [];
  }

  /** Add a reading of the metrics page, taken at a time in seconds. */
  note(time, { versions, machine, shadows }) {
    this.shadows = shadows;
    const last = this.readings.at(-1);
    const point = new Map();
    for (const [key, now] of versions) {
      // A version that appears later has no previous reading; its counters started at zero.
      const change = last && new Change(now, last.versions.get(key), time - last.time);
      if (change) point.set(key, Object.fromEntries(Object.entries(LINES).map(([name, of]) => [name, of(change)])));
    }
    this.readings.push({ time, versions, machine });
    while (this.readings.length > 2 && this.readings[1].time <= time - RECENT) this.readings.shift();
    if (!last) return;
    this.times.push(time);
    this.points.push(point);
    while (this.times[0] < time - KEPT) {
      this.times.shift();
      this.points.shift();
    }
  }

  get machine() {
    return this.readings.at(-1)?.machine ?? {};
  }

  /** Return the change of a version over the last seconds. */
  recent(key) {
    const [first, last] = [this.readings[0], this.readings.at(-1)];
    if (!last) return new Change();
    return new Change(last.versions.get(key), first.versions.get(key), last.time - first.time);
  }

  /** Return the change of a version since it was loaded. */
  ever(key) {
    return new Change(this.readings.at(-1)?.versions.get(key));
  }

  /** Return a line of a version: one value for each of `times`, null if unknown. */
  line(key, name) {
    return this.points.map((point) => point.get(key)?.[name] ?? null);
  }

  /** Return the sums over all versions, by name: one value for each of `times`. */
  all() {
    const sum = (point, name) => {
      let total = 0;
      for (const each of point.values()) total += each[name] ?? 0;
      return total;
    };
    return Object.fromEntries(OF_ALL.map((name) => [name, this.points.map((point) => sum(point, name))]));
  }
}
