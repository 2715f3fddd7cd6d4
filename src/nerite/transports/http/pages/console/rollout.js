// Page of one rollout: its steps, both versions side by side, the evidence of each gate, and buttons to steer it.

import { Decisions } from "./decisions.js";
import { element, say } from "./elements.js";
import * as format from "./format.js";
import { decisionOf, Gates } from "./gates.js";
import { Polled } from "./polled.js";
import { CATEGORY, isServing, stateOf } from "./rollouts.js";
import * as server from "./server.js";
import { Shadows } from "./shadows.js";
import { Steering } from "./steering.js";
import { Table } from "./table.js";

const ARMS = [[""], ["Baseline", "number"], ["Candidate", "number"], ["Change", "number"]];
const DIFFERENCES = [["Difference"], ["Severity", "status"], ["Baseline", "words"], ["Candidate", "words"], ["Consequence", "words"]];
const SEVERITIES = { blocks: "bad", warns: "idle", notes: "idle" };
/** Measure of an arm, what it is read from, and its format; those without values are left out. */
const MEASURES = [
  ["p50", "p50_ms"], ["p99", "p99_ms"], ["First response, p95", "first_p95_ms"], ["Between tokens, p95", "token_p95_ms"],
];

export class RolloutView extends Polled {
  /** Without `id`, the model's last rollout; else an earlier one, of which only decisions are known. */
  constructor(console, model, id = "") {
    const place = `${server.place(model)}/rollout`;
    super(console, id ? `${place}/history` : place, CATEGORY);
    this.model = model;
    this.id = id;
    this.title = `Rollout of ${model}`;
    this.state = element("span");
    this.versions = element("span", { className: "muted" });
    this.text = element("p", { className: "decision" });
    this.problem = element("p", { className: "reason" });
    this.steps = element("ol", { className: "path", "aria-label": "Steps" });
    this.waits = element("p", { className: "muted" });
    this.arms = new Table(ARMS);
    this.words = element("div", { className: "judge" });
    this.gates = new Gates();
    this.judged = part("Gates", this.gates.root);
    this.differences = new Table(DIFFERENCES);
    this.found = part("Differences between the versions", this.differences.root);
    this.shadows = new Shadows(console, model);
    this.decisions = new Decisions();
    const failed = (error) => this.console.failed(error);
    const changed = (command, status) => this.steered(command, status);
    this.steering = new Steering({ changed, failed });
    const heading = element("h1", {}, element("a", { href: `#/models/${encodeURIComponent(model)}` }, model));
    this.content = element(
      "div",
      { hidden: true },
      this.text,
      this.problem,
      this.steps,
      this.waits,
      element("div", { className: "halves" }, part("Both versions", this.arms.root), part("Judge", this.words)),
      this.judged,
      this.found,
      this.shadows.root,
    );
    const head = element("div", { className: "head" }, heading, this.state, this.versions, ...(id ? [] : [this.steering.root]));
    this.steering.root.hidden = true;
    this.root = element("div", { className: "rollout" }, head, this.locked, this.content, this.decisions.root);
    this.decisions.root.hidden = true;
  }

  async update() {
    this.shadows.update();
    if (!(this.id && this.data)) await super.update();
  }

  show() {
    if (this.id) {
      this.showPast(this.data.history.filter((entry) => entry.id === this.id));
      return;
    }
    this.showStatus(this.data);
    this.steering.root.hidden = false;
    this.steering.update(this.data);
    const made = JSON.stringify(["id", "state", "step", "text"].map((name) => this.data[name]));
    if (made === this.made) return;
    this.made = made;
    server.get(`${server.place(this.model)}/rollout/history`).then(
      ({ history }) => !this.closed && this.decisions.show(history),
      () => (this.made = ""),
    );
  }

  /** Show a rollout by its decisions: the last one has the evidence of the whole. */
  showPast(history) {
    const last = history.at(-1);
    if (last) this.showStatus({ steps: [], differences: [], ...last, ...last.evidence });
    else this.console.warn("page", `The history of ${this.model} has no rollout ${this.id}.`);
    this.decisions.show(history);
  }

