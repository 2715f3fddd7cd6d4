// Chat with a language model. Its replies appear as they are generated.

import { element } from "./elements.js";
import * as format from "./format.js";
import * as server from "./server.js";

/** Return whether a model generates text, judging by its tensors. */
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
      placeholder: "Message (Enter to send, Shift+Enter for a new line)",
      on: { keydown: (event) => this.key(event) },
    });
    this.send = element("button", { type: "submit", className: "main" }, "Send");
    this.stop = element("button", { type: "button", hidden: true, on: { click: () => this.cancel?.abort() } }, "Stop");
    this.clear = element("button", { type: "button", hidden: true, on: { click: () => this.forget() } }, "New chat");
    this.status = element("span", { className: "muted", role: "status" });
    const bar = element("p", { className: "bar" }, this.send, this.stop, this.clear, this.status);
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
      this.status.textContent = `${first === null ? "No output" : `First text after ${format.seconds(first / 1000)}`}, all after ${format.seconds(whole)}`;
    } catch (error) {
      if (error.name === "AbortError") {
        // Keep the partial reply if the conversation continues.
        if (this.messages.length || shown[0].isConnected) this.messages = [...asked, { role: "assistant", content: answer.textContent }];
        this.status.textContent = shown[0].isConnected ? "Stopped" : "";
      } else {
        for (const each of shown) each.remove();
        this.text.value ||= content; // So that it can be sent again.
        this.status.textContent = error.message;
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
    if (on) this.status.textContent = "…";
  }
}
