// Page of the ledger: what the requests of each tenant used this month. Shown only if the server has a ledger.

import { element } from "./elements.js";
import * as format from "./format.js";
import { Polled } from "./polled.js";
import { Table } from "./table.js";

const AMOUNTS = [
  ["Requests", "number"], ["Prompt tokens", "number"], ["Cached tokens", "number"], ["Answer tokens", "number"],
  ["Queue", "number"], ["Compute", "number"], ["Prefill", "number"], ["Decode", "number"],
];

const PAUSE = 15_000; // Milliseconds: summing up a month takes a while.

export class Usage extends Polled {
  title = "Usage";
  asked = 0;

  constructor(console) {
    super(console, "v2/usage?group_by=tenant,model,ending");
    const empty = "There have been no requests this month.";
    this.tenants = new Table([["Tenant"], ["Model"], ...AMOUNTS], empty);
    this.endings = new Table([["Ending"], ...AMOUNTS], empty);
    const part = (title, table) => element("section", { className: "bare" }, element("h2", {}, title), table.root);
    this.root = element(
      "div",
      {},
      element("h1", {}, "Usage this month"),
      part("By tenant and model", this.tenants),
      part("By how requests ended", this.endings),
    );
  }

  async update() {
    if (Date.now() - this.asked < PAUSE) return;
    this.asked = Date.now();
    await super.update();
  }

  async unlock() {
    this.asked = 0;
    await super.unlock();
  }

  show() {
    const { data = [] } = this.data;
    this.tenants.show(grouped(data, ["tenant", "model"]));
    this.endings.show(grouped(data, ["ending"]));
  }
}

/** Return a row for each group of sums, with what they have in common and the sums of their amounts. */
function grouped(data, names) {
  const groups = new Map();
  for (const each of data) {
    const key = JSON.stringify(names.map((name) => each[name]));
    groups.set(key, [...(groups.get(key) ?? []), each]);
  }
  return [...groups.values()].map((members) => {
    const total = (name) => members.reduce((sum, each) => sum + each[name], 0);
    const counts = ["requests", "prompt_tokens", "cached_tokens", "answer_tokens"].map((name) => format.number(total(name)));
    const times = ["queue_seconds", "compute_seconds", "prefill_seconds", "decode_seconds"].map((name) => format.seconds(total(name)));
    return { texts: [...names.map((name) => members[0][name] || "everybody"), ...counts, ...times] };
  });
}
