// Page of the tenants: usage and remaining quota. Shown only if the server has a policy.

import { element } from "./elements.js";
import * as format from "./format.js";
import { Polled } from "./polled.js";
import { Table } from "./table.js";

const LIMITS = [["Tenant"], ["Limit"], ["Per minute", "number"], ["Burst", "number"], ["Available", "number"]];
const STANDINGS = [["Tenant"], ["In flight", "number"], ["Maximum", "number"], ["Retries left", "number"]];
const USES = [
  ["Tenant"], ["Class"], ["Model"], ["Offered", "number"], ["Admitted", "number"], ["Rejected", "number"],
  ["Input", "number"], ["Output", "number"],
];

export class Tenants extends Polled {
  title = "Tenants";

  constructor(console) {
    super(console, "v2/quota");
    this.standings = new Table(STANDINGS, "The policy has no tenants.");
    this.limits = new Table(LIMITS, "No tenant has a limit of requests or tokens per minute.");
    this.uses = new Table(USES, "There have been no requests.");
    const part = (title, table) => element("section", { className: "bare" }, element("h2", {}, title), table.root);
    this.root = element(
      "div",
      {},
      element("h1", {}, "Tenants"),
      part("In flight", this.standings),
      part("Limits", this.limits),
      part("Usage since the server started", this.uses),
    );
  }

  show() {
    const { tenants = [], use = [] } = this.data;
    this.standings.show(
      tenants.map(({ tenant, under_way: now, concurrency, retries_left: left }) => ({
        texts: [tenant, String(now), concurrency ? String(concurrency) : "unlimited", format.number(left)],
      })),
    );
    this.limits.show(
      tenants.flatMap(({ tenant, rates }) =>
        rates.map(({ limit, per_minute: rate, burst, left }) => ({
          texts: [tenant, limit.replaceAll("_", " "), ...[rate, burst, left].map(format.number)],
        })),
      ),
    );
    this.uses.show(
      use.map((each) => ({
        texts: [each.tenant, each.class, each.model, ...[each.offered, each.admitted, total(each.refused)].map(format.number), ...sizes(each)],
      })),
    );
  }
}

const total = (counts) => Object.values(counts).reduce((sum, count) => sum + count, 0);
const sizes = ({ input_bytes: bytes, input_tokens: tokens, output_tokens: made }) =>
  bytes === undefined ? [`${format.number(tokens)} tokens`, `${format.number(made)} tokens`] : [format.bytes(bytes), "–"];
