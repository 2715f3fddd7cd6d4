// Form fields for the input tensors of a model, and its output tensors as text.

import { element } from "./elements.js";

const SHOWN = 4000;

/** Form field for an input; `shape` is as the model declares it, with -1 for any size, and `sample` what it has at first. */
export class TensorField {
  constructor({ name, datatype, shape }, optional, { shape: sample, text }) {
    this.name = name;
    this.datatype = datatype;
    this.optional = optional;
    // A single string is entered as plain text; everything else is JSON.
    this.isText = datatype === "BYTES" && size(sample) === 1;
    const empty = optional ? "Leave empty to omit" : "Leave empty for zeros";
    this.shape = element("input", { value: JSON.stringify(sample), size: 14, "aria-label": `Shape of ${name}`, spellcheck: false });
    this.data = element("textarea", {
      rows: this.isText ? 3 : 2,
      "aria-label": `${this.isText ? "Text" : "Data"} of ${name}`,
      placeholder: this.isText && !optional ? "" : empty,
      spellcheck: this.isText,
      value: text,
    });
    this.root = element(
      "fieldset",
      {},
      element("legend", {}, element("strong", {}, name), ` ${datatype} `, ...(shape.some((size) => size < 0) ? ["shape ", this.shape] : [JSON.stringify(sample)])),
      this.data,
    );
  }

  /** Return the tensor as a request contains it, or null if it is omitted. Throws if the input is not valid JSON. */
  read() {
    const text = this.data.value;
    if (this.optional && text.trim() === "") return null;
    const shape = this.json(this.shape.value, "shape");
    const data = this.isText ? [text] : text.trim() === "" ? this.zeros(shape) : [this.json(text, "data")].flat(Infinity);
    return { name: this.name, datatype: this.datatype, shape, data };
  }

  json(text, what) {
    try {
      return JSON.parse(text);
    } catch (error) {
      throw new Error(`The ${what} of ${this.name} is not JSON: ${error.message}`);
    }
  }

  zeros(shape) {
    const zero = { BYTES: "", BOOL: false }[this.datatype] ?? 0;
    return new Array(size(shape)).fill(zero);
  }
}

const size = (shape) => shape.reduce((product, each) => product * each, 1);

/** Return whether an input is an image: by its format, or because its first or last dimension is 1 or 3 channels. */
export function isPicture({ data_type: type, format, dims }) {
  if (type === "TYPE_STRING") return false;
  if (format === "FORMAT_NCHW" || format === "FORMAT_NHWC") return true;
  const sizes = dims.map(Number);
  return sizes.length === 3 && [sizes[0], sizes[2]].some((colours) => colours === 3 || colours === 1);
}

/** Return an element that shows an output. */
export function shown({ name, datatype, shape, data }) {
  const text = datatype === "BYTES" && data.length === 1 && typeof data[0] === "string" ? data[0] : JSON.stringify(data);
  const cut = text.length > SHOWN ? `${text.slice(0, SHOWN)} …` : text;
  return element("div", {}, element("dt", {}, `${name} ${datatype} ${JSON.stringify(shape)}`), element("dd", {}, element("pre", {}, cut)));
}
