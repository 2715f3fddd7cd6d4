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
const SOURCE = "nerite_model_memory_source";
/** How the memory of a version is known. */
export const MEMORY_SOURCES = {
  workers: "measured of its workers",
  load: "measured as the growth of the server's process during its load",
  files: "estimated by the size of its files: the server's process has grown by less during its load",
};
/** Failed requests are counted by the reason. */
const REASONS = "nerite_request_failures_total";
const MACHINE = { nv_cpu_utilization: "cpu", nv_cpu_memory_used_bytes: "memoryUsed", nv_cpu_memory_total_bytes: "memoryTotal" };
/** Of shadows: with the label that their counts are told apart by. */
const SHADOW_COUNTS = {
  nerite_shadow_requests_total: ["requests"],
  nerite_shadow_compared_total: ["compared", "result"],
  nerite_shadow_dropped_total: ["dropped", "reason"],
  nerite_shadow_labels_total: ["labels"],
  nerite_shadow_labels_agreed_total: ["agreed"],
};
const SHADOW_HISTOGRAMS = {
  nerite_shadow_distance: "distance",
  nerite_shadow_text_shared_ratio: "text",
  nerite_shadow_latency_difference_seconds: "latency",
};
/** Of loops beside the requests, by their names. */
const LOOPS = { nerite_background_stalled: "stalled", nerite_background_set_aside: "aside" };
const PART = /^(.*)_(bucket|sum|count)$/;
const LABEL = /([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;

/** A cumulative histogram, as in the metrics: counts up to each bound, the last of which is infinite. */
export const emptyHistogram = () => ({ bounds: [], counts: [], sum: 0 });

/** Return `versions` (by `key` of model and version), `machine`, `shadows`, and `loops`. Histograms of stages are `stage:queue` and so on. */
export function parse(text) {
  const versions = new Map();
  const machine = {};
  const ofShadows = [];
  const loops = new Map();
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
    if (line.startsWith("nerite_shadow_")) {
      ofShadows.push(line);
      continue;
    }
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
    if (name === REASONS) {
      const labels = read(line);
      if (value) (of(labels).reasons ??= {})[labels.reason] = value;
      continue;
    }
    if (name === SOURCE) {
      const labels = read(line);
      of(labels).memorySource = labels.source;
      continue;
    }
    if (name in LOOPS) {
      const { loop } = read(line);
      if (!loops.has(loop)) loops.set(loop, { loop, stalled: 0, aside: 0 });
      loops.get(loop)[LOOPS[name]] += value;
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
  return { versions, machine, shadows: readShadows(ofShadows), loops: [...loops.values()] };
}

/** Return what is known of each shadow from its lines: `route`, `arm`, `counts`, and `histograms`. */
function readShadows(lines) {
  const shadows = new Map();
  for (const line of lines) {
    const [name, space] = [line.slice(0, line.indexOf("{")), line.lastIndexOf(" ")];
    const [labels, value] = [read(line), number(line.slice(space + 1))];
    const at = key(labels.route, labels.arm);
    if (!shadows.has(at)) shadows.set(at, { route: labels.route, arm: labels.arm, counts: {}, histograms: {} });
    const { counts, histograms } = shadows.get(at);
    const [count, part] = SHADOW_COUNTS[name] ?? [];
    const [, base, kind] = PART.exec(name) ?? [];
    if (part) (counts[count] ??= {})[labels[part]] = value;
    else if (count) counts[count] = value;
    if (!(base in SHADOW_HISTOGRAMS)) continue;
    const histogram = (histograms[SHADOW_HISTOGRAMS[base]] ??= emptyHistogram());
    if (kind === "sum") histogram.sum = value;
    if (kind !== "bucket") continue;
    histogram.bounds.push(number(labels.le));
    histogram.counts.push(value);
  }
  return [...shadows.values()];
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
