// Plot of how the evidence of a gate grows towards the boundaries at which the judge decides.

import * as format from "./format.js";
import { Plot } from "./plot.js";

const LEAST = 60;
const LINES = ["harm", "rolls back at", "proof", "may promote at"];
const COLOURS = ["plot-2", "plot-2", "plot-1", "plot-1"];
const DASHED = [undefined, [6, 4], undefined, [6, 4]];
const SECONDS = [1, 2, 5, 10, 15, 30, ...[1, 2, 5, 10, 15, 30].map((each) => 60 * each), ...[1, 2, 3, 6, 12, 24, 48, 96, 240].map((each) => 3600 * each)];
const POWERS = [1, 2, 3, 5, 10, 20, 50, 100, 200, 500];
/** Evidence that is lower than this e-value is off the plot: what matters is above. */
const LOWEST = -3;

/** Format an e-value that is given as its logarithm (base 10). */
export function power(logarithm) {
  if (logarithm === null || logarithm === undefined) return "–";
  return Math.abs(logarithm) < 6 ? format.number(10 ** logarithm) : `1e${Math.round(logarithm)}`;
}

/** Return how far evidence has grown towards its boundary, from 0 to 1; null if the gate has no evidence. */
export const progress = (evidence, boundary) =>
  boundary === null ? null : Math.min(1, Math.max(0, (evidence ?? 0) / boundary));

export class EvidencePlot extends Plot {
  constructor() {
    super("Evidence (e-value, log scale)", LINES, power);
    this.steps = [];
  }

  /** Show the curve of a gate of a rollout, which `curve` has by columns, and its boundaries. */
  draw({ seconds, weight }, { worse, not_worse: proof }, { worse_boundary: harmful, not_worse_boundary: safe }) {
    this.steps = seconds.flatMap((time, at) => (at && weight[at] !== weight[at - 1] ? [[time, weight[at]]] : []));
    const constant = (value) => seconds.map(() => value);
    this.show(seconds, [worse, constant(harmful), proof, constant(safe)]);
  }

  span() {
    const [first = 0, last = 0] = [this.data[0][0], this.data[0].at(-1)];
    return [first, Math.max(last, first + LEAST)];
  }

  /** Return the range of the logarithms: both boundaries, and not much more of curves that are beyond them. */
  reach(least, most) {
    const boundary = Math.max(1, this.data[2].at(-1) ?? 1, this.data[4].at(-1) ?? 1);
    return [Math.min(-0.5, Math.max(least ?? 0, LOWEST) - 0.1), Math.min(Math.max(most ?? 0, boundary), 1.5 * boundary) * 1.08];
  }

  options() {
    const options = super.options();
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    options.scales = { x: { time: false, range: () => this.span() }, y: { range: (_, least, most) => this.reach(least, most) } };
    const [across, up] = options.axes;
    Object.assign(across, { incrs: SECONDS, values: (_, values) => values.map(format.span) });
    Object.assign(up, { incrs: POWERS });
    options.series[0].value = (_, time) => (time === null ? "now" : format.span(time));
    options.series.slice(1).forEach((series, at) => Object.assign(series, { stroke: colour(COLOURS[at]), dash: DASHED[at] }));
    options.hooks = { drawAxes: [(plot) => this.markSteps(plot, colour("muted"))] };
    return options;
  }

  /** Draw a line at each change of the weight, with the new weight. */
  markSteps({ ctx, bbox, valToPos }, colour) {
    const ratio = devicePixelRatio;
    ctx.save();
    Object.assign(ctx, { strokeStyle: colour, fillStyle: colour, lineWidth: ratio });
    Object.assign(ctx, { font: `${11 * ratio}px system-ui, sans-serif`, textAlign: "left", textBaseline: "alphabetic" });
    ctx.setLineDash([2 * ratio, 3 * ratio]);
    let free = -Infinity;
    for (const [time, weight] of this.steps) {
      const x = Math.round(valToPos(time, "x", true));
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const text = `${format.number(weight)} %`;
      const width = ctx.measureText(text).width + 6 * ratio;
      if (x < free || x + width > bbox.left + bbox.width) continue;
      ctx.fillText(text, x + 3 * ratio, bbox.top + bbox.height - 4 * ratio);
      free = x + width;
    }
    ctx.restore();
  }
}
