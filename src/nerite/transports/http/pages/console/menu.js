// A menu behind a button: a popover, which Esc and a click elsewhere close, and which the focus enters and leaves in order.

import { element } from "./elements.js";

const GAP = 4;

export class Menu {
  /** `items` are buttons and links. Each closes the menu. */
  constructor(label, ...items) {
    this.list = element("div", { className: "menu", popover: "auto" }, ...items);
    this.button = element("button", { type: "button", className: "dots", "aria-label": label, "aria-expanded": "false", popoverTargetElement: this.list }, "⋯");
    this.list.addEventListener("toggle", ({ newState }) => this.toggled(newState === "open"));
    for (const item of items) item.addEventListener("click", () => this.list.hidePopover());
    this.root = element("span", { className: "buttons" }, this.button, this.list);
  }

  toggled(open) {
    this.button.setAttribute("aria-expanded", String(open));
    if (!open) return;
    const button = this.button.getBoundingClientRect();
    const { width, height } = this.list.getBoundingClientRect();
    const below = button.bottom + GAP + height <= innerHeight;
    this.list.style.left = `${Math.max(GAP, Math.min(button.right - width, innerWidth - width - GAP))}px`;
    this.list.style.top = `${below ? button.bottom + GAP : Math.max(GAP, button.top - GAP - height)}px`;
  }

  close() {
    if (this.list.matches(":popover-open")) this.list.hidePopover();
  }
}
