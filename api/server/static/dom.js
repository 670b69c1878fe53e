// Small helpers. Text from the server or the model becomes text nodes, never HTML.

export const byId = (id) => document.getElementById(id);

/** An element with a class, attributes and children (strings become text). */
export function make(tag, className = "", children = [], attributes = {}) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...[children].flat());
  return element;
}

export function svg(tag, attributes = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

export const number = (value) => Math.round(value).toLocaleString("en");
export const percent = (value) => `${Math.round(value * 100)} %`;

/** Three figures at most: 0.4, 12.3, 128. */
export const short = (value) =>
  value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(value >= 1 ? 1 : 2);

/** Seconds as [figure, unit]. */
export function duration(seconds) {
  return seconds >= 1 ? [short(seconds), "s"] : [short(seconds * 1000), "ms"];
}

export const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
