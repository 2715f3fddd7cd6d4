// The server, as a client sees it: the endpoints that there are for everybody.

import * as keys from "./keys.js";

const ROOT = new URL("..", import.meta.url);

/** What the server did not do, in its own words. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Ask, with the keys that are known and those that turn out to be needed; return the answer if it is good. */
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
    const header = answer.status === 403 && /expecting header '([^']+)'/.exec(message)?.[1];
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

/** Yield the data of the events of an answer, as they come. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const parts = (rest + part.value).split("\n\n");
    rest = parts.pop();
    for (const event of parts) yield event.replace(/^data: /, "");
  }
}

/** Where a model is, or one version of it. */
export const place = (model, version = "") => `v2/models/${model}${version && `/versions/${version}`}`;

/** Return every version that the repositories have, whatever its state. */
export const index = async () => JSON.parse(await post("v2/repository/index", {}));
/** Return how models come where they are not loaded and unloaded by calls; else nothing. */
export const controlNote = async () => (await get("ui/control")).note;
export const metrics = async () => (await ask("ui/metrics")).text();
export const load = (model) => post(`v2/repository/models/${model}/load`, {}, { insist: true });
export const unload = (model) => post(`v2/repository/models/${model}/unload`, {}, { insist: true });
