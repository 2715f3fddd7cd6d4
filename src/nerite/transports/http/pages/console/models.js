// The models of the repositories, and buttons to load and unload them.

import { askInDialog } from "./dialog.js";
import { element } from "./elements.js";
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

/** The reason of versions that the next request loads. */
const ON_DEMAND = "unloaded: on demand";

/** Return the state of a version in words, and the CSS class of its colour. */
export function stateOf({ state, reason }) {
  if (state === "READY") return ["ready", "good"];
  if (state === "" || reason.startsWith("unloaded"))
    return [reason === ON_DEMAND ? "on demand" : state ? "unloaded" : "not loaded", "idle"];
  if (state === "UNAVAILABLE") return ["failed", "bad"];
  return [state.toLowerCase(), "idle"];
}

/** Buttons that load and unload a model, if the server allows it. `changed` is called before and after; `failed` gets errors. */
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
    // Not `disabled`, which would take the focus away from the button.
    this.load.setAttribute("aria-disabled", String(Boolean(doing)));
    this.unload.hidden = !ready || Boolean(doing);
    this.root.hidden = this.models.fixed !== "";
  }

  async confirmUnload() {
    const content = [element("p", {}, "Requests to it are rejected until it is loaded again.")];
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
