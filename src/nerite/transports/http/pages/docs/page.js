// Keeps the commands of each model in step with the values that are entered, and sends them.

const SIZES = { BOOL: 1, UINT8: 1, INT8: 1, UINT16: 2, INT16: 2, FP16: 2, BF16: 2, UINT32: 4, INT32: 4, FP32: 4, UINT64: 8, INT64: 8, FP64: 8, BYTES: 4 };
const NUMPY = { BOOL: "bool", UINT8: "uint8", INT8: "int8", UINT16: "uint16", INT16: "int16", FP16: "float16", BF16: "float32", UINT32: "uint32", INT32: "int32", FP32: "float32", UINT64: "uint64", INT64: "int64", FP64: "float64" };
const TOKEN = /"(?:[^"\\]|\\.)*"|[^\s,[\]]+/g;

const product = (shape) => shape.reduce((all, size) => all * size, 1);
const utf8 = (text) => new TextEncoder().encode(text);
const shell = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`);
/** JSON without characters that Python's or a shell's programs would print differently. */
const quoted = (text) => JSON.stringify(text);

/** Read the values of an input. Throws if they are not JSON. */
function read(field) {
  const { name, datatype } = field.dataset;
  const text = field.querySelector("[name=data]").value;
  let shape;
  try {
    shape = JSON.parse(field.querySelector("[name=shape]").value);
  } catch {
    shape = null;
  }
  if (!Array.isArray(shape) || !shape.every((size) => Number.isInteger(size) && size >= 0)) throw new Error(`The shape of ${name} is not a list of sizes, such as [1, 3].`);
  if (!text.trim()) return "optional" in field.dataset ? null : { name, datatype, shape, declared: JSON.parse(field.dataset.declared), zeros: product(shape) * SIZES[datatype] };
  const one = datatype === "BYTES" && product(shape) === 1 && !/^\s*[["]/.test(text);
  const json = one ? quoted(text) : text.trim();
  try {
    JSON.parse(json);
  } catch (error) {
    throw new Error(`The values of ${name} are not JSON: ${error.message}`);
  }
  return { name, datatype, shape, json: json.startsWith("[") ? json : `[${json}]`, tokens: json.match(TOKEN) ?? [] };
}

/** If one size is open, let it follow the number of values. */
function fit(field) {
  const declared = JSON.parse(field.dataset.declared);
  const shape = field.querySelector("[name=shape]");
  const open = declared.flatMap((size, at) => (size < 0 ? [at] : []));
  if (!open.length) return;
  try {
    const { tokens } = read(field);
    const now = JSON.parse(shape.value);
    const last = open.length === 1 ? open[0] : open.find((at) => now[at] !== 1) ?? open[0];
    const rest = product(now.filter((_, at) => at !== last));
    if (tokens && rest && tokens.length % rest === 0) shape.value = `[${now.map((size, at) => (at === last ? tokens.length / rest : size)).join(", ")}]`;
  } catch {
    // Not complete yet.
  }
}

/** Write values as nested lists of this shape; `word` writes one value. */
function nested(tokens, shape, word) {
  if (!shape.length) return word(tokens[0]);
  const [size, ...inner] = shape;
  const step = product(inner);
  const parts = Array.from({ length: size }, (_, at) => nested(tokens.slice(at * step, (at + 1) * step), inner, word));
  return `[${parts.join(", ")}]`;
}

const WORDS = { true: "True", false: "False", null: "None" };
const pythonic = (token) => (token[0] === '"' ? quoted(JSON.parse(token)) : (WORDS[token] ?? token));

/** Return the request: the JSON of its body, and how many zero bytes follow. */
function bodyOf({ streams, binary }, inputs) {
  if (streams) {
    const texts = inputs.map(({ name, json, shape, datatype }) => `${quoted(name)}: ${json ?? JSON.stringify(Array(product(shape)).fill(datatype === "BYTES" ? "" : datatype === "BOOL" ? false : 0))}`);
    return { text: `{${texts.join(", ")}}`, zeros: 0 };
  }
  const tensor = ({ name, datatype, shape, json, zeros }) => {
    const values = json ? `"data": ${json}` : `"parameters": {"binary_data_size": ${zeros}}`;
    return `{"name": ${quoted(name)}, "datatype": "${datatype}", "shape": ${JSON.stringify(shape)}, ${values}}`;
  };
  const parameters = binary ? ', "parameters": {"binary_data_output": true}' : "";
  const zeros = inputs.reduce((sum, each) => sum + (each.zeros ?? 0), 0);
  return { text: `{"inputs": [${inputs.map(tensor).join(", ")}]${parameters}}`, zeros };
}

function curl({ url, key, streams, binary }, path, inputs) {
  const { text, zeros } = bodyOf({ streams, binary }, inputs);
  const words = ["curl", ...(streams ? ["-N"] : []), shell(url + path)];
  if (key) words.push(`-H ${shell(`${key}: `)}"$KEY"`);
  if (binary) words.push("--output answer.bin");
  if (!zeros) return [...words, "-d", shell(text)].join(" ");
  words.push(`-H 'Inference-Header-Content-Length: ${utf8(text).length}'`, "--data-binary @-");
  return `(printf %s ${shell(text)}; head -c ${zeros} /dev/zero) | ${words.join(" ")}`;
}

function python({ url, key, streams, model, version }, inputs) {
  const zeros = ({ datatype, shape }) => (datatype === "BYTES" ? `np.full(${tuple(shape)}, "", object)` : `np.zeros(${tuple(shape)}, np.${NUMPY[datatype]})`);
  const tuple = (shape) => `(${shape.join(", ")}${shape.length === 1 ? "," : ""})`;
  const values = inputs.map((each) => `${quoted(each.name)}: ${each.json ? nested(each.tokens, each.shape, pythonic) : zeros(each)}`);
  const imports = [...(key ? ["import os", ""] : []), ...(inputs.some((each) => !each.json) ? ["import numpy as np", ""] : []), "from nerite.client import Client", ""];
  const client = `Client(${quoted(url)}${key ? `, headers={${quoted(key)}: os.environ["KEY"]}` : ""})`;
  const call = `(${quoted(model)}, {${values.join(", ")}}${version ? `, version=${quoted(version)}` : ""})`;
  const lines = streams
    ? [`    for response in client.stream${call}:`, "        print(response)"]
    : [`    for name, values in client.infer${call}.items():`, "        print(name, values)"];
  return [...imports, `with ${client} as client:`, ...lines].join("\n");
}

function commandLine({ url, key, streams, model, version, batches }, inputs) {
  const value = ({ datatype, shape, json, tokens }) => {
    const [only] = tokens;
    const text = datatype === "BYTES" && tokens.length === 1 && only[0] === '"' ? JSON.parse(only) : null;
    if (text !== null && !/^[@["]/.test(text)) return text;
    return json ? nested(tokens, shape, (token) => token) : "";
  };
  const words = ["nerite", "client", "--url", shell(url), ...(key ? ["--header", `${shell(`${key}: `)}"$KEY"`] : []), "infer", shell(model)];
  if (version) words.push("--version", version);
  words.push(...inputs.filter(({ json }) => json).map((each) => shell(`${each.name}=${value(each)}`)));
  // Zeros are not sent from the command line, but random values are.
  const random = inputs.filter(({ json }) => !json);
  if (random.length) words.push("--random");
  for (const { name, shape, declared } of random) {
    const [own, sizes] = batches ? [declared.slice(1), shape.slice(1)] : [declared, shape];
    if (own.includes(-1)) words.push("--shape", shell(`${name}:${sizes}`));
  }
  if (streams) words.push("--stream");
  return words.join(" ");
}

function inputsOf(form) {
  const inputs = [...form.querySelectorAll("fieldset")].map(read).filter(Boolean);
  for (const { name, shape, tokens } of inputs) {
    if (tokens && tokens.length !== product(shape)) throw new Error(`${name} has ${tokens.length} values, but its shape ${JSON.stringify(shape)} has ${product(shape)}.`);
  }
  return inputs;
}

let language = "curl";

/** Show the command of a form in the chosen language, or why its values make none. */
function write(form) {
  const panel = form.querySelector("[role=tabpanel]");
  for (const tab of form.querySelectorAll("[role=tab]")) {
    const chosen = tab.dataset.language === language;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    if (chosen) panel.setAttribute("aria-labelledby", tab.id);
  }
  try {
    const inputs = inputsOf(form);
    const { dataset } = form;
    const path = form.getAttribute("action");
    panel.textContent = language === "curl" ? curl(dataset, path, inputs) : language === "python" ? python(dataset, inputs) : commandLine(dataset, inputs);
    panel.className = "";
  } catch (error) {
    panel.textContent = error.message;
    panel.className = "wrong";
  }
}

function request(form) {
  const headers = { "Content-Type": "application/json" };
  const { key } = form.dataset;
  if (key) headers[key] = form.elements[key].value;
  const { text, zeros } = bodyOf(form.dataset, inputsOf(form));
  const bytes = utf8(text);
  if (zeros) headers["Inference-Header-Content-Length"] = bytes.length;
  return { method: "POST", headers, body: new Blob([bytes, new Uint8Array(zeros)]) };
}

async function show(answer, output) {
  output.textContent = `${answer.status} ${answer.statusText}\n`;
  const size = answer.headers.get("Inference-Header-Content-Length");
  if (size) {
    const bytes = await answer.arrayBuffer();
    const json = new TextDecoder().decode(bytes.slice(0, size));
    output.textContent += `${json}\nfollowed by ${bytes.byteLength - size} bytes of tensors`;
    return;
  }
  const decoder = new TextDecoder();
  const reader = answer.body.getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    output.textContent += decoder.decode(part.value, { stream: true });
  }
}

const forms = [...document.querySelectorAll("form")];

function choose(form, tab) {
  language = tab.dataset.language;
  forms.forEach(write);
  form.querySelector("[role=tab][aria-selected=true]").focus();
}

for (const form of forms) {
  const tabs = [...form.querySelectorAll("[role=tab]")];
  tabs.forEach((tab, at) => {
    tab.addEventListener("click", () => choose(form, tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      choose(form, tabs.at((at + step) % tabs.length));
    });
  });
  form.addEventListener("input", ({ target }) => {
    const field = target.closest("fieldset");
    if (target.name === "data") fit(field);
    if (field) write(form);
  });
  const button = form.querySelector("button.copy");
  button.addEventListener("click", () => {
    getSelection().selectAllChildren(form.querySelector("[role=tabpanel]"));
    // Unlike navigator.clipboard, this also works on pages loaded over plain HTTP.
    button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const output = form.querySelector("output");
    output.textContent = "…";
    try {
      await show(await fetch(form.getAttribute("action"), request(form)), output);
    } catch (error) {
      output.textContent = error.message;
    }
  });
  write(form);
}
