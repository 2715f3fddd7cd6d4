// Table that updates only the cells that change, so that text selections and the focus are kept.

import { element, say } from "./elements.js";

/** A table of more columns, or with sentences, becomes cards on narrow screens. */
const FEW = 4;

export class Table {
  /** `columns`: name and CSS class of each column. The first column is the row header, with an optional link. `empty`: shown without rows. */
  constructor(columns, ...empty) {
    this.columns = columns;
    this.body = element("tbody");
    const heads = columns.map(([name, kind = ""]) => element("th", { scope: "col", className: kind }, name));
    const head = element("thead", {}, element("tr", {}, ...heads));
    const large = columns.length > FEW || columns.some(([, kind]) => kind === "words");
    this.wide = element("div", { className: "wide" }, element("table", { className: large ? "list cards" : "list" }, head, this.body));
    this.empty = empty.length ? element("p", { className: "muted", hidden: true }, ...empty) : null;
    this.root = element("div", {}, this.wide, ...(this.empty ? [this.empty] : []));
  }

  /** Show rows: each has `texts`, an `href` for the first, and `colour` and `why` for a cell of the class `status`. */
  show(rows) {
    while (this.body.children.length < rows.length) this.body.append(this.row());
    while (this.body.children.length > rows.length) this.body.lastChild.remove();
    if (this.empty) this.wide.hidden = !(this.empty.hidden = rows.length > 0);
    rows.forEach((row, at) => this.fill(this.body.children[at], row));
  }

  row() {
    const cells = this.columns.map(([head, kind = ""], column) => {
      if (!column) return element("th", { scope: "row" }, element("a"));
      return element("td", { className: kind, "data-head": head }, ...(kind === "status" ? [element("span"), element("small")] : []));
    });
    return element("tr", {}, ...cells);
  }

  fill(root, { href, colour = "idle", why = "", texts }) {
    texts.forEach((text, column) => {
      const cell = root.children[column];
      if (!column) {
        say(cell.firstChild, text);
        if (href && cell.firstChild.getAttribute("href") !== href) cell.firstChild.href = href;
      } else if (this.columns[column][1] === "status") {
        const [state, reason] = cell.children;
        say(state, text);
        state.className = `state ${colour}`;
        say(reason, why);
        reason.title = why;
      } else {
        say(cell, text);
      }
    });
  }
}
