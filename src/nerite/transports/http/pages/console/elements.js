// Elements of the page, made of data alone: no text ever becomes markup.

/** Return an element. What has a dash or is not a property becomes an attribute; `on` has listeners by event. */
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

/** Return an element of a drawing. */
export function shape(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Say something in an element, unless it says so already: who selects text or listens to it is not disturbed. */
export function say(where, text) {
  if (where.textContent !== text) where.textContent = text;
}
