// The models of the repositories, and what can be done to them.

import { askInDialog } from "./dialog.js";
import { element } from "./elements.js";
import * as server from "./server.js";

/** Every version of every model: name, version (empty if none was ever loaded), state, reason, and what it was made of. */
export class Models {
  constructor() {
    this.versions = [];
    this.busy = new Map();
    /** Why models cannot be loaded and unloaded here; undefined until it is known. */
    this.fixed = undefined;
  }

  async list() {
    const told = await server.index();
    this.fixed = await server.controlNote();
    this.versions = told
      .map(({ name, version = "", state = "", reason = "", hash = "" }) => ({ name, version, state, reason, hash }))
      .sort((one, other) => one.name.localeCompare(other.name) || Number(one.version) - Number(other.version));
  }

  of(name) {
    return this.versions.filter((each) => each.name === name);
  }

  /** Return the version that answers who names none. */
  latest(name) {
    const all = this.of(name);
    return all.findLast((each) => each.state === "READY") ?? all.at(-1);
  }

  /** Run what changes a model; `doing` is what is said meanwhile. Raises what the server refuses. */
  async change(name, doing, work) {
    this.busy.set(name, doing);
    try {
      await work();
    } finally {
      this.busy.delete(name);
      await this.list().catch(() => {});
    }
  }
}

/** Return the state of a version in words, and a class for its colour. */
export function stateOf({ state, reason }) {
  if (state === "READY") return ["ready", "good"];
  if (state === "" || reason === "unloaded") return [state ? "unloaded" : "not loaded", "idle"];
  if (state === "UNAVAILABLE") return ["failed", "bad"];
  return [state.toLowerCase(), "idle"];
}

/** Buttons that load and unload a model, where the server does that. `changed` is told before and after; `failed` gets what went wrong. */
export class Actions {
  constructor(name, models, { changed, failed }) {
    this.name = name;
    this.models = models;
    this.report = { changed, failed };
    const button = (text, listener) =>
      element("button", { type: "button", "aria-label": `${text} ${name}`, on: { click: listener } }, text);
    this.load = button("Load", () => this.run("Loading…", () => server.load(name)));
    this.unload = button("Unload", () => this.confirmUnload());
    this.root = element("span", { className: "buttons" }, this.load, this.unload);
    this.update();
  }

  update() {
    const doing = this.models.busy.get(this.name);
    const ready = this.models.of(this.name).some((each) => each.state === "READY");
    const name = ready ? "Reload" : "Load";
    if (this.load.textContent !== (doing ?? name)) {
      this.load.textContent = doing ?? name;
      this.load.setAttribute("aria-label", `${doing ?? name} ${this.name}`);
    }
    // Not `disabled`, which would take the focus away from whoever pressed it.
    this.load.setAttribute("aria-disabled", String(Boolean(doing)));
    this.unload.hidden = !ready || Boolean(doing);
    this.root.hidden = this.models.fixed !== "";
  }

  async confirmUnload() {
    const content = [element("p", {}, "Requests to it are refused until it is loaded again.")];
    if (await askInDialog(`Unload ${this.name}?`, content, "Unload")) {
      this.load.focus();
      await this.run("Unloading…", () => server.unload(this.name));
    }
  }

  async run(doing, work) {
    if (this.models.busy.has(this.name)) return;
    try {
      const done = this.models.change(this.name, doing, work);
      this.report.changed();
      await done;
    } catch (error) {
      this.report.failed(error);
    }
    this.report.changed();
  }
}
