// Page of the batches: progress, deadline and predicted end. Shown only if the server has a database for them.

import { element } from "./elements.js";
import * as format from "./format.js";
import { Polled } from "./polled.js";
import { Table } from "./table.js";

const COLUMNS = [
  ["Batch"], ["Status", "status"], ["Model"], ["Completed", "number"], ["Failed", "number"], ["Of", "number"],
  ["Deadline in", "number"], ["Predicted in", "number"],
];
const COLOURS = { completed: "good", failed: "bad", expired: "bad", in_progress: "good" };

export class Batches extends Polled {
  title = "Batches";

  constructor(console) {
    super(console, "v1/batches?limit=100");
    const command = element("code", {}, "nerite batch run FILE.jsonl -o ANSWERS.jsonl");
    this.table = new Table(COLUMNS, "There are no batches. Run one with: ", command);
    this.root = element("div", {}, element("h1", {}, "Batches"), this.table.root);
  }

  show() {
    this.table.show(this.data.data.map(row));
  }
}

function row({ id, status, model, endpoint, errors, request_counts: counts, expires_at: deadline, estimated_completion_at: end }) {
  const over = ["completed", "failed", "expired", "cancelled"].includes(status);
  const until = (at) => (over || at === null ? "–" : format.span(Math.max(at - Date.now() / 1000, 0)));
  const late = !over && end !== null && end > deadline;
  return {
    colour: late ? "bad" : COLOURS[status],
    why: late ? "predicted to miss its deadline" : (errors?.data[0]?.message ?? ""),
    texts: [
      id, status.replaceAll("_", " "), model ?? endpoint,
      ...[counts.completed, counts.failed, counts.total].map(format.number), until(deadline), until(end),
    ],
  };
}
