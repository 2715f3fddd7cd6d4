// Page of one model version: live plots, time by stage, configuration, and forms to try it.

import { Chat, writes } from "./chat.js";
import { element, say } from "./elements.js";
import { MEMORY_SOURCES, key } from "./exposition.js";
import { Failure } from "./failures.js";
import * as format from "./format.js";
import { Graph } from "./graph.js";
import { Actions, stateOf } from "./models.js";
import { Plot } from "./plot.js";
import { range, rangePicker, Samples } from "./samples.js";
import * as server from "./server.js";
import { Form } from "./settings.js";
import { Stages } from "./stages.js";
import { TryIt } from "./tryit.js";

/** Title, names of the lines in the legend, their names in the samples, formatter of the values. */
const PLOTS = [
  ["Throughput", ["requests/s", "errors/s", "rows/s"], ["requests", "failures", "rows"], format.number],
  ["Latency", ["p50", "p90", "p99"], ["p50", "p90", "p99"], format.seconds],
  ["Queue", ["waiting"], ["queue"], format.number],
  ["Batch size", ["rows, mean"], ["batch"], format.number],
];
const TOKEN_PLOTS = [
  ["Tokens per second", ["generated", "prompt"], ["generated_tokens", "prompt_tokens"], format.number],
  ["Time to first token", ["p50", "p99"], ["first_token_p50", "first_token_p99"], format.seconds],
  ["Time between tokens", ["p50", "p99"], ["between_p50", "between_p99"], format.seconds],
  ["In the engine", ["running", "waiting"], ["running", "waiting"], format.number],
  ["KV cache", ["in use"], ["kv_usage"], format.share],
];

export class ModelView {
  constructor(console, name, version) {
    this.console = console;
    this.name = name;
    this.wanted = version;
    this.title = name;
    this.version = null;
    this.plots = [];
    this.state = element("span");
    this.reason = element("p", { className: "reason" });
    this.samples = new Samples(() => this.draw());
    this.others = element("nav", { "aria-label": "Versions", className: "versions" });
    this.actions = new Actions(name, console.models, console);
    this.failure = new Failure(name, () => this.actions.loadNow());
    this.grid = element("div", { className: "plots" });
    this.stages = new Stages();
    this.facts = element("dl", { className: "facts" });
    this.steps = element("div", { className: "steps" });
    this.range = rangePicker(() => this.update());
    this.parts = element("div");
    this.root = element(
      "div",
      {},
      element("div", { className: "head" }, element("h1", {}, name), this.state, this.others, this.range, this.actions.root),
      this.reason,
      this.failure.root,
      this.facts,
      this.steps,
      this.grid,
      this.stages.root,
      this.parts,
    );
  }

  update() {
    const { models, history } = this.console;
    const version = models.of(this.name).find((each) => each.version === this.wanted) ?? models.latest(this.name);
    this.actions.update();
    if (!version) {
      const known = models.versions.length > 0;
      say(this.reason, known ? "There is no model of this name. It may have been removed from its repository, or have another name now." : "");
      this.range.hidden = this.actions.root.hidden = known;
      return;
    }
    this.actions.root.hidden = false;
    const [state, colour] = stateOf(version);
    say(this.state, state);
    this.state.className = `state ${colour}`;
    say(this.reason, "");
    this.failure.show(colour === "bad" ? version.reason || "The server gives no reason." : "", models.fixed);
    this.showVersions(models.of(this.name), version.version);
    const at = key(this.name, version.version);
    this.at = at;
    this.grid.hidden = this.range.hidden = colour === "bad"; // A version that failed has nothing to draw.
    this.samples.update(this.name, version.version);
    this.draw();
    this.stages.update(history.recent(at), history.ever(at));
    this.graph?.update();
    const made = [version.version, version.state, version.hash].join(" ");
    if (made !== this.made) {
      this.made = made;
      this.ready = version.state === "READY";
      this.version = version.version;
      this.describe();
    }
    this.showFacts(history.recent(at).now);
  }

  close() {
    this.closed = true;
    for (const { plot } of this.plots) plot.close();
    this.chat?.close();
  }

