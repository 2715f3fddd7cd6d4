// A conversation with a language model. Its answers appear as they come.

import { element } from "./elements.js";
import * as format from "./format.js";
import * as server from "./server.js";

/** Say if a model writes texts, by its tensors. */
export function writes({ inputs, outputs }) {
  return outputs.some(({ name }) => name === "text_output") && inputs.some(({ name }) => ["text_input", "prompt"].includes(name));
}

export class Chat {
  constructor(name) {
    this.name = name;
    this.messages = [];
    this.log = element("ol", { className: "chat", "aria-label": "Conversation", "aria-live": "polite" });
    this.text = element("textarea", {
      rows: 2,
      "aria-label": "Message",
      placeholder: "Message (Enter sends, Shift+Enter begins a line)",
      on: { keydown: (event) => this.key(event) },
    });
    this.send = element("button", { type: "submit", className: "main" }, "Send");
    this.stop = element("button", { type: "button", hidden: true, on: { click: () => this.cancel?.abort() } }, "Stop");
    this.clear = element("button", { type: "button", hidden: true, on: { click: () => this.forget() } }, "Begin anew");
    this.said = element("span", { className: "muted", role: "status" });
    const bar = element("p", { className: "bar" }, this.send, this.stop, this.clear, this.said);
    this.form = element("form", { on: { submit: (event) => this.submit(event) } }, this.text, bar);
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
    this.said.textContent = "";
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
    const answer = shown[1].lastChild;
    const cancel = (this.cancel = new AbortController());
    this.busy(true);
    const began = performance.now();
    let first = null;
    try {
      for await (const piece of this.ask(asked, cancel.signal)) {
        first ??= performance.now() - began;
        answer.append(piece);
        this.log.scrollTop = this.log.scrollHeight;
      }
      this.messages = [...asked, { role: "assistant", content: answer.textContent }];
      const whole = (performance.now() - began) / 1000;
      this.said.textContent = `${first === null ? "No text" : `First text after ${format.seconds(first / 1000)}`}, all after ${format.seconds(whole)}`;
    } catch (error) {
      if (error.name === "AbortError") {
        // What was said stays said, if the conversation goes on.
        if (this.messages.length || shown[0].isConnected) this.messages = [...asked, { role: "assistant", content: answer.textContent }];
        this.said.textContent = shown[0].isConnected ? "Stopped" : "";
      } else {
        for (const each of shown) each.remove();
        this.text.value ||= content; // To be sent again.
        this.said.textContent = error.message;
      }
    }
    this.cancel = null;
    this.busy(false);
  }

  async *ask(messages, signal) {
    const body = JSON.stringify({ model: this.name, messages, stream: true });
    const answer = await server.ask("v1/chat/completions", { method: "POST", insist: true, signal, body });
    for await (const data of server.events(answer)) {
      if (data === "[DONE]") return;
      const { error, choices = [] } = JSON.parse(data);
      if (error) throw new Error(error.message ?? error);
      const piece = choices[0]?.delta?.content;
      if (piece) yield piece;
    }
  }

  show(who, text) {
    const shown = element("li", { className: who === "You" ? "mine" : "" }, element("small", {}, who), element("p", {}, text));
    this.log.append(shown);
    this.log.scrollTop = this.log.scrollHeight;
    return shown;
  }

  busy(on) {
    this.send.setAttribute("aria-disabled", String(on));
    this.stop.hidden = !on;
    this.clear.hidden = on || !this.messages.length;
    if (on) this.said.textContent = "…";
  }
}
