// Page of all instances of all models: process, state and resources. Instances that are down come first.

import { element, say } from "./elements.js";
import * as format from "./format.js";
import { Polled } from "./polled.js";
import { Table } from "./table.js";

const COLUMNS = [
  ["Instance"], ["Version", "version"], ["State", "status"], ["Process", "number"], ["Memory", "number"], ["Restarts", "number"],
  ["Uptime", "number"],
];

export class Workers extends Polled {
  title = "Workers";

  constructor(console) {
    super(console, "ui/instances");
    this.filter = element("input", {
      type: "search",
      placeholder: "Filter by name or state",
      "aria-label": "Filter by name or state",
      on: { input: () => this.data && this.show() },
    });
    this.count = element("span", { className: "muted", role: "status" });
    this.table = new Table(COLUMNS, "No instance has this name or state, or no model is loaded.");
    const bar = element("p", { className: "bar" }, this.filter, this.count);
    this.root = element("div", {}, element("h1", {}, "Workers"), bar, this.table.root);
  }

  show() {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = this.data.map(row);
    const shown = all.filter(({ text }) => words.every((word) => text.includes(word)));
    shown.sort((one, other) => one.usable - other.usable || other.restarts - one.restarts || one.text.localeCompare(other.text));
    this.table.show(shown);
    const down = all.filter(({ usable }) => !usable).length;
    const parts = [`${words.length ? `${shown.length} of ` : ""}${all.length} instances`, ...(down ? [`${down} down`] : [])];
    say(this.count, parts.join(", "));
  }
}

function row({ model, version, instance, usable, busy, reason, pid, since, memory, restarts }) {
  const state = usable ? (busy ? "busy" : "idle") : reason ? "failed" : "starting";
  const process = pid === null ? (usable ? "server" : "–") : String(pid);
  const age = since === null ? "–" : format.span(Date.now() / 1000 - since);
  return {
    usable,
    restarts,
    text: `${model} ${instance} ${state}`.toLowerCase(),
    href: `#/models/${encodeURIComponent(model)}/${version}`,
    colour: usable ? "good" : "bad",
    why: reason,
    texts: [instance, version, state, process, pid === null ? "–" : format.bytes(memory), String(restarts), age],
  };
}
