// The gates of a rollout: what the judge says of each, its numbers, and its evidence over time.

import { element, say } from "./elements.js";
import { EvidencePlot } from "./evidence.js";
import * as format from "./format.js";

const DECISIONS = { continue: ["not decided", "idle"], roll_back: ["worse", "bad"], not_worse: ["not worse", "good"] };

/** Return a decision of the judge in words, and the CSS class of its colour. */
export const decisionOf = (decision) => DECISIONS[decision] ?? [decision, "idle"];

/** Return a function that formats the values of a gate, which its name tells the unit of. */
function unitOf(gate) {
  if (gate.startsWith("memory")) return format.bytes;
  if (gate.startsWith("kv_headroom")) return format.share;
  return gate.startsWith("restarts") ? format.number : (microseconds) => format.seconds(microseconds / 1e6);
}

/** Format an estimate and its bounds; nothing for one that is not known. */
function interval({ value, low, high }, text) {
  if (value === null) return "–";
  if (low === value && high === value) return text(value);
  return `${text(value)} (${low === null ? "0" : text(low)} – ${high === null ? "∞" : text(high)})`;
}

export class Gates {
  constructor() {
    this.shown = new Map();
    this.root = element("div", { className: "plots" });
  }

  /** Show what the judge says of each gate. `curve` has the evidence over time; null if it is not known. */
  show(gates, curve) {
    for (const [name, gate] of this.shown) {
      if (gates.some((each) => each.gate === name)) continue;
      gate.close();
      this.shown.delete(name);
    }
    for (const verdict of gates) {
      if (!this.shown.has(verdict.gate)) {
        this.shown.set(verdict.gate, new Gate(verdict.gate));
        this.root.append(this.shown.get(verdict.gate).root);
      }
      this.shown.get(verdict.gate).show(verdict, curve);
    }
  }

  close() {
    for (const gate of this.shown.values()) gate.close();
  }
}

class Gate {
  constructor(name) {
    this.unit = unitOf(name);
    this.state = element("span");
    this.reason = element("p", { className: "muted" });
    this.facts = element("dl", { className: "facts" });
    this.plot = null;
    const head = element("div", { className: "head" }, element("h3", {}, name), this.state);
    this.root = element("section", { className: "gate" }, head, this.facts, this.reason);
  }

  show(verdict, curve) {
    const [words, colour] = decisionOf(verdict.decision);
    say(this.state, words);
    this.state.className = `state ${colour}`;
    say(this.reason, verdict.reason);
    this.showFacts(verdict);
    const line = curve?.gates[verdict.gate];
    if (!line || verdict.worse_boundary === null) return;
    if (!this.plot) {
      this.plot = new EvidencePlot();
      this.facts.before(this.plot.root);
    }
    this.plot.draw(curve, line, verdict);
  }

  showFacts({ baseline, candidate, risk, tolerated, worst }) {
    const facts = [];
    const both = (name, part, text) => {
      if (baseline[part].value === null && candidate[part].value === null) return;
      facts.push([`${name}, baseline`, interval(baseline[part], text)], [`${name}, candidate`, interval(candidate[part], text)]);
    };
    both("Value", "value", this.unit);
    both("Bad requests", "rate", format.rate);
    if (risk.value !== null) facts.push(["Relative risk", interval(risk, format.number)]);
    if (tolerated !== null) facts.push(["Accepted up to", format.number(tolerated)]);
    if (worst) facts.push(["Most evidence of harm", worst]);
    const text = JSON.stringify(facts);
    if (this.facts.dataset.shown === text) return;
    this.facts.dataset.shown = text;
    const pairs = facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
    this.facts.replaceChildren(...pairs);
  }

  close() {
    this.plot?.close();
    this.root.remove();
  }
}
