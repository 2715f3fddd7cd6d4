// Base class of pages that poll one endpoint, one request at a time, because a thousand workers take a while.

import * as server from "./server.js";

export class Polled {
  data = null;

  /** Subclasses show `data` in `show`. */
  constructor(console, path) {
    this.console = console;
    this.path = path;
  }

  async update() {
    if (this.asking) return;
    this.asking = true;
    let refusal = "";
    try {
      this.data = await server.get(this.path);
    } catch (error) {
      if (error.status) refusal = error.message; // Status 0: no connection, which the header already shows.
    }
    this.asking = false;
    if (this.closed) return;
    this.console.warn("page", refusal);
    if (this.data) this.show();
  }

  close() {
    this.closed = true;
    this.console.warn("page", "");
  }
}
