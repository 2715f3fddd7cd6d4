// Samples that the server has kept of the last hour, and the control that chooses how much of it the pages show.

import { element } from "./elements.js";
import * as server from "./server.js";

const RANGES = [["5 min", 300], ["15 min", 900], ["1 h", 3600]];
const STORE = "nerite-range";
/** Milliseconds between two requests: the server takes a sample every five seconds, which a long range need not show at once. */
const EVERY = 4000;
const POINTS = 240;

let chosen = RANGES.find(([, seconds]) => String(seconds) === sessionStorage.getItem(STORE))?.[1] ?? RANGES[0][1];

/** Return the chosen time range in seconds. */
export const range = () => chosen;

/** Return radio buttons for the time range, which is kept until the tab is closed. `changed` is called after a choice. */
export function rangePicker(changed) {
  const choose = (seconds) => {
    chosen = seconds;
    sessionStorage.setItem(STORE, String(seconds));
    changed();
  };
  const option = ([name, seconds]) => {
    const input = element("input", { type: "radio", name: "range", checked: seconds === chosen, on: { change: () => choose(seconds) } });
    return element("label", {}, input, element("span", {}, name));
  };
  return element("fieldset", { className: "range" }, element("legend", {}, "Time range"), ...RANGES.map(option));
}

/** The samples of the chosen range, of one version or of all. */
export class Samples {
  data = { times: [], lines: {}, versions: [] };

  /** `arrived` is called when there are others than before. */
  constructor(arrived) {
    this.arrived = arrived;
    this.next = 0;
  }

  /** Ask for new samples if it is time, or if others are wanted. */
  async update(name = "", version = "") {
    const path = `ui/history?seconds=${chosen}${name && `&model=${encodeURIComponent(name)}&version=${encodeURIComponent(version)}`}`;
    this.wanted = path;
    this.again = () => this.update(name, version);
    if (this.asking || (path === this.path && performance.now() < this.next)) return;
    this.asking = true;
    try {
      const data = await server.get(path);
      if (this.wanted === path) this.data = data;
      this.path = path;
    } catch {
      // The numbers, which need the same keys, say why.
    }
    this.asking = false;
    this.next = performance.now() + Math.max(EVERY, (chosen * 1000) / POINTS);
    if (this.wanted === path) this.arrived();
    else await this.again();
  }

  /** Return a line: one value for each of the times, null if unknown. */
  line(name) {
    return this.data.lines[name] ?? this.data.times.map(() => null);
  }
}
