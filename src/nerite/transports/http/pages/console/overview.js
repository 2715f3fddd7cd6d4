// Overview page: a sortable and filterable table of all models, and the load of the whole server.

import { element, say, shape } from "./elements.js";
import { MEMORY_SOURCES, key } from "./exposition.js";
import { explain, Failures } from "./failures.js";
import * as format from "./format.js";
import { Actions, stateOf } from "./models.js";
import { Plot } from "./plot.js";
import { markOf } from "./rollouts.js";
import { range, rangePicker, Samples } from "./samples.js";
import { Sparkline } from "./sparkline.js";

/** Name of a column, function that returns its value, formatter of the value. */
const NUMBERS = [
  ["Requests/s", (change) => change.requests, format.number],
  ["Errors/s", (change) => change.rate("failures"), format.number],
  ["p50", (change) => change.quantile("whole", 0.5), format.seconds],
  ["p99", (change) => change.quantile("whole", 0.99), format.seconds],
  ["Queue", (change) => change.now.queue ?? null, format.number],
  ["Memory", (change) => change.now.memory || null, format.bytes],
];
const [RATE, ERRORS, QUEUE, MEMORY] = [0, 1, 4, 5];
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
    const actions = element("th", { scope: "col" }, element("span", { className: "unseen" }, "Actions"));
    this.fixed = element("p", { className: "muted" });
    this.none = element("p", { className: "muted", hidden: true }, "There are no models. Add one with: ", element("code", {}, "nerite add FILE"));
    const head = element("thead", {}, element("tr", {}, ...this.heads, actions));
    this.table = element("div", { className: "wide" }, element("table", { className: "models cards" }, head, this.body));
    this.summary = element("dl", { className: "tiles" });
    this.samples = new Samples(() => this.draw());
    this.failures = new Failures();
    this.root = element(
      "div",
      {},
      element("div", { className: "head" }, element("h1", {}, "Models"), rangePicker(() => this.update())),
      this.failures.root,
      element("div", { className: "summary" }, this.summary, this.plot.root),
      element("p", { className: "bar" }, this.filter, this.count),
      this.table,
      this.none,
      this.fixed,
    );
  }

  update() {
    const { models, history } = this.console;
    const seen = new Set();
    say(this.fixed, models.fixed ?? "");
    this.failures.show(models.versions);
    this.samples.update();
    for (const version of models.versions) {
      const at = key(version.name, version.version);
      seen.add(at);
      if (!this.rows.has(at)) this.rows.set(at, new Row(version, this.console));
      const mark = markOf(models.rollouts, version.name, version.version);
      this.rows.get(at).update(version, history.recent(at), mark);
    }
    for (const at of this.rows.keys()) if (!seen.has(at)) this.rows.delete(at);
    this.tile("Ready", `${count(models, "READY")} of ${new Set(models.versions.map((each) => each.name)).size}`);
    const recent = [...this.rows.values()].map((row) => row.values);
    const total = (column) => recent.reduce((sum, values) => sum + (values[NAMES.length + column] ?? 0), 0);
    const known = history.readings.length > 1;
    // Until there are two readings of the counts, what the last sample says.
    const now = (column, line) => (known ? total(column) : (this.samples.line(line).at(-1) ?? null));
    this.tile("Requests/s", format.number(now(RATE, "requests")));
    this.tile("Errors/s", format.number(now(ERRORS, "failures")), now(ERRORS, "failures") > 0);
    this.tile("Queued", format.number(now(QUEUE, "queue")));
    const { cpu, memoryUsed, memoryTotal } = history.machine;
    if (cpu !== undefined) this.tile("CPU", format.share(cpu));
    if (memoryUsed !== undefined) this.tile("Memory", format.share(memoryUsed / memoryTotal));
    this.draw();
    this.arrange();
  }

  /** Draw what has happened in the chosen time. */
  draw() {
    if (this.closed) return;
    const { times, versions } = this.samples.data;
    this.plot.show(times, [this.samples.line("requests"), this.samples.line("failures")], range());
    const rates = new Map(versions.map(({ model, version, requests }) => [key(model, version), requests]));
    const sum = (values) => values.reduce((total, value) => total + value, 0);
    const whole = sum([...rates.values()].map(sum));
    for (const [at, row] of this.rows) row.draw(rates.get(at) ?? [], whole ? sum(rates.get(at) ?? []) / whole : 0);
  }

  close() {
    this.closed = true;
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

  tile(name, text, bad = false) {
    if (!this.tiles.has(name)) {
      const value = element("dd");
      this.tiles.set(name, value);
      this.summary.append(element("div", {}, element("dt", {}, name), value));
    }
    say(this.tiles.get(name), text);
    this.tiles.get(name).classList.toggle("bad", bad);
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
      if (one.failed !== other.failed) return other.failed - one.failed;
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
    this.table.hidden = !rows.length;
    this.none.hidden = this.rows.size > 0 || this.console.models.fixed === undefined;
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
    this.reason = element("a", { className: "why", href });
    this.spark = new Sparkline();
    this.share = shape("rect", { height: 3, width: 0, rx: 1 });
    this.load = shape("svg", { class: "load", viewBox: "0 0 100 3", preserveAspectRatio: "none", "aria-hidden": "true" }, this.share);
    this.texts = NUMBERS.map(() => element("span"));
    this.cells = NUMBERS.map(([head], at) => element("td", { className: "number", "data-head": head }, this.texts[at]));
    this.cells[RATE].prepend(this.spark.root);
    this.cells[RATE].append(this.load);
    this.actions = new Actions(name, console.models, console);
    this.root = element(
      "tr",
      {},
      element("th", { scope: "row" }, element("a", { href }, name), this.mark),
      element("td", { className: "version", "data-head": "Version" }, version),
      element("td", { className: "status" }, this.state, this.reason),
      ...this.cells,
      element("td", { className: "acts" }, this.actions.root),
    );
  }

  update(version, change, mark) {
    const [state, colour] = stateOf(version);
    say(this.state, state);
    this.state.className = `state ${colour}`;
    this.failed = colour === "bad";
    say(this.reason, this.failed ? explain(version.reason).what : "");
    this.reason.title = this.failed ? version.reason : "";
    const numbers = NUMBERS.map(([, read]) => read(change));
    NUMBERS.forEach(([, , text], at) => say(this.texts[at], text(numbers[at])));
    const { memory, memorySource } = change.now;
    this.cells[MEMORY].title = memory ? `Memory, ${MEMORY_SOURCES[memorySource]}` : "";
    if (memorySource === "files") say(this.texts[MEMORY], `≈ ${format.bytes(memory)}`);
    this.cells[ERRORS].classList.toggle("bad", numbers[ERRORS] > 0);
    this.mark.hidden = !mark;
    if (mark) {
      say(this.mark, mark.text);
      Object.assign(this.mark, { href: mark.href, title: mark.title });
    }
    this.values = [version.name, Number(version.version) || null, state, ...numbers];
    this.text = `${version.name} ${state}`.toLowerCase();
    this.actions.update();
  }

  /** Draw the rate of requests in the chosen time, and their share of those to all models. */
  draw(rates, share) {
    this.spark.show(rates);
    if (this.values[NAMES.length + RATE] === null && rates.length) say(this.texts[RATE], format.number(rates.at(-1)));
    this.share.setAttribute("width", 100 * share);
    const idle = !share && !this.failed && !this.values[NAMES.length + RATE];
    this.root.classList.toggle("idle", idle);
    this.root.classList.toggle("failed", this.failed);
    this.cells[RATE].title = share ? `${format.share(share)} of all requests in the chosen time` : "";
  }
}
