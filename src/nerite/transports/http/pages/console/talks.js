// Page of the chat: a choice among the language models, and the chat with one of them.

import { Chat } from "./chat.js";
import { element, say } from "./elements.js";
import * as server from "./server.js";

/** Return the language models and their adapters: models of embeddings and rankings are listed with them. */
async function languageModels() {
  const { data } = await server.get("v1/models");
  return data.filter(({ task, parent }) => task === "generate" || parent).map(({ id }) => id);
}

export async function hasLanguageModel() {
  return (await languageModels()).length > 0;
}

export class Talks {
  title = "Chat";

  constructor(console, name = "") {
    this.console = console;
    this.wanted = name;
    this.chat = null;
    this.choice = element("select", { name: "model", on: { change: () => this.choose(this.choice.value) } });
    this.field = element("label", { className: "field", hidden: true }, "Model", this.choice);
    this.note = element("p", { className: "muted" }, "…");
    this.place = element("div", { className: "alone" });
    this.root = element("div", {}, element("div", { className: "head" }, element("h1", {}, "Chat"), this.field), this.note, this.place);
    this.list();
  }

  update() {}

  close() {
    this.closed = true;
    this.chat?.close();
  }

  async list() {
    try {
      const names = await languageModels();
      if (this.closed) return;
      say(this.note, names.length ? "" : "No language model is loaded. Add one with: nerite add hf:ORGANIZATION/NAME");
      this.field.hidden = !names.length;
      if (!names.length) return;
      const first = names.includes(this.wanted) ? this.wanted : names[0];
      this.choice.replaceChildren(...names.map((name) => element("option", { value: name, selected: name === first }, name)));
      this.choose(first);
    } catch (error) {
      say(this.note, error.message);
    }
  }

  choose(name) {
    this.chat?.close();
    this.chat = new Chat(name);
    this.place.replaceChildren(this.chat.root);
    history.replaceState(null, "", `#/chat/${encodeURIComponent(name)}`);
  }
}
