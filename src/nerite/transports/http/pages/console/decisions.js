// The decisions of the rollouts of a model, the latest first. Each opens to the evidence that it was based on.

import { element } from "./elements.js";
import { progress } from "./evidence.js";
import * as format from "./format.js";
import { Table } from "./table.js";

const GATES = [["Gate"], ["Harm", "number"], ["Proof", "number"], ["Numbers", "words"]];
const ARMS = [["Arm"], ["Version", "number"], ["Weight", "number"], ["Requests", "number"], ["Errors", "number"], ["p99", "number"]];
const time = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });

/** Format a time of day that the server has sent. */
export const moment = (text) => (Number.isNaN(Date.parse(text)) ? "–" : time.format(new Date(text)));

export class Decisions {
  constructor() {
    this.list = element("ol", { className: "decisions" });
    this.root = element("section", { className: "bare" }, element("h2", {}, "History"), this.list);
  }

  /** Show the decisions, which come with the oldest first. Those that are open stay open. */
  show(history) {
    const open = new Set([...this.list.querySelectorAll("details[open]")].map((each) => each.dataset.key));
    this.list.replaceChildren(...history.map((entry) => item(entry, open)).reverse());
    this.root.hidden = !history.length;
  }
}

function item({ at, id, from, to, state, weight, text, evidence }, open) {
  const key = `${id} ${at} ${state}`;
  const toggled = ({ target }) => {
    if (target.open && target.children.length === 1) target.append(...numbers(evidence));
  };
  const head = element(
    "summary",
    {},
    element("span", { className: "muted" }, `${moment(at)} · version ${from} → ${to} · `),
    element("strong", {}, `${stateWords(state)}, ${format.number(weight)} %`),
    element("p", {}, text),
  );
  const details = element("details", { on: { toggle: toggled } }, head);
  details.dataset.key = key;
  details.open = open.has(key);
  return element("li", {}, details);
}

/** Return the state of a rollout in words. */
export const stateWords = (state) => state.replaceAll("_", " ");

function numbers({ arms, gates, holds, warnings }) {
  const sides = new Table(ARMS);
  sides.show(
    Object.entries(arms).map(([name, arm]) => ({
      texts: [name, arm.version, `${format.number(arm.weight)} %`, ...[arm.requests, arm.errors].map(format.number), format.milliseconds(arm.p99_ms)],
    })),
  );
  const table = new Table(GATES);
  table.show(
    gates.map((gate) => ({
      texts: [
        gate.gate,
        ...["worse", "not_worse"].map((kind) => format.share(progress(gate[kind], gate[`${kind}_boundary`]))),
        gate.reason,
      ],
    })),
  );
  const words = [...holds, ...warnings].map((text) => element("p", { className: "muted" }, text));
  return [sides.root, ...(gates.length ? [table.root] : []), ...words];
}
