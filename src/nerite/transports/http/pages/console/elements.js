// Creates elements from data only: text never becomes markup.

/** Create an element. Keys that are not properties become attributes; `on` has listeners by event. */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "on") {
      for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    } else if (key in made) {
      made[key] = value;
    } else {
      made.setAttribute(key, value);
    }
  }
  made.append(...children);
  return made;
}

/** Create an SVG element. */
export function shape(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Set the text of an element if it differs, so that text selections and screen readers are not disturbed. */
export function say(where, text) {
  if (where.textContent !== text) where.textContent = text;
}
