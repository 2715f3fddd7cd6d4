// What has failed to load: the list above all models, and what is known of one failure.

import { element, say } from "./elements.js";
import { LogLines } from "./log.js";
import { stateOf } from "./models.js";

const LIBRARY = /\/(?:site|dist)-packages\/|\/lib\/python[\d.]+\/|^<frozen /;

/** Take the reason of a failure apart: what happened, the frames of the traceback, innermost first, which of them to mend, and what to do. */
export function explain(reason) {
  const [text, trace = ""] = reason.split(/\n+At:\n/);
  const [what, ...more] = text.split("\n").filter((line) => line.trim());
  const frames = [...trace.matchAll(/^\s*(.+)\((\d+)\): (.*)$/gm)].map(([, file, line, name]) => ({ file, line, name }));
  const remedy = more.filter((line) => /^\s{4}\S/.test(line)).map((line) => line.trim());
  const own = frames.find(({ file }) => !LIBRARY.test(file)) ?? frames[0];
  return { what: what ?? "", frames, own, remedy: remedy.join(" ") };
}

const link = ({ name, version }, part = "") => `#/models/${encodeURIComponent(name)}${version && `/${version}`}${part}`;

/** The list of the versions that failed to load. */
export class Failures {
  constructor() {
    this.list = element("ul");
    this.title = element("h2");
    this.root = element("section", { className: "failures", hidden: true, "aria-label": "Failures" }, this.title, this.list);
  }

  show(versions) {
    const failed = versions.filter((each) => stateOf(each)[1] === "bad");
    this.root.hidden = !failed.length;
    const text = JSON.stringify(failed);
    if (this.shown === text) return;
    this.shown = text;
    say(this.title, failed.length === 1 ? "1 model version failed to load" : `${failed.length} model versions failed to load`);
    this.list.replaceChildren(...failed.map(item));
  }
}

function item(version) {
  const { what, own, remedy } = explain(version.reason);
  return element(
    "li",
    {},
    element("a", { href: link(version) }, version.name, ...(version.version ? [` version ${version.version}`] : [])),
    element("span", {}, what),
    ...(own ? [element("code", {}, `${own.file}:${own.line}`)] : []),
    ...(remedy ? [element("span", { className: "muted" }, remedy)] : []),
  );
}

/** What is known of the failure of one version, with the recent log of its model. */
export class Failure {
  /** `retry` loads the model again. */
  constructor(name, retry) {
    this.name = name;
    this.place = element("div");
    this.log = new LogLines({ model: name, most: 50 });
    const whole = element("a", { className: "more", href: `#/log/${encodeURIComponent(name)}` }, "Whole log of this model");
    this.retry = element("button", { type: "button", className: "main", on: { click: retry } }, "Load again");
    const recent = element("div", {}, element("h3", {}, "Recent log"), this.log.root, whole);
    this.root = element("section", { className: "failures", hidden: true, "aria-label": "Why it failed" }, this.place, recent);
  }

  /** Show the reason of a version that failed, and how models are loaded here; nothing without a reason. */
  show(reason, fixed) {
    this.root.hidden = !reason;
    if (!reason) return;
    this.log.update();
    const shown = `${reason} ${fixed}`;
    if (this.shown === shown) return;
    this.shown = shown;
    const { what, frames, own, remedy } = explain(reason);
    const frame = ({ file, line, name }) => element("li", {}, element("code", {}, `${file}:${line}`), ` in ${name}`);
    const then = fixed ? "Then restart the server." : "Then load it again.";
    const mend = remedy || (own ? `Correct ${own.file}, line ${own.line}, or what it depends on.` : "");
    this.place.replaceChildren(
      element("h2", {}, "Why it failed"),
      element("p", { className: "reason" }, what),
      ...(frames.length ? [element("h3", {}, "Where"), element("ol", { className: "frames" }, ...frames.map(frame))] : []),
      ...(mend ? [element("h3", {}, "What to do"), element("p", {}, `${mend} ${then}`)] : []),
      ...(fixed ? [] : [element("p", { className: "bar" }, this.retry)]),
      element("details", {}, element("summary", {}, "The whole reason"), element("pre", {}, reason)),
    );
  }
}
