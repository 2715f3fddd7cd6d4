// Chat with a language model. Its answers appear as they are generated, as Markdown.

import { element } from "./elements.js";
import * as format from "./format.js";
import { markdown } from "./markdown.js";
import * as server from "./server.js";

/** Milliseconds between two drawings of an answer that grows. */
const DRAW = 80;
const STORE = "nerite-chat";

/** Return whether a model generates text, judging by its tensors. */
export function writes({ inputs, outputs }) {
  const names = new Set(outputs.map(({ name }) => name));
  return names.has("text_output") && !names.has("embedding") && inputs.some(({ name }) => ["text_input", "prompt"].includes(name));
}

/** The settings of a chat, which are kept until the tab is closed. Those that are empty are left to the model. */
class ChatSettings {
  constructor() {
    const kept = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
    const number = (name, more) =>
      element("input", { type: "number", name, placeholder: "of the model", value: kept[name] ?? "", on: { change: () => this.keep() }, ...more });
    this.system = element("textarea", { name: "system", rows: 2, value: kept.system ?? "", placeholder: "How the model should answer", on: { change: () => this.keep() } });
    this.temperature = number("temperature", { min: 0, max: 2, step: "any" });
    this.most = number("max_tokens", { min: 1, step: 1 });
    const field = (name, control, text) => element("label", { className: "field" }, name, control, element("small", {}, text));
    this.root = element(
      "details",
      { className: "knobs", open: Object.values(kept).some(Boolean) },
      element("summary", {}, "Settings"),
      element(
        "div",
        {},
        field("System prompt", this.system, "Instructions before the first message."),
        field("Temperature", this.temperature, "0 always takes the likeliest token; higher values vary more."),
        field("Maximum tokens", this.most, "An answer ends there at the latest."),
      ),
    );
  }

  keep() {
    const { system, temperature, most } = this;
    const values = { system: system.value, temperature: temperature.value, max_tokens: most.value };
    sessionStorage.setItem(STORE, JSON.stringify(values));
  }

  /** Return the fields of a request with these messages. */
  fields(messages) {
    const system = this.system.value.trim();
    return {
      messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
      ...(this.temperature.value && { temperature: Number(this.temperature.value) }),
      ...(this.most.value && { max_tokens: Number(this.most.value) }),
    };
  }
}

/** An answer that grows. */
class Answer {
  constructor(place, log) {
    this.place = place;
    this.log = log;
    this.text = "";
    this.timer = null;
  }

  add(piece) {
    this.text += piece;
    this.timer ??= setTimeout(() => this.draw(), DRAW);
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = null;
    const { log } = this;
    const follows = log.scrollTop + log.clientHeight >= log.scrollHeight - 40;
    this.place.replaceChildren(...markdown(this.text));
    if (follows) log.scrollTop = log.scrollHeight;
  }
}

export class Chat {
  constructor(name) {
    this.name = name;
    this.messages = [];
    this.log = element("ol", { className: "chat", "aria-label": "Conversation", "aria-live": "polite" });
    this.text = element("textarea", {
      rows: 2,
      "aria-label": "Message",
      placeholder: "Message (Enter to send, Shift+Enter for a new line)",
      on: { keydown: (event) => this.key(event) },
    });
    this.settings = new ChatSettings();
    this.send = element("button", { type: "submit", className: "main" }, "Send");
    this.stop = element("button", { type: "button", hidden: true, on: { click: () => this.cancel?.abort() } }, "Stop");
    this.clear = element("button", { type: "button", hidden: true, on: { click: () => this.forget() } }, "New chat");
    this.status = element("span", { className: "muted", role: "status" });
    const bar = element("p", { className: "bar" }, this.send, this.stop, this.clear, this.status);
    this.form = element("form", { on: { submit: (event) => this.submit(event) } }, this.settings.root, this.text, bar);
    this.root = element("section", { className: "talk" }, element("h2", {}, "Chat"), this.log, this.form);
  }

  close() {
    this.cancel?.abort();
  }

  key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.form.requestSubmit();
  }

  forget() {
    this.cancel?.abort();
    this.messages = [];
    this.log.replaceChildren();
    this.status.textContent = "";
    this.clear.hidden = true;
    this.text.focus();
  }

  async submit(event) {
    event.preventDefault();
    const content = this.text.value.trim();
    if (this.cancel || !content) return;
    this.text.value = "";
    const asked = [...this.messages, { role: "user", content }];
    const shown = [this.show("You", content), this.show(this.name, "")];
    const answer = new Answer(shown[1].lastChild, this.log);
    const cancel = (this.cancel = new AbortController());
    this.busy(true);
    const times = { began: performance.now(), first: null };
    const said = () => [...asked, { role: "assistant", content: answer.text }];
    try {
      let last = {};
      for await (const part of this.ask(asked, cancel.signal)) {
        last = { ...last, ...part };
        if (!part.text) continue;
        times.first ??= performance.now();
        answer.add(part.text);
      }
      this.messages = said();
      this.status.textContent = told(times, last);
    } catch (error) {
      if (error.name === "AbortError") {
        // Keep the partial answer if the conversation continues.
        if (this.messages.length || shown[0].isConnected) this.messages = said();
        this.status.textContent = shown[0].isConnected ? "Stopped" : "";
      } else {
        for (const each of shown) each.remove();
        this.text.value ||= content; // So that it can be sent again.
        this.status.textContent = error.message;
      }
    }
    answer.draw();
    this.cancel = null;
    this.busy(false);
  }

  /** Yield the parts of an answer: its text, why it ended, and the number of tokens. */
  async *ask(messages, signal) {
    const wanted = { model: this.name, ...this.settings.fields(messages), stream: true, stream_options: { include_usage: true } };
    const body = JSON.stringify(wanted);
    const answer = await server.ask("v1/chat/completions", { method: "POST", insist: true, signal, body });
    for await (const data of server.events(answer)) {
      if (data === "[DONE]") return;
      const { error, choices = [], usage } = JSON.parse(data);
      if (error) throw new Error(error.message ?? error);
      const [choice] = choices;
      yield {
        text: choice?.delta?.content ?? "",
        ...(choice?.finish_reason && { ended: choice.finish_reason }),
        ...(usage && { tokens: usage.completion_tokens }),
      };
    }
  }

  show(who, text) {
    const content = element("div", { className: "text" }, ...(text ? [element("p", {}, text)] : []));
    const shown = element("li", { className: who === "You" ? "mine" : "" }, element("small", {}, who), content);
    this.log.append(shown);
    this.log.scrollTop = this.log.scrollHeight;
    return shown;
  }

  busy(on) {
    this.send.setAttribute("aria-disabled", String(on));
    this.stop.hidden = !on;
    this.clear.hidden = on || !this.messages.length;
    if (on) this.status.textContent = "…";
  }
}

/** Return in words how long an answer took, how fast its tokens came, and whether it is complete. */
function told({ began, first }, { tokens = 0, ended }) {
  const now = performance.now();
  const words = [first === null ? "No output" : `First text after ${format.seconds((first - began) / 1000)}`];
  words.push(`all after ${format.seconds((now - began) / 1000)}`);
  if (tokens) words.push(`${format.number(tokens)} tokens`);
  // The first token comes with the first text: the others take the time from then on.
  if (tokens > 1 && first !== null && now > first) words.push(`${format.number((1000 * (tokens - 1)) / (now - first))} tokens/s`);
  if (ended === "length") words.push("cut off at the maximum of tokens");
  return words.join(", ");
}
