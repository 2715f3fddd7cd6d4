// Draws the plots of a report with uPlot. The attribute `data-plot` of each element `.plot` holds its axes and series.

const HEIGHT = 260;
const LOG_SPAN = 50; // An axis is logarithmic if its largest value is at least this many times the smallest.
const CLOSEST = 0.09; // Minimum distance of two labels on an axis of levels, as a fraction of its length.
const dark = matchMedia("(prefers-color-scheme: dark)");
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

const figure = (value) => (value === null ? "" : (value >= 1000 ? whole : digits).format(value));

/** Return the columns that uPlot takes: all x values in ascending order, and one column of y values per series. */
function aligned(series) {
  const rows = new Map();
  series.forEach(({ points }, at) => {
    const seen = new Map();
    for (const [x, y] of points) {
      // Several points of one series may have the same x value; each needs its own row.
      const key = `${x} ${seen.get(x) ?? 0}`;
      seen.set(x, (seen.get(x) ?? 0) + 1);
      if (!rows.has(key)) rows.set(key, [x, ...series.map(() => null)]);
      rows.get(key)[at + 1] = y;
    }
  });
  const sorted = [...rows.values()].sort((one, other) => one[0] - other[0]);
  return [null, ...series].map((_, column) => sorted.map((row) => row[column]));
}

/** Return a scale that starts at 0, or is logarithmic if the values span a wide range. */
function scaleOf(values) {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const log = least > 0 && most / least >= LOG_SPAN;
  const power = (round, value) => 10 ** round(Math.log10(value));
  return { log, range: log ? [power(Math.floor, least), power(Math.ceil, most)] : [0, most > 0 ? most * 1.03 : 1] };
}

/** Return the scale of an axis of load levels: logarithmic if the levels grow by a factor rather than by steps. */
function scaleOfLevels(levels) {
  const [least, most] = [levels[0], levels.at(-1)];
  const log = levels.length > 2 && most - levels.at(-2) > 2 * (levels[1] - least);
  const place = (value) => (log ? Math.log(value / least) / Math.log(most / least) : (value - least) / (most - least));
  const labels = [];
  for (const level of levels) {
    if (!labels.length || place(level) - place(labels.at(-1)) >= CLOSEST) labels.push(level);
  }
  return { log, range: [least, most], labels };
}

class ReportPlot {
  constructor(element) {
    this.element = element;
    this.plot = JSON.parse(element.dataset.plot);
    this.data = aligned(this.plot.series);
    this.x = this.plot.levels.length > 1 ? scaleOfLevels(this.plot.levels) : scaleOf(this.data[0]);
    this.y = scaleOf(this.plot.series.flatMap(({ points, errors }) => points.flatMap(([, y], at) => [y, y + (errors[at] ?? 0)])));
    this.drawing = null;
    new ResizeObserver(() => this.resize()).observe(element);
    dark.addEventListener("change", () => this.draw());
  }

  resize() {
    const width = this.element.clientWidth;
    if (!this.drawing) this.draw();
    else if (width !== this.drawing.width) this.drawing.setSize({ width, height: HEIGHT });
  }

  draw() {
    this.drawing?.destroy();
    this.drawing = new uPlot(this.options(), this.data, this.element);
  }

  options() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const font = "12px system-ui, sans-serif";
    const axis = (label, scale) => ({
      label,
      font,
      labelFont: font,
      labelSize: 20,
      stroke: colour("faint"),
      grid: { stroke: colour("grid"), width: 1 },
      ticks: { show: false },
      values: (_, values) => values.map(figure),
      ...(scale.labels && { splits: () => scale.labels, filter: (_, values) => values }),
    });
    const [first, last] = [this.data[0][0], this.data[0].at(-1)];
    return {
      width: this.element.clientWidth,
      height: HEIGHT,
      padding: [10, 26, 0, 0],
      cursor: { y: false, hover: { skip: [null] } },
      legend: { markers: { width: 0, fill: (_, at) => colour(`s${this.plot.series[at - 1].colour}`) } },
      scales: {
        // Zoomed in, only the part that was selected.
        x: {
          time: false,
          distr: this.x.log ? 3 : 1,
          range: (_, low, high) => (low === first && high === last ? this.x.range : [low, high]),
        },
        y: { distr: this.y.log ? 3 : 1, range: () => this.y.range },
      },
      axes: [
        { ...axis(this.plot.x, this.x), space: 56, size: 32 },
        { ...axis(this.plot.y, this.y), space: 36, size: 56 },
      ],
      series: [{}, ...this.plot.series.map((series) => this.series(series, colour))],
      hooks: { draw: [(plot) => this.errors(plot, colour)] },
    };
  }

  /** Draw the error bars. */
  errors(plot, colour) {
    const { ctx, bbox } = plot;
    const pixel = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left - 5 * pixel, bbox.top, bbox.width + 10 * pixel, bbox.height);
    ctx.clip();
    ctx.lineWidth = 1.5 * pixel;
    for (const { points, errors, colour: number } of this.plot.series) {
      ctx.strokeStyle = colour(`s${number}`);
      ctx.beginPath();
      errors.forEach((error, at) => {
        if (!error) return;
        const [x, y] = points[at];
        const place = plot.valToPos(x, "x", true);
        // On a logarithmic axis there is no place for what is not above 0.
        const low = this.y.log ? Math.max(y - error, this.y.range[0]) : Math.max(0, y - error);
        const [from, to] = [low, y + error].map((value) => plot.valToPos(value, "y", true));
        ctx.moveTo(place, from);
        ctx.lineTo(place, to);
        for (const end of [from, to]) {
          ctx.moveTo(place - 4 * pixel, end);
          ctx.lineTo(place + 4 * pixel, end);
        }
      });
      ctx.stroke();
    }
    ctx.restore();
  }

  series({ name, points, joined, dotted, colour: number }, colour) {
    const stroke = colour(`s${number}`);
    const line = (plot) => {
      // In the order of the points and not of their x values: under too much load, throughput may decrease.
      const path = new Path2D();
      for (const [x, y] of points) path.lineTo(plot.valToPos(x, "x", true), plot.valToPos(y, "y", true));
      return { stroke: path, fill: null, clip: null, band: null, gaps: null, flags: 1 };
    };
    return {
      label: name,
      stroke,
      width: 2,
      paths: joined ? line : () => null,
      points: { show: dotted, size: 7, fill: stroke, stroke },
      value: (plot, value, _, row) => (row === null ? "" : `${figure(value)} at ${figure(plot.data[0][row])}`),
    };
  }
}

for (const element of document.querySelectorAll(".plot")) new ReportPlot(element);
