// Page of the loops beside the requests: which are stalled, what fails, and what was set aside, to be retried or discarded.

import { askInDialog } from "./dialog.js";
import { element } from "./elements.js";
import * as format from "./format.js";
import { Polled } from "./polled.js";
import * as server from "./server.js";
import { Table } from "./table.js";

const LOOPS = [
  ["Loop"], ["State", "status"], ["Waiting", "number"], ["Failures", "number"], ["Restarts", "number"], ["Set aside", "number"],
  ["Problem", "words"],
];
const LETTERS = [["Unit"], ["Loop"], ["Tenant"], ["Since"], ["Error", "words"], ["Actions", "acts"]];
const FAILING = [["Unit"], ["Loop"], ["Error", "words"]];
const COLOURS = { ok: "good", failing: "idle", stalled: "bad" };
const ORDER = ["stalled", "failing", "ok"];

/** Return what is wrong with the loops of a reading of the metrics, in one sentence; empty if nothing is. */
export function wrongWith(loops) {
  const parts = loops.flatMap(({ loop, stalled, aside }) => [
    ...(stalled ? [`${loop} is stalled`] : []),
    ...(aside ? [`${loop} has set ${format.number(aside)} aside`] : []),
  ]);
  return parts.length ? `Background: ${parts.join(", ")}.` : "";
}

/** Dead letters, each with buttons. `act` gets the path of a command, and the letter. */
class Letters extends Table {
  constructor(act) {
    super(LETTERS, "Nothing was set aside.");
    this.act = act;
  }

  row() {
    const root = super.row();
    const button = (text, path) => element("button", { type: "button", on: { click: () => this.act(path, root.letter) } }, text);
    root.lastChild.append(element("span", { className: "buttons" }, button("Retry", "retry"), button("Discard", "discard")));
    return root;
  }

  fill(root, row) {
    super.fill(root, row);
    root.letter = row.letter;
    for (const button of root.querySelectorAll("button")) button.setAttribute("aria-label", `${button.textContent} ${row.letter.unit}`);
  }
}

export class Background extends Polled {
  title = "Background";

  constructor(console) {
    super(console, "v2/background", "statistics");
    this.loops = new Table(LOOPS, "No loop runs yet.");
    this.letters = new Letters((path, letter) => this.act(path, letter));
    this.failing = new Table(FAILING);
    this.trying = element("section", { className: "bare", hidden: true }, element("h2", {}, "Failing, and tried again"), this.failing.root);
    const about = "What the server does beside the requests. Units that failed twice are set aside, so that the others go on.";
    this.root = element(
      "div",
      {},
      element("h1", {}, "Background"),
      element("p", { className: "muted" }, about),
      this.locked,
      element("section", { className: "bare" }, element("h2", {}, "Set aside"), this.letters.root),
      this.trying,
      element("section", { className: "bare" }, element("h2", {}, "Loops"), this.loops.root),
    );
  }

  show() {
    const loops = [...this.data.loops].sort((one, other) => ORDER.indexOf(one.state) - ORDER.indexOf(other.state));
    this.loops.show(loops.map(loopRow));
    this.letters.show(loops.flatMap((loop) => loop.dead_letters.map((letter) => letterRow(loop, letter))));
    const failing = loops.flatMap((loop) => loop.failing.map(({ unit, text }) => ({ texts: [unit, nameOf(loop), text] })));
    this.failing.show(failing);
    this.trying.hidden = !failing.length;
  }

  async act(path, { loop, unit }) {
    if (path === "discard") {
      const content = [element("p", {}, `${loop} gives ${unit} up for good. Report the incident first: its stack is in the log.`)];
      if (!(await askInDialog(`Discard ${unit}?`, content, "Discard"))) return;
    }
    try {
      await server.post(`v2/background/${encodeURIComponent(loop)}/${path}`, { unit }, { insist: true });
    } catch (error) {
      this.console.failed(error);
    }
    await this.update();
  }
}

const nameOf = ({ name, about }) => (about ? `${name} (${about})` : name);

function loopRow(loop) {
  const { state, problem, waiting, failures, restarts, set_aside: aside } = loop;
  const counts = [waiting, failures, restarts, aside].map(format.number);
  return { colour: COLOURS[state], texts: [nameOf(loop), state, ...counts, problem || "–"] };
}

const letterRow = (loop, { unit, tenant, text, time }) => ({
  letter: { loop: loop.name, unit },
  texts: [unit, nameOf(loop), tenant || "–", time, text],
});
