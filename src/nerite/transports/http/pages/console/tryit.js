// Form with a field for each input of a model. Responses of decoupled models appear as they arrive.

import { element } from "./elements.js";
import * as format from "./format.js";
import * as server from "./server.js";
import { TensorField, isPicture, shown } from "./tensors.js";

const FILES = "image/*,audio/*,video/*,application/pdf";

export class TryIt {
  /** `metadata`, `config` and `samples` are those of this version, from the server. */
  constructor(metadata, config, samples, version) {
    this.place = server.place(metadata.name, version);
    this.streams = Boolean(config.model_transaction_policy?.decoupled);
    const declared = new Map((config.input ?? []).map((input) => [input.name, input]));
    const optional = (input) => Boolean(declared.get(input.name)?.optional);
    this.fields = metadata.inputs.map((input) => new TensorField(input, optional(input), samples[input.name]));
    this.fields.sort((one, other) => one.optional - other.optional);
    this.file = this.filePart(metadata.inputs.filter((input) => !optional(input)).map((input) => declared.get(input.name)));
    this.run = element("button", { type: "submit", className: "main" }, "Run");
    this.stop = element("button", { type: "button", hidden: true, on: { click: () => this.cancel.abort() } }, "Stop");
    this.took = element("span", { className: "muted", role: "status" });
    this.answer = element("div", { className: "answer", "aria-live": "polite" });
    const bar = element("p", { className: "bar" }, this.run, this.stop, this.took);
    const form = element(
      "form",
      { on: { submit: (event) => this.submit(event) } },
      ...this.fields.map((field) => field.root),
      ...(this.file ? [this.file.root] : []),
      bar,
    );
    this.root = element("section", { className: "tryit" }, element("h2", {}, "Try it"), element("div", { className: "halves" }, form, this.answer));
  }

  /** Return a file field if the model has exactly one required input that takes a file, else null. */
  filePart(needed) {
    if (this.streams || needed.length !== 1 || !needed[0]) return null;
    const picture = isPicture(needed[0]);
    if (!picture && needed[0].data_type !== "TYPE_STRING") return null;
    const input = element("input", { type: "file", accept: picture ? "image/*" : FILES });
    return { input, root: element("label", {}, picture ? "Or an image: " : "Or a file: ", input) };
  }

  async submit(event) {
    event.preventDefault();
    if (this.cancel) return;
    this.cancel = new AbortController();
    this.run.setAttribute("aria-disabled", "true");
    this.stop.hidden = false;
    this.took.textContent = "…";
    this.answer.replaceChildren();
    const began = performance.now();
    try {
      await (this.streams ? this.stream() : this.infer());
      this.took.textContent = `${format.seconds((performance.now() - began) / 1000)}, measured in the browser`;
    } catch (error) {
      const stopped = error.name === "AbortError";
      this.took.textContent = stopped ? "Stopped" : "";
      if (!stopped) this.answer.append(element("p", { className: "reason" }, error.message));
    }
    this.run.removeAttribute("aria-disabled");
    this.stop.hidden = true;
    this.cancel = null;
  }

  ask(what, request) {
    return server.ask(`${this.place}/${what}`, { method: "POST", insist: true, signal: this.cancel.signal, ...request });
  }

  async infer() {
    const file = this.file?.input.files[0];
    const inputs = file ? [] : this.fields.map((field) => field.read()).filter(Boolean);
    const request = file ? { body: file, headers: { "Content-Type": file.type } } : { body: JSON.stringify({ inputs }) };
    const text = await (await this.ask("infer", request)).text();
    let outputs;
    try {
      ({ outputs } = JSON.parse(text));
    } catch {
      this.answer.append(element("pre", {}, text)); // Bare NaN or Infinity, which is not valid JSON.
      return;
    }
    this.answer.append(element("dl", {}, ...outputs.map(shown)));
  }

  async stream() {
    const inputs = this.fields.map((field) => field.read()).filter(Boolean);
    const form = Object.fromEntries(inputs.map(({ name, data }) => [name, data.length === 1 ? data[0] : data]));
    const answer = await this.ask("generate_stream", { body: JSON.stringify(form) });
    const texts = new Map();
    for await (const data of server.events(answer)) this.showEvent(JSON.parse(data), texts);
  }

  /** Append the outputs of an event: strings continue the text so far, other values get their own line. */
  showEvent(event, texts) {
    const { model_name: _, model_version: __, error, ...outputs } = event;
    if (error) throw new Error(error);
    for (const [name, value] of Object.entries(outputs)) {
      if (!texts.has(name)) {
        texts.set(name, element("pre", { className: "text" }));
        this.answer.append(element("dl", {}, element("dt", {}, name), element("dd", {}, texts.get(name))));
      }
      texts.get(name).append(typeof value === "string" ? value : `${JSON.stringify(value)}\n`);
    }
  }
}
