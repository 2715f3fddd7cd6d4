// Markdown as language models write it, as elements. Made from data only: text never becomes markup, links lead to http(s) only,
// and images are links, because the page loads nothing from other servers.

import { element } from "./elements.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
/** Code, bold, italic, struck out, link or image, and bare address, in this order. Each has bounds, so that it ends. */
const INLINE =
  /(`+)(?!`)([^`\n]{1,2000}?)\1(?!`)|\*\*(?=\S)([^*\n]{0,2000}?\S)\*\*|(?<![\w*])\*(?=\S)([^*\n]{0,2000}?\S)\*(?!\w)|~~(?=\S)([^~\n]{0,2000}?\S)~~|!?\[([^[\]\n]{0,500})\]\(([^()\s]{1,2000})\)|(https?:\/\/[^\s<>()"'`]{1,2000}[^\s<>()"'`.,;:!?])/g;
const DEEPEST = 8;

/** Return the elements of a text. */
export function markdown(text) {
  return blocks(text.split("\n"), 0);
}

function blocks(lines, depth) {
  const made = [];
  let paragraph = [];
  const end = () => {
    if (paragraph.length) made.push(element("p", {}, ...inline(paragraph.join("\n"), 0)));
    paragraph = [];
  };
  for (let at = 0; at < lines.length; at++) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (fence) {
      end();
      const close = lines.findIndex((each, place) => place > at && each.trim().startsWith(fence[1]) && !each.trim().slice(fence[1].length).replaceAll(fence[1][0], ""));
      const last = close < 0 ? lines.length : close;
      made.push(code(lines.slice(at + 1, last).join("\n"), fence[2]));
      at = last;
      continue;
    }
    const heading = HEADING.exec(line);
    if (heading || RULE.test(line)) {
      end();
      // Headings of an answer are below those of the page.
      made.push(heading ? element(`h${Math.min(heading[1].length + 3, 6)}`, {}, ...inline(heading[2], 0)) : element("hr"));
      continue;
    }
    if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) {
      end();
      let last = at + 2;
      while (last < lines.length && lines[last].includes("|")) last++;
      made.push(table(lines[at], lines.slice(at + 2, last)));
      at = last - 1;
      continue;
    }
    const nested = depth < DEEPEST;
    if (nested && QUOTE.test(line)) {
      end();
      let last = at;
      while (last < lines.length && QUOTE.test(lines[last])) last++;
      made.push(element("blockquote", {}, ...blocks(lines.slice(at, last).map((each) => QUOTE.exec(each)[1]), depth + 1)));
      at = last - 1;
      continue;
    }
    if (nested && ITEM.test(line)) {
      end();
      const [list, last] = items(lines, at, depth);
      made.push(list);
      at = last - 1;
      continue;
    }
    if (line.trim()) paragraph.push(line.trim());
    else end();
  }
  end();
  return made;
}

/** Return the list that begins at a line, and the line after it. */
function items(lines, begin, depth) {
  const [, indent, sign] = ITEM.exec(lines[begin]);
  const numbered = /\d/.test(sign);
  const parts = [];
  let at = begin;
  for (; at < lines.length; at++) {
    const item = ITEM.exec(lines[at]);
    const inner = lines[at].search(/\S/) > indent.length;
    if (item && !inner && item[1].length <= indent.length) {
      if (item[1].length < indent.length || numbered !== /\d/.test(item[2])) break;
      parts.push([item[3]]);
    } else if (inner) {
      parts.at(-1).push(lines[at].slice(Math.min(indent.length + sign.length + 1, lines[at].search(/\S/))));
    } else if (lines[at].trim() === "" && /^\s/.test(lines[at + 1] ?? "") && (lines[at + 1] ?? "").search(/\S/) > indent.length) {
      parts.at(-1).push("");
    } else if (lines[at].trim() === "" && ITEM.test(lines[at + 1] ?? "")) {
      continue;
    } else {
      break;
    }
  }
  const start = numbered ? { start: Number.parseInt(sign, 10) } : {};
  const entries = parts.map((part) => {
    const inner = blocks(part, depth + 1);
    // A single paragraph has no space around it.
    return element("li", {}, ...(inner[0]?.tagName === "P" ? [...inner[0].childNodes, ...inner.slice(1)] : inner));
  });
  return [element(numbered ? "ol" : "ul", start, ...entries), at];
}

function table(head, rows) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim(), 0));
  const heads = cells(head).map((content) => element("th", { scope: "col" }, ...content));
  const body = rows.map((line) => element("tr", {}, ...cells(line).map((content) => element("td", {}, ...content))));
  const whole = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...body));
  return element("div", { className: "wide" }, whole);
}

function code(text, language) {
  return element("pre", { tabIndex: 0, "aria-label": language ? `Code, ${language}` : "Code" }, element("code", {}, text));
}

/** Return text and elements of a line. */
function inline(text, depth) {
  if (depth > DEEPEST) return [text];
  const made = [];
  let last = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, , verbatim, bold, italic, struck, label, target, address] = found;
    made.push(text.slice(last, found.index));
    last = found.index + whole.length;
    const within = (name, content) => element(name, {}, ...inline(content, depth + 1));
    if (verbatim !== undefined) made.push(element("code", {}, verbatim.trim() || verbatim));
    else if (bold !== undefined) made.push(within("strong", bold));
    else if (italic !== undefined) made.push(within("em", italic));
    else if (struck !== undefined) made.push(within("s", struck));
    else made.push(link(target ?? address, label ?? address, whole));
  }
  made.push(text.slice(last));
  return made;
}

/** Return a link, or its source if it leads elsewhere than to a page. */
function link(target, label, whole) {
  let url = null;
  try {
    url = new URL(target);
  } catch {
    return whole; // Relative: it would lead somewhere on this server.
  }
  if (!["http:", "https:"].includes(url.protocol)) return whole;
  return element("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, label || url.href);
}
