// Keys of restricted endpoints: requested from the user when needed, and kept until the tab is closed.

import { askInDialog } from "./dialog.js";
import { element } from "./elements.js";

const STORE = "nerite-keys";
const kept = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
const declined = new Set();
let asking = Promise.resolve();

/** Return the headers with all known keys. */
export const headers = () => ({ ...kept });

/**
 * Ask the user for a key after a request with the value `used` was rejected; return whether there is a new value.
 * A user who has declined is asked again only with `insist`.
 */
export function askFor(header, used, insist) {
  asking = asking.then(() => askOnce(header, used, insist)); // One dialog at a time.
  return asking;
}

async function askOnce(header, used, insist) {
  if (kept[header] !== used) return true; // Another request got it in the meantime.
  if (declined.has(header) && !insist) return false;
  const input = element("input", { type: "password", name: "key", autocomplete: "off", required: true });
  const why = used === undefined ? "This needs a key." : "The server rejected the key.";
  const content = [
    element("p", {}, `${why} Keys are kept until this tab is closed.`),
    element("label", {}, element("code", {}, header), input),
  ];
  const answer = await askInDialog("Restricted", content, "Unlock", "Not now");
  if (answer === null) return false; // Another page was opened: it asks again.
  const given = answer && input.value;
  declined[given ? "delete" : "add"](header);
  if (!given) return false;
  kept[header] = given;
  sessionStorage.setItem(STORE, JSON.stringify(kept));
  return true;
}
