// Base class of pages that poll one endpoint, one request at a time, because a thousand workers take a while.

import { element } from "./elements.js";
import * as server from "./server.js";

export class Polled {
  data = null;

  /** Subclasses show `data` in `show`, and `locked`, which says what to do if the key of `category` is missing. */
  constructor(console, path, category = "") {
    this.console = console;
    this.path = path;
    const why = `This page needs the key of the category ${category}, which whoever runs the server has set by --http-restricted-api.`;
    const unlock = element("button", { type: "button", on: { click: () => this.unlock() } }, "Enter the key");
    this.locked = element("section", { className: "locked", hidden: true }, element("p", {}, why), unlock);
  }

  async update() {
    if (this.asking) return;
    this.asking = true;
    let refusal = "";
    let locked = false;
    try {
      this.data = await server.get(this.path);
    } catch (error) {
      if (error.status) refusal = error.message; // Status 0: no connection, which the header already shows.
      locked = error.status === 403;
    }
    this.asking = false;
    if (this.closed) return;
    this.console.warn("page", refusal);
    this.locked.hidden = !locked;
    if (this.data) this.show();
  }

  /** Ask for the key again, although the user has declined. */
  async unlock() {
    await server.get(this.path, { insist: true }).catch(() => {}); // What is refused is shown by the next poll.
    await this.update();
  }

  close() {
    this.closed = true;
    this.console.warn("page", "");
  }
}
