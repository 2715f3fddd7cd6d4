// The last readings of the metrics: a recent span for tables, and the counts since a version was loaded.

import { Change } from "./change.js";

const RECENT = 10;

export class History {
  constructor() {
    this.readings = [];
    /** The shadows of routes, in the last reading. */
    this.shadows = [];
    /** The loops beside the requests, in the last reading. */
    this.loops = [];
  }

  /** Add a reading of the metrics page, taken at a time in seconds. */
  note(time, { versions, machine, shadows, loops }) {
    this.shadows = shadows;
    this.loops = loops;
    this.readings.push({ time, versions, machine });
    while (this.readings.length > 2 && this.readings[1].time <= time - RECENT) this.readings.shift();
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
}
