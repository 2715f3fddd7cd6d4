// Modal dialogs. Esc cancels, and the focus returns to where it was.

import { element } from "./elements.js";

const open = new Set();

/**
 * Show a dialog with `content` above the buttons; return whether the `yes` button was chosen, or null if another page was
 * opened meanwhile.
 */
export function askInDialog(title, content, yes, no = "Cancel") {
  const heading = element("h2", { id: "dialog-title" }, title);
  const buttons = element(
    "p",
    { className: "actions" },
    element("button", { type: "submit", value: "yes", className: "main" }, yes),
    element("button", { type: "submit", value: "no", formNoValidate: true }, no),
  );
  const form = element("form", { method: "dialog" }, heading, ...content, buttons);
  const shown = element("dialog", { "aria-labelledby": "dialog-title" }, form);
  document.body.append(shown);
  open.add(shown);
  shown.showModal();
  return new Promise((done) => {
    shown.addEventListener("close", () => {
      open.delete(shown);
      shown.remove();
      done(shown.returnValue === "left" ? null : shown.returnValue === "yes");
    });
  });
}

/** Close all dialogs: they belong to a page that is no longer shown. */
export function closeDialogs() {
  for (const shown of open) shown.close("left");
}
