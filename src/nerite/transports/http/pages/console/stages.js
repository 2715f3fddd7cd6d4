// Time of requests by stage, and the distribution of batch sizes.

import { element, say } from "./elements.js";
import * as format from "./format.js";

const STAGES = ["queue", "input", "compute", "output"];

export class Stages {
  constructor() {
    this.strip = element("div", { className: "strip", role: "img" });
    this.pieces = STAGES.map((name) => element("span", { className: name }));
    this.strip.append(...this.pieces);
    this.cells = STAGES.map(() => [0, 1, 2].map(() => element("td", { className: "number" })));
    const rows = STAGES.map((name, at) =>
      element("tr", {}, element("th", { scope: "row" }, element("i", { className: `dot ${name}` }), name), ...this.cells[at]),
    );
    this.span = element("small");
    this.batches = element("tbody");
    this.batchPart = element(
      "section",
      { hidden: true },
      element("h2", {}, "Batch sizes"),
      table(["Rows up to", "Batches", "Share"], this.batches),
    );
    const heads = ["Stage", "Mean", "p99", "Share"];
    this.root = element(
      "div",
      { className: "columns", hidden: true },
      element("section", {}, element("h2", {}, "Where the time goes ", this.span), this.strip, table(heads, element("tbody", {}, ...rows))),
      this.batchPart,
    );
  }

  /** Show recent requests or, if there were none, all since the model was loaded. */
  update(recent, ever) {
    const change = recent.count("success") > 0 ? recent : ever;
    const means = STAGES.map((name) => change.mean(`stage:${name}`));
    this.root.hidden = means.every((mean) => mean === null);
    if (this.root.hidden) return;
    say(this.span, change === recent ? `last ${Math.round(recent.seconds)} s` : "since the model was loaded");
    const total = means.reduce((sum, mean) => sum + (mean ?? 0), 0);
    const shares = means.map((mean) => (total ? (mean ?? 0) / total : 0));
    STAGES.forEach((name, at) => {
      this.pieces[at].style.flexGrow = shares[at];
      const texts = [format.seconds(means[at]), format.seconds(change.quantile(`stage:${name}`, 0.99)), format.share(shares[at])];
      texts.forEach((text, column) => say(this.cells[at][column], text));
    });
    this.strip.setAttribute("aria-label", STAGES.map((name, at) => `${name} ${format.share(shares[at])}`).join(", "));
    this.updateBatches(change.histogram("batch"));
  }

  updateBatches({ bounds, counts }) {
    const total = counts.at(-1) ?? 0;
    this.batchPart.hidden = bounds.length <= 2 || !total; // Without batching, all batches have one row.
    if (this.batchPart.hidden) return;
    const sizes = bounds.slice(0, -1).map((bound, at) => [bound, counts[at] - (counts[at - 1] ?? 0)]);
    while (this.batches.children.length < sizes.length) {
      const meter = element("meter", { min: 0, max: 1 });
      const cells = [element("td"), element("td", { className: "number" }), element("td", {}, meter)];
      this.batches.append(element("tr", {}, ...cells));
    }
    sizes.forEach(([bound, count], at) => {
      const [size, batches, part] = this.batches.children[at].children;
      say(size, format.number(bound));
      say(batches, format.number(count));
      part.firstChild.value = count / total;
      part.firstChild.title = format.share(count / total);
    });
  }
}

function table(heads, body) {
  const cells = heads.map((head, at) => element("th", { scope: "col", className: at ? "number" : "" }, head));
  return element("table", {}, element("thead", {}, element("tr", {}, ...cells)), body);
}
