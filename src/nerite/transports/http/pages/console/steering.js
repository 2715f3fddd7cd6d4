// Buttons that steer a rollout. Each asks first, and says what will happen.

import { askInDialog } from "./dialog.js";
import { element, say } from "./elements.js";
import * as server from "./server.js";

const UNDER_WAY = ["running", "paused", "inconclusive"];

/** Name, states in which it is possible, what is shown meanwhile, and what happens, for a status. */
const COMMANDS = [
  ["promote", "Promote", UNDER_WAY, "Promoting…", promotion],
  ["pause", "Pause", ["running"], "Pausing…", ({ model, to, weight }) => [
    `Version ${to} of ${model} stays at ${weight} % of the requests until the rollout is resumed. Harm still rolls it back.`,
  ]],
  ["resume", "Resume", ["paused", "inconclusive"], "Resuming…", ({ model, to, weight, state }) => [
    `The rollout of ${model} goes on: version ${to} has ${weight} % of the requests, and gets more in the next step.`,
    ...(state === "inconclusive" ? ["Its deadline starts again."] : []),
  ]],
  ["abort", "Abort", ["checking", ...UNDER_WAY], "Aborting…", ({ model, from, to }) => [
    `Version ${from} gets all requests to ${model} again. Version ${to} is unloaded if the rollout has loaded it.`,
    `${model} stays at version ${from} until the next rollout, or until this one is cleared.`,
  ]],
  ["clear", "Clear", ["promoted", "rolled_back", "aborted"], "Clearing…", ({ model, pinned }) => [
    `The server forgets the rollout of ${model}; the history is kept.`,
    `The version policy chooses the version that serves again${pinned && `, which may be another one than version ${pinned}`}.`,
  ]],
];

function promotion({ model, from, to, judge }) {
  return [
    `Version ${to} gets all requests to ${model} that name no version. Version ${from} is unloaded unless the version policy selects it.`,
    judge.decision === "not_worse" ? `The judge: ${judge.reason}.` : `It is not shown that version ${to} is not worse: ${judge.reason || "nothing is known yet"}.`,
  ];
}

export class Steering {
  /** `changed` gets the new status, and `failed` the errors. */
  constructor({ changed, failed }) {
    this.report = { changed, failed };
    this.status = null;
    this.buttons = COMMANDS.map(([name, text, states, doing, effects]) => {
      const click = () => this.ask(name, text, doing, effects);
      const button = element("button", { type: "button", className: name === "promote" ? "main" : "", on: { click } }, text);
      return { name, text, states, button };
    });
    this.root = element("span", { className: "buttons" }, ...this.buttons.map(({ button }) => button));
  }

  update(status) {
    this.status = status;
    for (const { text, name, states, button } of this.buttons) {
      button.hidden = !states.includes(status.state) || (this.doing && this.doing.name !== name);
      say(button, this.doing?.name === name ? this.doing.text : text);
      button.setAttribute("aria-label", `${button.textContent} ${status.model}`);
      button.setAttribute("aria-disabled", String(Boolean(this.doing)));
    }
  }

  async ask(name, text, doing, effects) {
    if (this.doing) return;
    const { model, to, judge } = this.status;
    const force = name === "promote" && judge.decision !== "not_worse";
    const title = name === "promote" ? `Promote version ${to} of ${model}?` : `${text} the rollout of ${model}?`;
    const content = effects(this.status).map((sentence) => element("p", {}, sentence));
    if (!(await askInDialog(title, content, force ? "Promote without evidence" : text))) return;
    this.doing = { name, text: doing };
    this.update(this.status);
    try {
      const answer = await server.post(`${server.place(model)}/rollout/${name}`, force ? { force } : {}, { insist: true });
      this.doing = null;
      await this.report.changed(name, JSON.parse(answer));
    } catch (error) {
      this.doing = null;
      this.update(this.status);
      this.report.failed(error);
    }
  }
}
