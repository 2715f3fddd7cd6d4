// Drawing of the steps of an ensemble: tensors flow from left to right, and each step shows its mean duration.

import { element, say, shape } from "./elements.js";
import { key } from "./exposition.js";
import * as format from "./format.js";

const BOX = { width: 168, height: 54 };
const GAP = { x: 96, y: 26 };
const MARGIN = 12;

/** Lay out the steps of an ensemble in columns: each to the right of the steps whose tensors it takes. */
export function arrange({ input, output, ensemble_scheduling: { step: steps } }) {
  const ends = { inputs: { name: "inputs", gives: input.map((each) => each.name), takes: [], column: 0 } };
  const boxes = steps.map((step) => ({
    name: step.model_name,
    version: step.model_version,
    takes: Object.values(step.input_map),
    gives: Object.values(step.output_map),
    column: 1,
  }));
  const giver = new Map();
  for (const box of [ends.inputs, ...boxes]) for (const tensor of box.gives) giver.set(tensor, box);
  for (let turn = 0; turn < boxes.length; turn++) {
    for (const box of boxes) {
      box.column = 1 + Math.max(0, ...box.takes.map((tensor) => giver.get(tensor)?.column ?? 0));
    }
  }
  const last = 1 + Math.max(0, ...boxes.map((box) => box.column));
  const outputs = { name: "outputs", takes: output.map((each) => each.name), gives: [], column: last };
  const all = [ends.inputs, ...boxes, outputs];
  const most = Math.max(...all.map((box) => all.filter((other) => other.column === box.column).length));
  for (let column = 0; column <= last; column++) {
    const here = all.filter((box) => box.column === column);
    here.forEach((box, at) => {
      box.x = MARGIN + column * (BOX.width + GAP.x);
      box.y = MARGIN + (at + (most - here.length) / 2) * (BOX.height + GAP.y);
    });
  }
  const flows = all.flatMap((to) => to.takes.map((tensor) => ({ tensor, from: giver.get(tensor), to })));
  return { boxes, ends: [ends.inputs, outputs], flows: flows.filter((flow) => flow.from), columns: last + 1, rows: most };
}

export class Graph {
  constructor(config, console) {
    this.console = console;
    const { boxes, ends, flows, columns, rows } = arrange(config);
    this.steps = boxes.map((box) => ({ ...box, time: shape("text", { x: 12, y: 40, class: "time" }), bar: shape("rect", { x: 0, y: BOX.height - 4, height: 4, width: 0, class: "bar" }) }));
    const width = 2 * MARGIN + columns * (BOX.width + GAP.x) - GAP.x;
    const height = 2 * MARGIN + rows * (BOX.height + GAP.y) - GAP.y;
    const drawing = shape(
      "svg",
      { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Steps of the ensemble" },
      ...flows.map(drawFlow),
      ...flows.map(drawName),
      ...ends.map(drawEnd),
      ...this.steps.map(drawStep),
    );
    this.span = element("small");
    this.root = element("section", {}, element("h2", {}, "Steps ", this.span), element("div", { className: "graph" }, drawing));
  }

  update() {
    const { models, history } = this.console;
    const changes = this.steps.map(({ name, version }) => {
      const at = key(name, Number(version) > 0 ? String(version) : (models.latest(name)?.version ?? ""));
      const recent = history.recent(at);
      return recent.count("success") > 0 ? [recent, true] : [history.ever(at), false];
    });
    const means = changes.map(([change]) => change.mean("whole"));
    const most = Math.max(...means);
    this.steps.forEach(({ time, bar }, at) => {
      say(time, means[at] === null ? "–" : `${format.seconds(means[at])} on average`);
      bar.setAttribute("width", most > 0 ? (BOX.width * (means[at] ?? 0)) / most : 0);
    });
    say(this.span, changes.some(([, recent]) => recent) ? "mean over all requests to each model in the last seconds" : "");
  }
}

const middle = (box) => box.y + BOX.height / 2;

function drawFlow({ from, to }) {
  const [start, end] = [from.x + BOX.width, to.x];
  const bend = Math.max((end - start) / 2, 30);
  const path = `M${start} ${middle(from)}C${start + bend} ${middle(from)} ${end - bend} ${middle(to)} ${end} ${middle(to)}`;
  return shape("path", { d: path, class: "flow" });
}

function drawName({ tensor, from, to }) {
  const x = to.x - GAP.x / 2;
  const share = (x - from.x - BOX.width) / (to.x - from.x - BOX.width);
  const smooth = share * share * (3 - 2 * share);
  const y = middle(from) + (middle(to) - middle(from)) * smooth - 5;
  const short = tensor.length > 14 ? `${tensor.slice(0, 13)}…` : tensor;
  return shape("text", { x, y, class: "tensor" }, short, shape("title", {}, tensor));
}

function drawEnd({ name, x, y }) {
  const label = shape("text", { x: BOX.width / 2, y: BOX.height / 2 + 4, class: "end" }, name);
  const box = shape("rect", { width: BOX.width, height: BOX.height, rx: BOX.height / 2, class: "end" });
  return shape("g", { transform: `translate(${x} ${y})` }, box, label);
}

function drawStep({ name, version, x, y, time, bar }) {
  const href = `#/models/${encodeURIComponent(name)}${Number(version) > 0 ? `/${version}` : ""}`;
  const short = name.length > 20 ? `${name.slice(0, 19)}…` : name;
  const box = shape("rect", { width: BOX.width, height: BOX.height, rx: 6, class: "step" });
  const label = shape("text", { x: 12, y: 22, class: "name" }, short, shape("title", {}, name));
  return shape("a", { href, transform: `translate(${x} ${y})` }, box, bar, label, time);
}
