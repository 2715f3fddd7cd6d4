// HTTP client of the server, which uses only public endpoints and those under `/ui`.

import * as keys from "./keys.js";

const ROOT = new URL("..", import.meta.url);

/** An error reply, with the server's message. Status 0: the server did not answer. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Send a request with the known keys, asking the user for missing ones; return the response. Throws `Refusal` on errors. */
export async function ask(path, { insist = false, headers = {}, ...request } = {}) {
  for (;;) {
    const known = keys.headers();
    let answer;
    try {
      answer = await fetch(new URL(path, ROOT), { ...request, headers: { ...known, ...headers } });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refusal(0, "The server does not answer.");
    }
    if (answer.ok) return answer;
    const message = reason(await answer.text()) || `${answer.status} ${answer.statusText}`;
    // Under /v1, a missing key has the status that clients of OpenAI expect.
    const header = [401, 403].includes(answer.status) && /expecting header '([^']+)'/.exec(message)?.[1];
    if (!header) throw new Refusal(answer.status, message);
    if (!(await keys.askFor(header, known[header], insist))) throw new Refusal(403, message);
  }
}

function reason(text) {
  try {
    const { error } = JSON.parse(text);
    return error?.message ?? error;
  } catch {
    return text;
  }
}

export const get = async (path, options) => (await ask(path, options)).json();
export const post = async (path, body, options) =>
  (await ask(path, { method: "POST", body: JSON.stringify(body), ...options })).text();

/** Yield the data of the server-sent events of a response, as they arrive. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const parts = (rest + part.value).split("\n\n");
    rest = parts.pop();
    for (const event of parts) yield event.replace(/^data: /, "");
  }
}

/** Return the path of a model, or of one version of it. */
export const place = (model, version = "") => `v2/models/${model}${version && `/versions/${version}`}`;

/** Return every version in the repositories, whatever its state. */
export const index = async () => JSON.parse(await post("v2/repository/index", {}));
/** Return a note on model control if models cannot be loaded and unloaded by requests, else an empty string. */
export const controlNote = async () => (await get("ui/control")).note;
export const metrics = async () => (await ask("ui/metrics")).text();
export const load = (model) => post(`v2/repository/models/${model}/load`, {}, { insist: true });
export const unload = (model) => post(`v2/repository/models/${model}/unload`, {}, { insist: true });
