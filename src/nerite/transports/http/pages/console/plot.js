// Plot of the last minutes that adapts to the width of its container and the colours of the page.

import { element } from "./elements.js";
import uPlot from "./uPlot.esm.js";

const HEIGHT = 170;
const LEAST = 60;
const dark = matchMedia("(prefers-color-scheme: dark)");
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

/** Format a time on an axis, with seconds if any tick needs them. */
const moment = (time, _, times) => clock.format(time * 1000).slice(0, times.some((each) => each % 60) ? 8 : 5);

/** Return the indices of isolated values, between two gaps, which no line connects. */
const alone = (values) =>
  [...values.keys()].filter((at) => values[at] !== null && (values[at - 1] ?? null) === null && (values[at + 1] ?? null) === null);

export class Plot {
  /** `lines` are the names of the lines; `format` formats a value. */
  constructor(title, lines, format) {
    this.lines = lines;
    this.format = format;
    this.range = LEAST;
    this.place = element("div", { className: "plot" });
    this.root = element("figure", {}, element("figcaption", {}, title), this.place);
    this.data = [[], ...lines.map(() => [])];
    this.drawing = null;
    this.build = () => {
      this.drawing?.destroy();
      this.drawing = new uPlot(this.options(), this.data, this.place);
    };
    this.watch = new ResizeObserver(() => {
      const width = this.place.clientWidth;
      if (!width) return;
      if (!this.drawing) this.build();
      else if (width !== this.drawing.width) this.drawing.setSize({ width, height: HEIGHT });
    });
    this.watch.observe(this.place);
    dark.addEventListener("change", this.build);
  }

  /** Show one list of values per line, at these times, of a range in seconds; null is a gap. */
  show(times, values, range = LEAST) {
    this.range = range;
    this.data = [times, ...values];
    this.drawing?.setData(this.data);
    const now = this.lines.map((line, at) => `${line} ${this.format(values[at].at(-1) ?? null)}`);
    this.place.setAttribute("aria-label", now.join(", "));
  }

  close() {
    this.watch.disconnect();
    dark.removeEventListener("change", this.build);
    this.drawing?.destroy();
  }

  /** Return the time range: the chosen one, or less if less is known, but at least a minute. */
  span() {
    const [first, last] = [this.data[0][0], this.data[0].at(-1)];
    if (last === undefined) return [Date.now() / 1000 - LEAST, Date.now() / 1000];
    return [last - Math.min(Math.max(last - first, LEAST), this.range), last];
  }

  options() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const axis = {
      stroke: colour("muted"),
      font: "11px system-ui, sans-serif",
      grid: { stroke: colour("line"), width: 1 },
      ticks: { show: false },
    };
    return {
      width: this.place.clientWidth,
      height: HEIGHT,
      cursor: { y: false, points: { size: 6 } },
      scales: {
        x: { range: () => this.span() },
        y: { range: (_, least, most) => [0, most > 0 ? most * 1.1 : 1] },
      },
      axes: [
        { ...axis, space: 80, size: 30, values: (_, times) => times.map(moment) },
        { ...axis, size: 58, space: 36, values: (_, values) => values.map((value) => this.format(value)) },
      ],
      series: [
        { label: "", value: (_, time) => (time === null ? "now" : clock.format(time * 1000)) },
        ...this.lines.map((label, at) => ({
          label,
          stroke: colour(`plot-${at + 1}`),
          width: 1.6,
          dash: label === "rows/s" ? [5, 3] : undefined, // Visible even on top of the first line.
          points: { show: () => false, filter: () => alone(this.data[at + 1]), size: 4 },
          value: (plot, value) => this.format(value ?? this.data[at + 1].at(-1) ?? null),
        })),
      ],
    };
  }
}
