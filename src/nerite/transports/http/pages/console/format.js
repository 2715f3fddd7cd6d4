// Formats quantities for people. A missing value is shown as `–`.

const NOTHING = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

const scaled = (steps) => (value) => {
  if (value === null || value === undefined || Number.isNaN(value)) return NOTHING;
  if (value === 0) return "0";
  const [size, unit] = steps.find(([least]) => Math.abs(value) >= least) ?? steps.at(-1);
  return `${short.format(value / size)} ${unit}`;
};

export const seconds = scaled([[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]);
/** Format milliseconds, or nothing for null. */
export const milliseconds = (value) => seconds(value === null ? null : value / 1000);
export const bytes = scaled([[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]]);

/** Format a rate or a mean with three significant digits, or as an integer from 1000. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NOTHING;
  return (Math.abs(value) < 1000 ? short : whole).format(value);
}

const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export const share = (value) => (value === null || Number.isNaN(value) ? NOTHING : `${tenths.format(value * 100)} %`);

/** Format a rate that may be small, as a percentage with three significant digits. */
export const rate = (value) => (value === null || Number.isNaN(value) ? NOTHING : `${number(value * 100)} %`);

/** Format a relative change with its sign. */
export const change = (value) => `${value < 0 ? "−" : "+"}${share(Math.abs(value))}`;

/** Format a duration in its two largest units, of which the second is left out if it is 0. */
export function span(seconds) {
  const units = [["d", 86_400], ["h", 3600], ["min", 60], ["s", 1]];
  const at = units.findIndex(([, size]) => seconds >= size);
  if (at < 0) return "0 s";
  let rest = Math.floor(seconds);
  const parts = units.slice(at, at + 2).map(([unit, size]) => {
    const count = Math.floor(rest / size);
    rest -= count * size;
    return count ? `${count} ${unit}` : "";
  });
  return parts.filter(Boolean).join(" ");
}

const UNITS = { ms: 0.001, s: 1, m: 60, h: 3600, d: 86_400 };

/** Format a duration as it is configured, such as 90s or 1h30m. */
export function configured(text) {
  const parts = [...text.matchAll(/([\d.]+)(ms|[smhd])/g)].map(([, count, unit]) => Number(count) * UNITS[unit]);
  const sum = parts.reduce((total, part) => total + part, 0);
  return sum < 1 ? seconds(sum) : span(sum);
}
