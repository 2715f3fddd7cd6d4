// The models of the repositories, and buttons to load and unload them.

import { askInDialog } from "./dialog.js";
import { element, say } from "./elements.js";
import { Menu } from "./menu.js";
import * as server from "./server.js";

/** Every version of every model: name, version (empty if it was never loaded), state, reason, and content hash. */
export class Models {
  constructor() {
    this.versions = [];
    /** The status of the last rollout of each model. */
    this.rollouts = [];
    this.busy = new Map();
    /** Why models cannot be loaded and unloaded here, empty if they can; undefined until it is known. */
    this.fixed = undefined;
  }

  async list() {
    const listed = await server.index();
    this.fixed = await server.controlNote();
    this.versions = listed
      .map(({ name, version = "", state = "", reason = "", hash = "" }) => ({ name, version, state, reason, hash }))
      .sort((one, other) => one.name.localeCompare(other.name) || Number(one.version) - Number(other.version));
    this.rollouts = (await server.get("v2/rollouts")).rollouts;
  }

  of(name) {
    return this.versions.filter((each) => each.name === name);
  }

  /** Return the version that requests without a version go to. */
  latest(name) {
    const all = this.of(name);
    return all.findLast((each) => each.state === "READY") ?? all.at(-1);
  }

  /** Run `work`, which changes a model; `doing` is shown meanwhile. Throws the server's errors. */
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

/** States of versions that the next request loads or wakes, by their reasons. */
const LOADABLE = { "unloaded: on demand": "on demand", "unloaded: asleep": "asleep" };

/** Return the state of a version in words, and the CSS class of its colour. */
export function stateOf({ state, reason }) {
  if (state === "READY") return ["ready", "good"];
  if (state === "" || reason.startsWith("unloaded"))
    return [LOADABLE[reason] ?? (state ? "unloaded" : "not loaded"), "idle"];
  if (state === "UNAVAILABLE") return ["failed", "bad"];
  return [state.toLowerCase(), "idle"];
}

/** Menu that loads and unloads a model, if the server allows it. `changed` is called before and after; `failed` gets errors. */
export class Actions {
  constructor(name, models, { changed, failed }) {
    this.name = name;
    this.models = models;
    this.report = { changed, failed };
    const button = (text, listener) =>
      element("button", { type: "button", "aria-label": `${text} ${name}`, on: { click: listener } }, text);
    this.load = button("Load", () => (this.ready ? this.confirmReload() : this.loadNow()));
    this.unload = button("Unload", () => this.confirmUnload());
    const log = element("a", { href: `#/log/${encodeURIComponent(name)}`, "aria-label": `Log of ${name}` }, "Log");
    this.menu = new Menu(`Actions for ${name}`, this.load, this.unload, log);
    this.doing = element("small", { role: "status" });
    this.root = element("span", { className: "buttons" }, this.doing, this.menu.root);
    this.update();
  }

  update() {
    const doing = this.models.busy.get(this.name);
    this.ready = this.models.of(this.name).some((each) => each.state === "READY");
    say(this.doing, doing ?? "");
    const name = this.ready ? "Reload" : "Load";
    if (this.load.textContent !== name) {
      this.load.textContent = name;
      this.load.setAttribute("aria-label", `${name} ${this.name}`);
    }
    const fixed = this.models.fixed !== "";
    this.load.hidden = fixed || Boolean(doing);
    this.unload.hidden = fixed || !this.ready || Boolean(doing);
  }

  loadNow() {
    return this.run("Loading…", () => server.load(this.name));
  }

  async confirmReload() {
    const content = [element("p", {}, "The loaded versions answer requests until the new ones are ready.")];
    await this.confirm(`Reload ${this.name}?`, content, "Reload", () => this.loadNow());
  }

  async confirmUnload() {
    const content = [element("p", {}, "Requests to it are rejected until it is loaded again.")];
    await this.confirm(`Unload ${this.name}?`, content, "Unload", () => this.run("Unloading…", () => server.unload(this.name)));
  }

  async confirm(title, content, yes, work) {
    const chosen = await askInDialog(title, content, yes);
    if (chosen !== null) this.menu.button.focus();
    if (chosen) await work();
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
