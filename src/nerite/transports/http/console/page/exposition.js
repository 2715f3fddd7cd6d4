// The metrics page: Prometheus's text, as numbers of each model version.

/** Where a sample goes: its name here, and how samples of several labels become one. */
const COUNTS = {
  nv_inference_request_success: "success",
  nv_inference_request_failure: "failures",
  nv_inference_count: "rows",
  nv_inference_exec_count: "executions",
  nv_inference_pending_request_count: "pending",
  nv_model_load_duration_secs: "loadSeconds",
  nerite_queue_requests: "queue",
  nerite_worker_restarts_total: "restarts",
  nerite_model_memory_bytes: "memory",
  "vllm:prompt_tokens_total": "promptTokens",
  "vllm:generation_tokens_total": "generatedTokens",
  "vllm:num_requests_running": "running",
  "vllm:num_requests_waiting": "waiting",
  "vllm:kv_cache_usage_perc": "kvUsage",
};
const HISTOGRAMS = {
  nerite_request_duration_seconds: "whole",
  nerite_stage_duration_seconds: "stage",
  nerite_batch_rows: "batch",
  "vllm:time_to_first_token_seconds": "firstToken",
  "vllm:inter_token_latency_seconds": "betweenTokens",
};
const MACHINE = { nv_cpu_utilization: "cpu", nv_cpu_memory_used_bytes: "memoryUsed", nv_cpu_memory_total_bytes: "memoryTotal" };
const PART = /^(.*)_(bucket|sum|count)$/;
const LABEL = /([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;

/** A histogram as it is told: counts up to each bound, of which the last is infinite. */
export const emptyHistogram = () => ({ bounds: [], counts: [], sum: 0 });

/** Return `versions` (by `key` of model and version) and `machine`. Histograms of stages are `stage:queue` and so on. */
export function parse(text) {
  const versions = new Map();
  const machine = {};
  for (const line of text.split("\n")) {
    if (line === "" || line[0] === "#") continue;
    const end = line.search(/[{ ]/);
    const name = line.slice(0, end);
    const value = Number(line.slice(line.lastIndexOf(" ") + 1).replace("Inf", "Infinity"));
    if (name in MACHINE) machine[MACHINE[name]] = value;
    const counted = COUNTS[name];
    const part = counted ? null : PART.exec(name);
    const spread = part && HISTOGRAMS[part[1]];
    if (!counted && !spread) continue;
    const labels = read(line.slice(end));
    const at = key(labels.model, labels.version);
    if (!versions.has(at)) versions.set(at, {});
    const of = versions.get(at);
    if (counted) of[counted] = (of[counted] ?? 0) + value;
    else note((of[labels.stage ? `stage:${labels.stage}` : spread] ??= emptyHistogram()), part[2], labels.le, value);
  }
  return { versions, machine };
}

export const key = (model, version) => `${model}\n${version}`;

function note(histogram, part, bound, value) {
  if (part === "sum") histogram.sum = value;
  if (part !== "bucket") return;
  histogram.bounds.push(Number(bound.replace("Inf", "Infinity")));
  histogram.counts.push(value);
}

function read(text) {
  const labels = {};
  for (const [, name, value] of text.matchAll(LABEL)) {
    labels[name] = value.replace(/\\(.)/g, (_, sign) => (sign === "n" ? "\n" : sign));
  }
  return labels;
}
