// A line chart of the last hour: axes with units, a line for each series, gaps where nothing is
// known, and a reading under the pointer.

import { element, setText } from "./table.js";
import { time } from "./format.js";

const HEIGHT = 132;
const MARGIN = { top: 8, right: 10, bottom: 22, left: 52 };
const LONGEST_S = 3600;
const SHORTEST_S = 600;
const STEPS_S = [60, 120, 300, 600, 900, 1800];

function svg(name, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

/** A round number that is not less, and whose half is round, too. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 6, 8, 10].find((each) => each * power >= value * 0.999999);
}

/**
 * title, unit: what it shows. format: a value as text. most: where the axis ends; without it, above
 * the largest value and `least`. series: of each its name, its values in a history, and its class.
 */
export class Chart {
  constructor({ title, unit, format, most, least, series }) {
    Object.assign(this, { format, most, least, series, title });
    this.shape = "";
    this.svg = svg("svg", { role: "img", height: HEIGHT });
    this.reading = element("span", { class: "reading" });
    const legend = series.length > 1
      ? series.map(({ name, look }) => element("span", { class: "name" }, element("span", { class: `key ${look}` }), name))
      : [];
    this.node = element("figure", {},
      element("figcaption", {}, element("strong", {}, title), element("span", { class: "unit" }, unit), ...legend, this.reading),
      this.svg);
    this.svg.addEventListener("pointermove", (event) => this.read(event));
    this.svg.addEventListener("pointerleave", () => this.unread());
    new ResizeObserver(() => this.draw()).observe(this.node);
  }

  show(history) {
    this.history = history;
    this.draw();
  }

  draw() {
    const { history } = this;
    const width = Math.floor(this.node.clientWidth);
    if (!history || !width) return;
    const shape = `${width} ${history.end_s} ${history.hit_rate.length}`;
    if (shape === this.shape) return; // nothing has changed since
    this.shape = shape;
    const { interval_s: interval, end_s: end } = history;
    const values = this.series.map(({ of }) => of(history));
    const length = values[0].length;
    const spanS = Math.min(Math.max(length * interval, SHORTEST_S), LONGEST_S);
    const flat = values.flat().filter((value) => value !== null);
    const most = this.most ?? (roundUp(Math.max(...flat, this.least)));
    const inner = { width: width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom };
    // The middle of an interval.
    const x = (at) => MARGIN.left + inner.width * (1 - ((length - at - 0.5) * interval) / spanS);
    const y = (value) => MARGIN.top + inner.height * (1 - Math.min(value / most, 1));
    this.frame = { x, y, interval, end, length, values, width };

    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const at = Math.round(y(most * share)) + 0.5;
      parts.push(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at }));
      parts.push(svg("text", { class: "axis", x: MARGIN.left - 6, y: at, "text-anchor": "end", "dominant-baseline": "central" },
        share ? this.format(most * share) : "0"));
    }
    const step = STEPS_S.find((each) => spanS / each <= inner.width / 60) ?? LONGEST_S;
    // Of the local time of day, so that marks are at whole quarters of an hour.
    const zone = new Date(end * 1000).getTimezoneOffset() * 60;
    for (let tick = Math.floor((end - zone) / step) * step + zone; tick > end - spanS; tick -= step) {
      const at = Math.round(MARGIN.left + inner.width * (1 - (end - tick) / spanS)) + 0.5;
      if (at < MARGIN.left + 8 || at > width - MARGIN.right - 8) continue;
      parts.push(svg("line", { class: "tick", x1: at, x2: at, y1: HEIGHT - MARGIN.bottom, y2: HEIGHT - MARGIN.bottom + 4 }));
      parts.push(svg("text", { class: "axis", x: at, y: HEIGHT - 6, "text-anchor": "middle" }, time(tick)));
    }
    if (values.length === 1) {
      parts.push(svg("path", { class: "area", d: area(values[0], x, y) }));
    }
    this.series.forEach(({ look }, at) => parts.push(svg("path", { class: `line ${look}`, d: path(values[at], x, y) })));
    this.cursor = svg("g", { class: "cursor" });
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...parts, this.cursor);
    this.svg.setAttribute("aria-label", this.summary(values));
    this.unread();
  }

  summary(values) {
    const told = this.series.map(({ name }, at) => {
      const known = values[at].filter((value) => value !== null);
      if (!known.length) return `${name}: nothing yet`;
      const [least, most] = [Math.min(...known), Math.max(...known)].map(this.format);
      return `${name}: ${this.format(known.at(-1))} at last, ${least} to ${most} before`;
    });
    return `${this.title}. ${told.join(". ")}.`;
  }

  read(event) {
    if (!this.frame) return;
    const { x, y, interval, end, length, values, width } = this.frame;
    const left = this.svg.getBoundingClientRect().left;
    const perInterval = length > 1 ? x(1) - x(0) : 1;
    const at = Math.round((event.clientX - left - x(0)) / perInterval);
    if (at < 0 || at >= length) return this.unread();
    const place = Math.min(Math.max(x(at), MARGIN.left), width - MARGIN.right);
    const marks = [svg("line", { x1: place, x2: place, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom })];
    this.series.forEach(({ look }, each) => {
      const value = values[each][at];
      if (value !== null) marks.push(svg("circle", { class: look, cx: place, cy: y(value), r: 3 }));
    });
    this.cursor.replaceChildren(...marks);
    const told = this.series.map((_, each) => this.format(values[each][at])).join(" / ");
    setText(this.reading, `${time(end - (length - at) * interval)}  ${told}`);
  }

  unread() {
    this.cursor?.replaceChildren();
    setText(this.reading, "");
  }
}

/** What is below the lines. */
function area(values, x, y) {
  let drawn = "";
  values.forEach((value, at) => {
    if (value === null) return;
    const point = `${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    const begins = at === 0 || values[at - 1] === null;
    const ends = at === values.length - 1 || values[at + 1] === null;
    drawn += begins ? `M${x(at).toFixed(1)} ${y(0)}L${point}` : `L${point}`;
    if (ends) drawn += `L${x(at).toFixed(1)} ${y(0)}Z`;
  });
  return drawn;
}

/** A line through what is known; a value alone is as long as its interval. */
function path(values, x, y) {
  let drawn = "";
  values.forEach((value, at) => {
    if (value === null) return;
    const point = `${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    const [before, after] = [values[at - 1] ?? null, values[at + 1] ?? null];
    const half = Math.max((x(1) - x(0)) / 2, 1.5).toFixed(1);
    if (before !== null) drawn += `L${point}`;
    else drawn += after !== null ? `M${point}` : `M${point}m-${half} 0h${2 * half}`;
  });
  return drawn;
}
