// Table of the shadows of routes: how their answers compare with those that callers got.

import { Change } from "./change.js";
import { element } from "./elements.js";
import * as format from "./format.js";
import { Table } from "./table.js";

const COLUMNS = [
  ["Route"], ["Shadow"], ["Requests", "number"], ["Agree", "number"], ["Labels agree", "number"], ["Distance, p50", "number"],
  ["Distance, p99", "number"], ["Shared text", "number"], ["Slower by", "number"], ["Compared", "words"], ["Not compared", "words"],
];
const AGREEING = ["equal", "close"];

/** The shadows in the console's last reading of the metrics. Hidden if there are none. */
export class Shadows {
  /** With `route`, only the shadow of this route. */
  constructor(console, route = "") {
    this.console = console;
    this.route = route;
    this.table = new Table(COLUMNS);
    const about = "Shadows get copies of requests; nobody gets their answers. Counted since they began.";
    this.root = element(
      "section",
      { className: "bare", hidden: true },
      element("h2", {}, "Shadows"),
      element("p", { className: "muted" }, about),
      this.table.root,
    );
  }

  update() {
    const shown = this.console.history.shadows.filter(({ route }) => !this.route || route === this.route);
    this.root.hidden = !shown.length;
    this.table.show(shown.map((shadow) => ({ texts: texts(shadow) })));
  }
}

function texts({ route, arm, counts, histograms }) {
  const change = new Change(histograms);
  const { requests = 0, compared = {}, dropped = {}, labels, agreed } = counts;
  const done = Object.values(compared).reduce((sum, count) => sum + count, 0);
  const agreeing = AGREEING.reduce((sum, result) => sum + (compared[result] ?? 0), 0);
  return [
    route,
    arm,
    format.number(requests),
    done ? format.share(agreeing / done) : "–",
    labels ? format.share(agreed / labels) : "–",
    ...[0.5, 0.99].map((part) => format.number(change.quantile("distance", part))),
    format.share(change.mean("text")),
    format.seconds(change.mean("latency")),
    list(compared),
    list(dropped),
  ];
}

/** Return counts by name as text, without those that are zero. */
const list = (counts) =>
  Object.entries(counts)
    .filter(([, count]) => count)
    .map(([name, count]) => `${format.number(count)} ${name.replaceAll("_", " ")}`)
    .join(", ") || "–";
