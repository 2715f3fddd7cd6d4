// Page of the rollouts of all models: those under way, the last one of each model, and how earlier ones have ended.

import { moment, stateWords } from "./decisions.js";
import { element } from "./elements.js";
import { progress } from "./evidence.js";
import * as format from "./format.js";
import { Polled } from "./polled.js";
import { Shadows } from "./shadows.js";
import { Table } from "./table.js";

const COLUMNS = [
  ["Model"], ["State", "status"], ["Versions"], ["Weight", "number"], ["Step", "number"], ["Harm", "number"], ["Proof", "number"],
  ["Started"], ["Last decision", "words"],
];
const PAST = [["Model"], ["State", "status"], ["Versions"], ["Ended"], ["Decision", "words"]];
const COLOURS = { running: "good", promoted: "good", rolled_back: "bad", inconclusive: "bad" };

/** Category of the endpoints of rollouts, whose key may be required. */
export const CATEGORY = "model-repository";

/** Return the state of a rollout in words, and the CSS class of its colour. */
export const stateOf = ({ state }) => [stateWords(state), COLOURS[state] ?? "idle"];

/** Return whether the candidate gets requests. */
export const isServing = ({ state }) => ["running", "paused", "inconclusive"].includes(state);
const isUnderWay = (status) => status.state === "checking" || isServing(status);

/** Return a mark for a version that takes part in a rollout which is under way; null for others. */
export function markOf(rollouts, name, version) {
  const found = rollouts.find(({ model, from, to }) => model === name && [from, to].includes(version));
  if (!found || !isUnderWay(found)) return null;
  const share = version === found.to ? found.weight : 100 - found.weight;
  return {
    href: `#/rollout/${encodeURIComponent(name)}`,
    text: found.state === "running" ? `rollout ${format.number(share)} %` : `rollout ${format.number(share)} %, ${stateWords(found.state)}`,
    title: `A rollout from version ${found.from} to ${found.to} is ${stateWords(found.state)}`,
  };
}

export class Rollouts extends Polled {
  title = "Rollouts";

  constructor(console) {
    super(console, "v2/rollouts", CATEGORY);
    this.table = new Table(COLUMNS);
    this.past = new Table(PAST);
    this.earlier = element("section", { className: "bare", hidden: true }, element("h2", {}, "Earlier"), this.past.root);
    const command = element("code", {}, "nerite rollout start MODEL --to VERSION");
    this.empty = element("p", { className: "muted", hidden: true }, "There has been no rollout. Start one with: ", command);
    this.table.root.hidden = true;
    this.shadows = new Shadows(console);
    this.root = element("div", {}, element("h1", {}, "Rollouts"), this.locked, element("div", { className: "bare" }, this.table.root), this.empty, this.earlier, this.shadows.root);
  }

  async update() {
    this.shadows.update();
    await super.update();
  }

  show() {
    const { rollouts, past } = this.data;
    const all = [...rollouts].sort((one, other) => isUnderWay(other) - isUnderWay(one) || one.model.localeCompare(other.model));
    this.table.show(all.map(row));
    this.table.root.hidden = !all.length;
    this.empty.hidden = Boolean(all.length || past.length);
    this.past.show([...past].sort((one, other) => other.at.localeCompare(one.at)).map(pastRow));
    this.earlier.hidden = !past.length;
  }
}

function row(status) {
  const { model, from, to, steps, step, weight, gates, started, text } = status;
  const [state, colour] = stateOf(status);
  const harm = gates.map((gate) => progress(gate.worse, gate.worse_boundary)).filter((part) => part !== null);
  const proof = gates.map((gate) => progress(gate.not_worse, gate.not_worse_boundary) ?? Number(gate.decision === "not_worse"));
  return {
    href: `#/rollout/${encodeURIComponent(model)}`,
    colour,
    texts: [
      model,
      state,
      `${from} → ${to}`,
      `${format.number(weight)} %`,
      isServing(status) ? `${step + 1} of ${steps.length}` : "–",
      harm.length ? format.share(Math.max(...harm)) : "–",
      proof.length ? format.share(Math.min(...proof)) : "–",
      moment(started),
      text || "The candidate is being loaded and compared with the baseline.",
    ],
  };
}

function pastRow(entry) {
  const [state, colour] = stateOf(entry);
  const href = `#/rollout/${encodeURIComponent(entry.model)}/${encodeURIComponent(entry.id)}`;
  return { href, colour, texts: [entry.model, state, `${entry.from} → ${entry.to}`, moment(entry.at), entry.text] };
}
