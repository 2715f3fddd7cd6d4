// The recent log of the server: lines that arrive are added below, and can be chosen by model and level.

import { element, say } from "./elements.js";
import * as server from "./server.js";

const LEVELS = [["verbose", "All"], ["info", "Information and worse"], ["warning", "Warnings and errors"], ["error", "Errors"]];
const MOST = 500;
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3 });
const day = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium" });

/** The last lines about a model, or of all. */
export class LogLines {
  constructor({ model = "", level = "verbose", most = MOST } = {}) {
    this.most = most;
    this.list = element("ol", { className: "log", tabIndex: 0, "aria-label": "Log" });
    this.note = element("p", { className: "muted" }, "…");
    this.root = element("div", {}, this.list, this.note);
    this.choose(model, level);
  }

  /** Show other lines from now on. */
  choose(model, level) {
    this.model = model;
    this.level = level;
    this.last = 0;
    this.refused = false;
    this.list.replaceChildren();
  }

  /** Ask for lines that are not shown yet. */
  async update() {
    if (this.asking || this.refused) return;
    this.asking = true;
    const { model, level, last } = this;
    try {
      const answer = await server.get(`ui/log?level=${level}&after=${last}${model && `&model=${encodeURIComponent(model)}`}`);
      if (model === this.model && level === this.level) this.show(answer);
    } catch (error) {
      if (error.status) say(this.note, error.message);
      this.refused = error.status >= 400 && error.status < 500;
    }
    this.asking = false;
    if (model !== this.model || level !== this.level) await this.update();
  }

  show({ last, records }) {
    // The server counts from one again after a restart.
    if (last < this.last) this.list.replaceChildren();
    const restarted = last < this.last;
    this.last = restarted ? 0 : last;
    const { list } = this;
    const follows = list.scrollTop + list.clientHeight >= list.scrollHeight - 8;
    list.append(...records.map(line));
    while (list.children.length > this.most) list.firstChild.remove();
    list.hidden = !list.children.length;
    say(this.note, list.children.length ? "" : "There are no such lines.");
    if (records.length && follows) list.scrollTop = list.scrollHeight;
  }
}

function line({ time, level, message, source, instance, request_id: request }) {
  const moment = element("time", { dateTime: new Date(1000 * time).toISOString(), title: day.format(1000 * time) }, clock.format(1000 * time));
  const from = [instance, request && `request ${request}`, source].filter(Boolean).join(" · ");
  return element("li", { className: level }, moment, element("b", {}, level), element("pre", {}, message), element("small", {}, from));
}

/** Page of the log. */
export class Log {
  title = "Log";

  constructor(console, model = "", level = "verbose") {
    this.console = console;
    this.lines = new LogLines({ model, level });
    const changed = () => this.choose(this.model.value, this.level.value);
    this.model = element("select", { name: "model", on: { change: changed } });
    const options = LEVELS.map(([value, text]) => element("option", { value, selected: value === level }, text));
    this.level = element("select", { name: "level", on: { change: changed } }, ...options);
    const field = (name, control) => element("label", { className: "field" }, name, control);
    const bar = element("div", { className: "bar" }, field("Model", this.model), field("Level", this.level));
    const note = "The last lines in the memory of the server: a thousand errors and warnings, and as many others. The log itself is where the server writes it.";
    this.root = element("div", {}, element("h1", {}, "Log"), bar, this.lines.root, element("p", { className: "muted" }, note));
    this.fill(model);
  }

  update() {
    this.fill(this.model.value);
    this.lines.update();
  }

  close() {}

  /** Offer all models, and the chosen one even if it is not known. */
  fill(chosen) {
    const names = [...new Set([...this.console.models.versions.map(({ name }) => name), ...(chosen ? [chosen] : [])])].sort();
    if (this.filled === names.join("\n") && this.model.options.length) return;
    this.filled = names.join("\n");
    const options = names.map((name) => element("option", { value: name, selected: name === chosen }, name));
    this.model.replaceChildren(element("option", { value: "", selected: !chosen }, "All"), ...options);
  }

  choose(model, level) {
    history.replaceState(null, "", `#/log${model || level !== "verbose" ? `/${encodeURIComponent(model)}/${level}` : ""}`);
    this.lines.choose(model, level);
    this.lines.update();
  }
}
