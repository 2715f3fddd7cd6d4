// Questions that have to be answered first. Esc is no, and the focus goes back to where it was.

import { element } from "./elements.js";

/** Ask; return whether the answer was the button that says `yes`. `content` is what stands above the buttons. */
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
  shown.showModal();
  return new Promise((done) => {
    shown.addEventListener("close", () => {
      shown.remove();
      done(shown.returnValue === "yes");
    });
  });
}
