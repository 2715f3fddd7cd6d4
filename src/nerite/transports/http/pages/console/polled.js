// A page of what one endpoint tells, asked again and again: once at a time, as a thousand workers take a while.

import * as server from "./server.js";

export class Polled {
  told = null;

  /** Whoever extends this shows what was `told`, in `show`. */
  constructor(console, path) {
    this.console = console;
    this.path = path;
  }

  async update() {
    if (this.asking) return;
    this.asking = true;
    let refusal = "";
    try {
      this.told = await server.get(this.path);
    } catch (error) {
      if (error.status) refusal = error.message; // Without a status nobody answers, which is said already.
    }
    this.asking = false;
    if (this.closed) return;
    this.console.warn("page", refusal);
    if (this.told) this.show();
  }

  close() {
    this.closed = true;
    this.console.warn("page", "");
  }
}
