// Parser of the metrics page: Prometheus's text format to numbers by model version.

/** Metrics that are read, and their names here. Samples with different labels are added up. */
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

/** A cumulative histogram, as in the metrics: counts up to each bound, the last of which is infinite. */
export const emptyHistogram = () => ({ bounds: [], counts: [], sum: 0 });

/** Return `versions` (by `key` of model and version) and `machine`. Histograms of stages are `stage:queue` and so on. */
export function parse(text) {
  const versions = new Map();
  const machine = {};
  const of = (labels) => {
    const at = key(labels.model, labels.version);
    if (!versions.has(at)) versions.set(at, {});
    return versions.get(at);
  };
  // Most lines are buckets that differ from the previous line only in the bound: their labels are parsed once.
  let before = "";
  let histogram = null;
  for (const line of text.split("\n")) {
    if (line === "" || line[0] === "#") continue;
    const space = line.lastIndexOf(" ");
    const value = number(line.slice(space + 1));
    const bound = line.lastIndexOf('le="');
    if (bound > 0 && line.startsWith(before) && bound === before.length) {
      histogram?.bounds.push(number(line.slice(bound + 4, space - 2)));
      histogram?.counts.push(value);
      continue;
    }
    const brace = line.indexOf("{");
    const name = line.slice(0, brace < 0 ? space : brace);
    if (name in MACHINE) machine[MACHINE[name]] = value;
    if (name in COUNTS) {
      const counts = of(read(line));
      counts[COUNTS[name]] = (counts[COUNTS[name]] ?? 0) + value;
      continue;
    }
    const part = PART.exec(name);
    if (!part) continue;
    const spread = HISTOGRAMS[part[1]];
    const labels = spread && read(line);
    const within = labels?.stage ? `stage:${labels.stage}` : spread;
    if (part[2] === "bucket") {
      before = line.slice(0, bound);
      histogram = spread ? (of(labels)[within] = emptyHistogram()) : null;
      histogram?.bounds.push(number(labels.le));
      histogram?.counts.push(value);
    } else if (part[2] === "sum" && spread) {
      (of(labels)[within] ??= emptyHistogram()).sum = value;
    }
  }
  return { versions, machine };
}

export const key = (model, version) => `${model}\n${version}`;

const number = (text) => (text.endsWith("Inf") ? Number(text.replace("Inf", "Infinity")) : Number(text));

function read(text) {
  const labels = {};
  for (const [, name, value] of text.matchAll(LABEL)) {
    labels[name] = value.replace(/\\(.)/g, (_, sign) => (sign === "n" ? "\n" : sign));
  }
  return labels;
}
