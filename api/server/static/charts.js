// Draws the tiles, each with a figure and its values of the last minute, and the chart of steps.

import { byId, make, svg } from "./dom.js";

const POINTS = 90;

/** A figure, a note under it, and lines of its last values; null is a gap. */
export class Tile {
  constructor(id) {
    const tile = byId(id);
    this.title = tile.querySelector("h3");
    this.figure = make("b", "", "–");
    this.unit = make("span");
    this.note = make("p", "note", "\u00a0");
    this.spark = svg("svg", {
      class: "spark", viewBox: "0 0 100 36", preserveAspectRatio: "none", "aria-hidden": "true",
    });
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line" });
    this.second = svg("path", { class: "second" });
    this.spark.append(this.area, this.second, this.line);
    tile.append(make("p", "figure", [this.figure, this.unit]), this.note, this.spark);
    this.values = [];
    this.others = [];
  }

  show([figure, unit], note, value, other = null) {
    this.figure.textContent = figure;
    this.unit.textContent = unit;
    this.note.textContent = note || "\u00a0";
    for (const [list, one] of [[this.values, value], [this.others, other]]) {
      list.push(one);
      if (list.length > POINTS) list.shift();
    }
    const highest = Math.max(1e-9, ...this.values, ...this.others) * 1.15;
    const [line, area] = paths(this.values, highest);
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
    this.second.setAttribute("d", paths(this.others, highest)[0]);
  }
}

/** The line through values, the newest at the right edge, and the area under it. */
function paths(values, highest) {
  let line = "";
  let area = "";
  let begin = null;
  const first = POINTS - values.length;
  const at = (index) => (((first + index) * 100) / (POINTS - 1)).toFixed(2);
  values.forEach((value, index) => {
    if (value === null) {
      if (begin !== null) area += `L${at(index - 1)} 36L${at(begin)} 36Z`;
      begin = null;
      return;
    }
    const point = `${at(index)} ${(35 - (value / highest) * 33).toFixed(2)}`;
    line += begin === null ? `M${point}` : `L${point}`;
    area += begin === null ? `M${point}` : `L${point}`;
    if (begin === null) begin = index;
  });
  if (begin !== null) area += `L${at(values.length - 1)} 36L${at(begin)} 36Z`;
  return [line, area];
}

/** One bar per step: its height is its time, its colour how it was run. */
export function showSteps(element, steps, slots) {
  const highest = Math.max(1e-6, ...steps.map((step) => step.seconds));
  const width = 100 / slots;
  element.setAttribute("viewBox", "0 0 100 44");
  element.setAttribute("preserveAspectRatio", "none");
  element.replaceChildren(
    ...steps.map((step, index) => {
      const height = Math.max(1.5, (step.seconds / highest) * 42);
      return svg("rect", {
        class: step.kind,
        x: ((slots - steps.length + index) * width).toFixed(3),
        y: (44 - height).toFixed(2),
        width: (width * 0.72).toFixed(3),
        height: height.toFixed(2),
      });
    }),
  );
}
