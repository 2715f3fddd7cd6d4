// Entry point of the console: polls the server and shows the page that the URL fragment names.

import { Background, wrongWith } from "./background.js";
import { Batches } from "./batches.js";
import { closeDialogs } from "./dialog.js";
import { say } from "./elements.js";
import { parse } from "./exposition.js";
import { History } from "./history.js";
import { Log } from "./log.js";
import { ModelView } from "./model.js";
import { Models } from "./models.js";
import { Overview } from "./overview.js";
import { RolloutView } from "./rollout.js";
import { Rollouts } from "./rollouts.js";
import * as server from "./server.js";
import { Settings } from "./settings.js";
import { hasLanguageModel, Talks } from "./talks.js";
import { Tenants } from "./tenants.js";
import { Usage } from "./usage.js";
import { Workers } from "./workers.js";

const EVERY = 2000;
const LIST_EVERY = 10_000;
/** After a slow poll, wait this many times its duration: metrics of a thousand models are expensive. */
const REST = 10;
const LONGEST = 15_000;
const VIEWS = { background: Background, batches: Batches, chat: Talks, log: Log, models: ModelView, rollout: RolloutView, rollouts: Rollouts, settings: Settings, tenants: Tenants, usage: Usage, workers: Workers };

const pulse = document.getElementById("pulse");
const notice = document.getElementById("notice");
const place = document.getElementById("view");

class Console {
  constructor() {
    this.history = new History();
    this.models = new Models();
    this.view = null;
    this.listed = -Infinity;
    this.changed = () => this.view?.update();
    this.failed = (error) => this.warn("action", error.message);
    this.warnings = new Map();
  }

  /** Show the page that the URL fragment names. */
  open() {
    const [page, ...rest] = location.hash.slice(2).split("/").map(decodeURIComponent);
    this.view?.close();
    closeDialogs();
    this.warn("action", "");
    this.view = new (Object.hasOwn(VIEWS, page) ? VIEWS[page] : Overview)(this, ...rest);
    place.replaceChildren(this.view.root);
    document.title = `${this.view.title} – ${document.getElementById("server").textContent}`;
    for (const link of document.querySelectorAll("header nav a")) {
      const [, part] = link.getAttribute("href").split("/");
      const here = part === (page ?? "") || (part === "rollouts" && page === "rollout") || (part === "" && page === "models");
      if (here) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    this.view.update();
  }

  /** Poll the server for as long as the page is open, but not while it is hidden. */
  async watch() {
    for (;;) {
      const began = performance.now();
      await this.poll(began);
      const took = performance.now() - began;
      const rest = Math.max(EVERY - took, Math.min(REST * took, LONGEST));
      await new Promise((done) => setTimeout(done, rest));
      while (document.hidden) await new Promise((done) => document.addEventListener("visibilitychange", done, { once: true }));
    }
  }

  async poll(began) {
    const list = async () => {
      if (began - this.listed < LIST_EVERY) return;
      await this.models.list();
      this.listed = began;
    };
    const count = async () => {
      const text = await server.metrics();
      document.querySelector('header nav [href="#/batches"]').hidden = !text.includes("\nnerite_batches_open ");
      this.history.note(Date.now() / 1000, parse(text));
      const wrong = wrongWith(this.history.loops);
      document.querySelector('header nav [href="#/background"]').classList.toggle("bad", Boolean(wrong));
      this.warn("background", wrong);
    };
    const results = await Promise.allSettled([list(), count()]);
    const lost = results.find(({ reason }) => reason?.status === 0);
    this.warn("list", lost ? "" : (results[0].reason?.message ?? ""));
    this.warn("count", lost ? "" : (results[1].reason?.message ?? ""));
    pulse.className = lost ? "bad" : "good";
    say(pulse, lost ? "No connection" : "Live");
    this.view.update();
  }

  warn(what, message) {
    if (message) this.warnings.set(what, message);
    else this.warnings.delete(what);
    say(notice, [...new Set(this.warnings.values())].join(" · "));
    notice.hidden = !this.warnings.size;
  }
}

const shown = new Console();
addEventListener("hashchange", () => {
  shown.open();
  place.focus({ preventScroll: true });
  scrollTo(0, 0);
});
shown.open();
shown.watch();
hasLanguageModel().then((has) => {
  document.querySelector('header nav [href="#/chat"]').hidden = !has;
}, () => {});
server.get("v2/quota").then(({ tenants = [], ledger = false }) => {
  document.querySelector('header nav [href="#/tenants"]').hidden = !tenants.length;
  document.querySelector('header nav [href="#/usage"]').hidden = !ledger;
}, () => {});
server.get("v2").then(({ name, version }) => {
  document.getElementById("server").textContent = name;
  document.getElementById("server").title = `Nerite ${version}`;
  document.title = `${shown.view.title} – ${name}`;
}, () => {});