  /** Draw what has happened in the chosen time. */
  draw() {
    if (this.closed) return;
    const generates = "generatedTokens" in this.console.history.recent(this.at).now;
    const wanted = generates ? [...PLOTS, ...TOKEN_PLOTS] : PLOTS;
    for (const [title, labels, lines, text] of wanted.slice(this.plots.length)) {
      const plot = new Plot(title, labels, text);
      this.plots.push({ plot, lines });
      this.grid.append(plot.root);
    }
    for (const { plot, lines } of this.plots) {
      plot.show(this.samples.data.times, lines.map((name) => this.samples.line(name)), range());
    }
  }

  showVersions(all, current) {
    if (all.length < 2 || this.others.dataset.shown === `${all.length} ${current}`) return;
    this.others.dataset.shown = `${all.length} ${current}`;
    const link = ({ version }) => {
      const href = `#/models/${encodeURIComponent(this.name)}/${version}`;
      return element("a", { href, ...(version === current && { "aria-current": "page" }) }, `version ${version}`);
    };
    this.others.replaceChildren(...all.map(link));
  }

  /** Fetch the configuration and metadata of the version, which may change when it is reloaded. */
  async describe() {
    this.chat?.close();
    this.config = this.graph = this.chat = null;
    this.parts.replaceChildren();
    this.steps.replaceChildren();
    if (!this.ready) return;
    const place = server.place(this.name, this.version);
    try {
      this.config = await server.get(`${place}/config`);
      const metadata = await server.get(place);
      const samples = await server.get(`ui/samples?model=${encodeURIComponent(this.name)}&version=${encodeURIComponent(this.version)}`);
      const source = element("pre", {}, JSON.stringify(this.config, null, 2));
      const details = element("details", {}, element("summary", {}, "Configuration"), source);
      // The chat API has no version: requests go to the latest one.
      const newest = this.console.models.latest(this.name)?.version === this.version;
      if (newest && writes(metadata)) this.chat = new Chat(this.name);
      const parts = [...(this.chat ? [this.chat.root] : []), new TryIt(metadata, this.config, samples, this.version).root];
      this.parts.replaceChildren(...parts, details, this.traces());
      if (this.config.ensemble_scheduling) {
        this.graph = new Graph(this.config, this.console);
        this.steps.replaceChildren(this.graph.root);
      }
    } catch (error) {
      this.parts.replaceChildren(element("p", { className: "muted" }, `The configuration could not be read: ${error.message}`));
    }
    this.update();
  }

  /** Return the trace settings of this model, which override those of the server. Fetched when they are opened. */
  traces() {
    const form = new Form("Traces of this model", `v2/models/${this.name}/trace/setting`);
    const toggled = (event) => event.target.open && form.read();
    return element("details", { on: { toggle: toggled } }, element("summary", {}, "Traces"), form.root);
  }

  showFacts(now) {
    const facts = [];
    if (this.config) {
      const { backend, platform, max_batch_size: most, instance_group: groups = [] } = this.config;
      facts.push(["Backend", backend || platform]);
      facts.push(["Batches", most ? `up to ${most}` : "none"]);
      const instances = groups.reduce((sum, group) => sum + (group.count ?? 1) * (group.gpus?.length || 1), 0);
      const kinds = [...new Set(groups.map((group) => group.kind?.replace("KIND_", "")))].join(", ");
      if (groups.length) facts.push(["Instances", `${instances} (${kinds})`]);
    }
    if (now.memory) facts.push(["Memory", format.bytes(now.memory), MEMORY_SOURCES[now.memorySource]]);
    if (now.memorySource === "workers") facts.push(["Worker restarts", format.number(now.restarts)]);
    const failed = Object.entries(now.reasons ?? {}).map(([reason, count]) => `${format.number(count)} ${reason.replaceAll("_", " ")}`);
    if (failed.length) facts.push(["Failed requests", failed.join(", ")]);
    if (now.loadSeconds) facts.push(["Load time", format.seconds(now.loadSeconds)]);
    const text = JSON.stringify(facts);
    if (this.facts.dataset.shown === text) return;
    this.facts.dataset.shown = text;
    const pairs = facts.map(([name, value, note = ""]) => element("div", {}, element("dt", {}, name), element("dd", {}, value), ...(note ? [element("dd", {}, element("small", {}, note))] : [])));
    this.facts.replaceChildren(...pairs);
  }
}
