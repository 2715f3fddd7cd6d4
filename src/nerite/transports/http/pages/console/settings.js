// Page of the log and trace settings, and forms to change them.

import { element, say } from "./elements.js";
import * as server from "./server.js";

const LEVELS = [["OFF"], ["TIMESTAMPS"], ["TENSORS"], ["TIMESTAMPS", "TENSORS"]];
const FORMATS = ["default", "ISO8601", "json"];
const FIXED = new Set(["log_file", "trace_file", "trace_mode"]);
/** What each setting does. */
const MEANINGS = {
  log_file: "File that the log is written to; set at the start by --log-file. Without one: stdout and stderr.",
  log_info: "Write normal events, such as loads and what models print.",
  log_warning: "Write possible problems.",
  log_error: "Write failures.",
  log_verbose_level: "0 for no details; 1 and more also write failed requests and internals.",
  log_format: "default and ISO8601 are Triton's lines; json is one object per line.",
  trace_level: "What is recorded of a traced request: the times of its stages, its tensors, both, or nothing.",
  trace_rate: "One of so many requests is traced.",
  trace_count: "Number of requests to trace from now on; -1 for no limit.",
  log_frequency: "Begin a new trace file after so many traces; 0 for one file.",
  trace_file: "File that the traces are written to; set at the start by --trace-config.",
  trace_mode: "triton writes a file, opentelemetry sends spans; set at the start by --trace-config.",
};

export class Settings {
  title = "Settings";

  constructor() {
    this.forms = [new Form("Log", "v2/logging"), new Form("Traces", "v2/trace/setting")];
    const note = element("p", { className: "muted" }, "Changes apply until the server stops.");
    const columns = element("div", { className: "columns" }, ...this.forms.map((form) => form.root));
    this.root = element("div", {}, element("h1", {}, "Settings"), note, columns);
    for (const form of this.forms) form.read();
  }

  update() {}

  close() {}
}

/** Form for the settings of an endpoint; only changed settings are sent. */
export class Form {
  constructor(title, path) {
    this.path = path;
    this.fields = [];
    this.rows = element("div", { className: "fields" });
    this.status = element("span", { role: "status", className: "muted" });
    this.save = element("button", { type: "submit", className: "main", hidden: true }, "Save");
    const bar = element("p", { className: "bar" }, this.save, this.status);
    const form = element("form", { on: { submit: (event) => this.submit(event) } }, this.rows, bar);
    this.root = element("section", {}, element("h2", {}, title), form);
  }

  async read() {
    await this.refresh(() => server.get(this.path), "");
  }

  async submit(event) {
    event.preventDefault();
    const changed = this.fields.filter(({ current, value }) => JSON.stringify(current) !== JSON.stringify(value()));
    const body = Object.fromEntries(changed.map(({ name, value }) => [name, value()]));
    await this.refresh(async () => JSON.parse(await server.post(this.path, body, { insist: true })), "Saved");
  }

  async refresh(request, done) {
    try {
      this.show(await request());
      say(this.status, done);
    } catch (error) {
      say(this.status, error.message);
    }
  }

  show(settings) {
    const focused = this.rows.contains(document.activeElement) && document.activeElement.name;
    this.fields = Object.entries(settings).map(([name, current]) => ({ name, current, ...control(name, current) }));
    this.rows.replaceChildren(...this.fields.map(row));
    this.save.hidden = !this.fields.length;
    if (focused) this.rows.querySelector(`[name="${focused}"]`)?.focus();
  }
}

function row({ name, input }) {
  const words = (MEANINGS[name] ?? "").split(/(--[\w-]+)/);
  const text = words.map((part) => (part.startsWith("--") ? element("code", {}, part) : part)).filter(Boolean);
  const meaning = element("small", { id: `about-${name}` }, ...text);
  input.setAttribute("aria-describedby", meaning.id);
  return element("div", {}, element("label", {}, element("span", {}, name), input), meaning);
}

/** Return the control of a setting, and a function that returns its value, of the same type as `current`. */
function control(name, current) {
  if (FIXED.has(name)) return { input: element("output", {}, String(current || "–")), value: () => current };
  if (typeof current === "boolean") {
    const input = element("input", { type: "checkbox", name, checked: current });
    return { input, value: () => input.checked };
  }
  if (name === "trace_level" || name === "log_format") {
    const choices = name === "trace_level" ? LEVELS : FORMATS;
    const same = (choice) => JSON.stringify([choice].flat().sort()) === JSON.stringify([current].flat().sort());
    const options = choices.map((choice) => element("option", { selected: same(choice) }, [choice].flat().join(" and ")));
    const input = element("select", { name }, ...options);
    // The unchanged value if nothing else was chosen: the server may list its parts in any order.
    return { input, value: () => (same(choices[input.selectedIndex]) ? current : choices[input.selectedIndex]) };
  }
  if (typeof current === "object") return { input: element("output", {}, JSON.stringify(current)), value: () => current };
  const input = element("input", { name, value: current, inputMode: "numeric", required: true });
  return { input, value: () => (typeof current === "number" ? Number(input.value) : input.value) };
}
