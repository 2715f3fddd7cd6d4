// What is logged and what is traced, and changing it.

import { element, say } from "./elements.js";
import * as server from "./server.js";

const LEVELS = [["OFF"], ["TIMESTAMPS"], ["TENSORS"], ["TIMESTAMPS", "TENSORS"]];
const FORMATS = ["default", "ISO8601", "json"];
const FIXED = new Set(["log_file", "trace_file", "trace_mode"]);

export class Settings {
  title = "Settings";

  constructor() {
    this.forms = [new Form("Log", "v2/logging"), new Form("Traces", "v2/trace/setting")];
    const note = element("p", { className: "muted" }, "Changes hold until the server ends.");
    const columns = element("div", { className: "columns" }, ...this.forms.map((form) => form.root));
    this.root = element("div", {}, element("h1", {}, "Settings"), note, columns);
    for (const form of this.forms) form.read();
  }

  update() {}

  close() {}
}

/** The settings that an endpoint tells, as fields; those that were changed are sent to it. */
export class Form {
  constructor(title, path) {
    this.path = path;
    this.fields = [];
    this.rows = element("div", { className: "fields" });
    this.said = element("span", { role: "status", className: "muted" });
    this.save = element("button", { type: "submit", className: "main", hidden: true }, "Save");
    const bar = element("p", { className: "bar" }, this.save, this.said);
    const form = element("form", { on: { submit: (event) => this.submit(event) } }, this.rows, bar);
    this.root = element("section", {}, element("h2", {}, title), form);
  }

  async read() {
    await this.tell(() => server.get(this.path), "");
  }

  async submit(event) {
    event.preventDefault();
    const changed = this.fields.filter(({ told, value }) => JSON.stringify(told) !== JSON.stringify(value()));
    const body = Object.fromEntries(changed.map(({ name, value }) => [name, value()]));
    await this.tell(async () => JSON.parse(await server.post(this.path, body, { insist: true })), "Saved");
  }

  async tell(asked, done) {
    try {
      this.show(await asked());
      say(this.said, done);
    } catch (error) {
      say(this.said, error.message);
    }
  }

  show(settings) {
    const focused = this.rows.contains(document.activeElement) && document.activeElement.name;
    this.fields = Object.entries(settings).map(([name, told]) => ({ name, told, ...control(name, told) }));
    this.rows.replaceChildren(...this.fields.map(({ name, input }) => element("label", {}, element("span", {}, name), input)));
    this.save.hidden = !this.fields.length;
    if (focused) this.rows.querySelector(`[name="${focused}"]`)?.focus();
  }
}

/** Return the control of a setting, and a function that tells its value, of the kind that the server told. */
function control(name, told) {
  if (FIXED.has(name)) return { input: element("output", {}, String(told || "–")), value: () => told };
  if (typeof told === "boolean") {
    const input = element("input", { type: "checkbox", name, checked: told });
    return { input, value: () => input.checked };
  }
  if (name === "trace_level" || name === "log_format") {
    const choices = name === "trace_level" ? LEVELS : FORMATS;
    const same = (choice) => JSON.stringify([choice].flat().sort()) === JSON.stringify([told].flat().sort());
    const options = choices.map((choice) => element("option", { selected: same(choice) }, [choice].flat().join(" and ")));
    const input = element("select", { name }, ...options);
    // As it was told where nothing else was chosen: its parts may stand in any order.
    return { input, value: () => (same(choices[input.selectedIndex]) ? told : choices[input.selectedIndex]) };
  }
  if (typeof told === "object") return { input: element("output", {}, JSON.stringify(told)), value: () => told };
  const input = element("input", { name, value: told, inputMode: "numeric", required: true });
  return { input, value: () => (typeof told === "number" ? Number(input.value) : input.value) };
}