  showStatus(status) {
    this.content.hidden = false;
    const [state, colour] = stateOf(status);
    say(this.state, state);
    this.state.className = `state ${colour}`;
    say(this.versions, `version ${status.from} → ${status.to}`);
    say(this.text, status.text || "The candidate is being loaded and compared with the baseline.");
    say(this.problem, status.problem ?? "");
    this.showSteps(status);
    this.arms.show(armRows(status.arms));
    this.showWords(status);
    this.gates.show(status.gates, status.curve);
    this.judged.hidden = !status.gates.length;
    this.showDifferences(status.differences);
  }

  showSteps(status) {
    const { steps, step, state } = status;
    const now = isServing(status) ? step : state === "promoted" ? steps.length - 1 : -1;
    const shown = JSON.stringify([steps, now, step, state]);
    this.steps.hidden = !steps.length;
    if (this.steps.dataset.shown !== shown) {
      this.steps.dataset.shown = shown;
      const item = (weight, at) => {
        const stopped = at === step && now < 0 && status.elapsed > 0;
        const className = at === now ? "now" : at < (now < 0 ? step : now) ? "done" : stopped ? "stopped" : "";
        return element("li", { className, ...(at === now && { "aria-current": "step" }) }, `${format.number(weight)} %`);
      };
      this.steps.replaceChildren(...steps.map(item));
    }
    say(this.waits, steps.length ? waiting(status) : "");
  }

  showWords({ judge, holds, warnings }) {
    const shown = JSON.stringify([judge, holds, warnings]);
    if (this.words.dataset.shown === shown) return;
    this.words.dataset.shown = shown;
    const list = (title, texts) =>
      texts.length ? [element("h3", {}, title), element("ul", {}, ...texts.map((text) => element("li", {}, text)))] : [];
    const [decision, colour] = judge.decision ? decisionOf(judge.decision) : ["nothing is known", "idle"];
    this.words.replaceChildren(
      element("span", { className: `state ${colour}` }, decision),
      element("p", {}, judge.reason || "The judge has seen no requests yet."),
      ...list("What holds the promotion back", holds),
      ...list("Warnings", warnings),
    );
  }

  showDifferences(differences) {
    this.found.hidden = !differences.length;
    this.differences.show(
      differences.map(({ severity, subject, baseline, candidate, consequence }) => ({
        colour: SEVERITIES[severity] ?? "idle",
        texts: [subject, severity, baseline, candidate, consequence],
      })),
    );
  }

  /** A command was carried out: show what has become of the rollout. */
  async steered(command, status) {
    this.console.warn("action", "");
    if (command === "clear") {
      location.hash = "#/rollouts";
      return;
    }
    this.data = { curve: this.data?.curve, ...status };
    this.show();
    this.console.models.list().catch(() => {});
  }

  close() {
    super.close();
    this.gates.close();
  }
}

const part = (title, content) => element("section", { className: "bare" }, element("h2", {}, title), content);

/** Return times, and what the present step waits for, in words. */
function waiting({ state, spec, elapsed, step, steps, in_step: inStep, step_requests: requests }) {
  const took = `Under way ${format.span(elapsed)}${spec.deadline === "0s" ? "" : ` of ${format.configured(spec.deadline)}`}`;
  if (state !== "running") return took;
  const held = `step ${step + 1} of ${steps.length}: ${format.span(inStep)} of ${format.configured(spec.hold)}`;
  const counted = `${format.number(requests)} of ${format.number(spec.requests)} requests`;
  const proof = step === steps.length - 2 ? ", then the proof that the candidate is not worse" : "";
  return `${took} · ${held}, ${counted}${proof}`;
}

function armRows({ baseline, candidate }) {
  const count = (name) => ({ requests, [name]: value }) => (requests ? `${format.number(value)} (${format.rate(value / requests)})` : "–");
  const row = (name, text, change = "") => ({ texts: [name, text(baseline), text(candidate), change] });
  const rows = [
    row("Version", ({ version }) => version),
    row("Weight", ({ weight }) => `${format.number(weight)} %`),
    row("Requests", ({ requests }) => format.number(requests)),
    ...["errors", "refused", "cancelled"].map((name) => row(name[0].toUpperCase() + name.slice(1), count(name))),
  ];
  for (const [name, key] of MEASURES) {
    const [before, after] = [baseline[key] ?? null, candidate[key] ?? null];
    if (before === null && after === null) continue;
    rows.push(row(name, (arm) => format.milliseconds(arm[key] ?? null), before && after ? format.change(after / before - 1) : ""));
  }
  return rows;
}
