// Overview page: a sortable and filterable table of all models, and the load of the whole server.

import { element, say } from "./elements.js";
import { key } from "./exposition.js";
import * as format from "./format.js";
import { Actions, stateOf } from "./models.js";
import { Plot } from "./plot.js";
import { markOf } from "./rollouts.js";

/** Name of a column, function that returns its value, formatter of the value. */
const NUMBERS = [
  ["Requests/s", (change) => change.requests, format.number],
  ["Errors/s", (change) => change.rate("failures"), format.number],
  ["p50", (change) => change.quantile("whole", 0.5), format.seconds],
  ["p99", (change) => change.quantile("whole", 0.99), format.seconds],
  ["Queue", (change) => change.now.queue ?? null, format.number],
  ["Memory", (change) => change.now.memory || null, format.bytes],
];
const NAMES = ["Model", "Version", "State"];

export class Overview {
  title = "Models";

  constructor(console) {
    this.console = console;
    this.order = { column: 0, down: false };
    this.rows = new Map();
    this.tiles = new Map();
    this.plot = new Plot("Requests per second", ["requests", "errors"], format.number);
    this.filter = element("input", {
      type: "search",
      placeholder: "Filter by name or state",
      "aria-label": "Filter by name or state",
      on: { input: () => this.arrange() },
    });
    this.count = element("span", { className: "muted", role: "status" });
    this.heads = [...NAMES, ...NUMBERS.map(([name]) => name)].map((name, column) => this.head(name, column));
    this.body = element("tbody");
    this.actions = element("th", { scope: "col" }, "Actions");
    this.fixed = element("p", { className: "muted" });
    const head = element("thead", {}, element("tr", {}, ...this.heads, this.actions));
    this.summary = element("dl", { className: "tiles" });
    this.root = element(
      "div",
      {},
      element("h1", {}, "Models"),
      element("div", { className: "summary" }, this.summary, this.plot.root),
      element("p", { className: "bar" }, this.filter, this.count),
      element("div", { className: "wide" }, element("table", { className: "models" }, head, this.body)),
      this.fixed,
    );
  }

  update() {
    const { models, history } = this.console;
    const seen = new Set();
    this.actions.hidden = models.fixed !== "";
    say(this.fixed, models.fixed ?? "");
    for (const version of models.versions) {
      const at = key(version.name, version.version);
      seen.add(at);
      if (!this.rows.has(at)) this.rows.set(at, new Row(version, this.console));
      this.rows.get(at).update(version, history.recent(at), markOf(models.rollouts, version.name, version.version));
    }
    for (const at of this.rows.keys()) if (!seen.has(at)) this.rows.delete(at);
    const sums = history.all();
    this.plot.show(history.times, [sums.requests, sums.failures]);
    this.tile("Ready", `${count(models, "READY")} of ${new Set(models.versions.map((each) => each.name)).size}`);
    const recent = [...this.rows.values()].map((row) => row.values);
    const total = (column) => recent.reduce((sum, values) => sum + (values[column] ?? 0), 0);
    const known = history.times.length > 0;
    this.tile("Requests/s", known ? format.number(total(3)) : "–");
    this.tile("Errors/s", known ? format.number(total(4)) : "–");
    this.tile("Queued", known ? format.number(total(7)) : "–");
    const { cpu, memoryUsed, memoryTotal } = history.machine;
    if (cpu !== undefined) this.tile("CPU", format.share(cpu));
    if (memoryUsed !== undefined) this.tile("Memory in use", format.share(memoryUsed / memoryTotal));
    this.arrange();
  }

  close() {
    this.plot.close();
  }

  head(name, column) {
    const sort = () => {
      const { order } = this;
      // Numbers sort in descending order first, names in ascending order.
      this.order = { column, down: order.column === column ? !order.down : column >= NAMES.length };
      this.arrange();
    };
    const button = element("button", { type: "button", on: { click: sort } }, name);
    return element("th", { scope: "col", className: column < NAMES.length ? "" : "number" }, button);
  }

  tile(name, text) {
    if (!this.tiles.has(name)) {
      const value = element("dd");
      this.tiles.set(name, value);
      this.summary.append(element("div", {}, element("dt", {}, name), value));
    }
    say(this.tiles.get(name), text);
  }

  arrange() {
    const { column, down } = this.order;
    this.heads.forEach((head, at) => {
      head.setAttribute("aria-sort", at !== column ? "none" : down ? "descending" : "ascending");
    });
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...this.rows.values()].filter((row) => words.every((word) => row.text.includes(word)));
    const missing = (value) => value === null || value === undefined;
    rows.sort((one, other) => {
      const [first, second] = [one.values[column], other.values[column]];
      if (missing(first) || missing(second)) return missing(first) - missing(second);
      const order = typeof first === "string" ? first.localeCompare(second) : first - second;
      return down ? -order : order;
    });
    const roots = rows.map((row) => row.root);
    // Move only rows whose position changed, so that a row keeps the keyboard focus.
    roots.forEach((root, at) => {
      if (this.body.children[at] !== root) this.body.insertBefore(root, this.body.children[at] ?? null);
    });
    while (this.body.children.length > roots.length) this.body.lastChild.remove();
    const shown = `${rows.length} of ${this.rows.size}`;
    say(this.count, words.length ? shown : "");
  }
}

const count = (models, state) =>
  new Set(models.versions.filter((each) => each.state === state).map((each) => each.name)).size;

class Row {
  constructor({ name, version }, console) {
    const href = `#/models/${encodeURIComponent(name)}${version && `/${version}`}`;
    this.mark = element("a", { className: "mark", hidden: true });
    this.state = element("span");
    this.reason = element("small");
    this.cells = NUMBERS.map(() => element("td", { className: "number" }));
    this.actions = new Actions(name, console.models, console);
    this.last = element("td", {}, this.actions.root);
    this.root = element(
      "tr",
      {},
      element("th", { scope: "row" }, element("a", { href }, name), this.mark),
      element("td", {}, version),
      element("td", {}, this.state, this.reason),
      ...this.cells,
      this.last,
    );
  }

  update(version, change, mark) {
    const [state, colour] = stateOf(version);
    say(this.state, state);
    this.state.className = `state ${colour}`;
    say(this.reason, colour === "bad" ? version.reason : "");
    this.reason.title = this.reason.textContent;
    const numbers = NUMBERS.map(([, read]) => read(change));
    NUMBERS.forEach(([, , text], at) => say(this.cells[at], text(numbers[at])));
    this.mark.hidden = !mark;
    if (mark) {
      say(this.mark, mark.text);
      Object.assign(this.mark, { href: mark.href, title: mark.title });
    }
    this.values = [version.name, Number(version.version) || null, state, ...numbers];
    this.text = `${version.name} ${state}`.toLowerCase();
    this.actions.update();
    this.last.hidden = this.actions.root.hidden;
  }
}
