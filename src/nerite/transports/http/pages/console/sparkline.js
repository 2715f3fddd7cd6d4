// A small line without axes, which shows how a number has changed. Its values are told elsewhere in words.

import { shape } from "./elements.js";

const SIZE = { width: 72, height: 20 };

export class Sparkline {
  constructor() {
    this.line = shape("polyline", { class: "line" });
    this.area = shape("polygon", { class: "area" });
    const box = `0 0 ${SIZE.width} ${SIZE.height}`;
    this.root = shape("svg", { class: "spark", viewBox: box, "aria-hidden": "true", ...SIZE }, this.area, this.line);
  }

  /** Show values, oldest first; nothing if they are all zero. */
  show(values) {
    const most = Math.max(0, ...values);
    const shown = most > 0 && values.length > 1;
    this.root.toggleAttribute("data-empty", !shown);
    const step = SIZE.width / Math.max(values.length - 1, 1);
    const place = (value, at) => `${(at * step).toFixed(1)},${(SIZE.height - 1 - (value / most) * (SIZE.height - 3)).toFixed(1)}`;
    const points = shown ? values.map(place).join(" ") : "";
    if (this.points === points) return;
    this.points = points;
    this.line.setAttribute("points", points);
    this.area.setAttribute("points", shown ? `0,${SIZE.height} ${points} ${SIZE.width},${SIZE.height}` : "");
  }
}
