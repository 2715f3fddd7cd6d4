// The keys of restricted endpoints: asked for when they are needed, kept as long as the tab is open.

import { askInDialog } from "./dialog.js";
import { element } from "./elements.js";

const STORE = "nerite-keys";
const kept = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
const declined = new Set();
let asking = Promise.resolve();

/** Return the headers that open what was opened before. */
export const headers = () => ({ ...kept });

/**
 * Get the value of a header, after a call with the value `used` was refused; return whether there is a new one.
 * Who declined is asked again only if `insist`ed upon.
 */
export function askFor(header, used, insist) {
  asking = asking.then(() => askOnce(header, used, insist)); // One question at a time.
  return asking;
}

async function askOnce(header, used, insist) {
  if (kept[header] !== used) return true; // Somebody else got it in the meantime.
  if (declined.has(header) && !insist) return false;
  const input = element("input", { type: "password", name: "key", autocomplete: "off", required: true });
  const why = used === undefined ? "The server wants a key for this." : "The key that was given does not open this.";
  const content = [
    element("p", {}, `${why} It is kept until this tab is closed.`),
    element("label", {}, element("code", {}, header), input),
  ];
  const given = (await askInDialog("Restricted", content, "Open", "Not now")) && input.value;
  declined[given ? "delete" : "add"](header);
  if (!given) return false;
  kept[header] = given;
  sessionStorage.setItem(STORE, JSON.stringify(kept));
  return true;
}
