// The heat map and the curves. Neither is the only place of what it shows: there are tables beside.

import { count } from "./stream.js";

/**
 * classes are the states by which nodes are colored, worst last. A node's lag is also shown by how
 * much of its square is dark, so that it can be told without colors.
 */
export const classes = [
  { name: "ok", label: "up to date", hint: "less than 5 s behind", dark: 0 },
  { name: "start", label: "starting", hint: "receives or programs its first state", dark: 0 },
  { name: "late", label: "5–10 s behind", hint: "lacks a change for 5 to 10 s", dark: 0.2, from: 5e3 },
  { name: "later", label: "10–60 s", hint: "lacks a change for 10 to 60 s", dark: 0.4, from: 1e4 },
  { name: "stuck", label: "1–10 min", hint: "lacks a change for 1 to 10 min", dark: 0.6, from: 6e4 },
  { name: "lost", label: "over 10 min", hint: "lacks a change for 10 min or more", dark: 0.8, from: 6e5 },
];

/** classOf returns the index of a node's class at a time. */
export function classOf(node, now) {
  if (node.state === "syncing" || node.state === "programming") return 1;
  if (!node.lacking) return 0;
  let of = 2;
  while (of + 1 < classes.length && now - node.lacking >= classes[of + 1].from) of++;
  return of;
}

function colors() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  return { classes: classes.map((c) => of(c.name)), mark: of("mark"), accent: of("accent"), back: of("panel") };
}

/** square draws a node. */
function square(g, palette, node, of, x, y, size) {
  g.fillStyle = palette.classes[of];
  g.fillRect(x, y, size, size);
  if (of > 1) {
    g.fillStyle = palette.mark;
    const high = Math.max(1, Math.round(size * classes[of].dark));
    g.globalAlpha *= 0.45;
    g.fillRect(x, y + size - high, size, high);
    g.globalAlpha /= 0.45;
  }
  g.strokeStyle = g.fillStyle = palette.mark;
  if (node.errors) {
    g.lineWidth = Math.max(1, size / 8);
    g.beginPath();
    g.moveTo(x + 1, y + 1);
    g.lineTo(x + size - 1, y + size - 1);
    g.moveTo(x + size - 1, y + 1);
    g.lineTo(x + 1, y + size - 1);
    g.stroke();
  } else if (node.warnings) {
    const dot = Math.max(2, Math.round(size / 3));
    g.fillRect(x + (size - dot) / 2, y + (size - dot) / 2, dot, dot);
  }
  if (node.kind === "relay") {
    g.lineWidth = Math.max(1, size / 6);
    g.strokeRect(x + g.lineWidth / 2, y + g.lineWidth / 2, size - g.lineWidth, size - g.lineWidth);
  }
}

/** sample draws one square of a legend. */
export function sample(canvas, node, of) {
  canvas.width = canvas.height = 28;
  const g = canvas.getContext("2d");
  square(g, colors(), node, of, 0, 0, 28);
}

// tallest is the height that the map should not exceed, in CSS pixels.
const tallest = 460, smallest = 3, largest = 22;

/** HeatMap draws nodes on a canvas. */
export class HeatMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.nodes = [];
    this.columns = 1;
    this.size = largest;
    this.cursor = -1;
    this.palette = colors();
  }

  /** recolor uses the colors of the scheme that the user has chosen now. */
  recolor() { this.palette = colors(); }

  /** draw draws nodes as of a time. only is a set of ids that stand out, or null. */
  draw(nodes, now, only, chosen) {
    this.nodes = nodes;
    const { canvas } = this, width = canvas.clientWidth || 600, scale = Math.min(devicePixelRatio || 1, 2);
    let size = largest;
    const rows = () => Math.ceil(Math.max(nodes.length, 1) / Math.max(1, Math.floor(width / size)));
    while (size > smallest && rows() * size > tallest) size--;
    this.size = size;
    this.columns = Math.max(1, Math.floor(width / size));
    const height = rows() * size;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = `${height}px`;
    }
    const g = canvas.getContext("2d"), gap = size > 4 ? 1 : 0;
    g.setTransform(scale, 0, 0, scale, 0, 0);
    g.clearRect(0, 0, width, height);
    const at = (i) => [(i % this.columns) * size, Math.floor(i / this.columns) * size];
    nodes.forEach((node, i) => {
      const [x, y] = at(i);
      g.globalAlpha = only && !only.has(node.id) ? 0.25 : 1;
      square(g, this.palette, node, classOf(node, now), x, y, size - gap);
    });
    g.globalAlpha = 1;
    const frame = (i, color, wide) => {
      if (i < 0 || i >= nodes.length) return;
      const [x, y] = at(i);
      g.strokeStyle = color;
      g.lineWidth = wide;
      g.strokeRect(x - 0.5, y - 0.5, size, size);
    };
    if (chosen) frame(nodes.findIndex((n) => n.id === chosen), this.palette.accent, 3);
    if (document.activeElement === canvas) frame(this.cursor, this.palette.mark, 2);
  }

  /** hit returns the index of the node at a mouse event, or -1. */
  hit(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.size), row = Math.floor((event.clientY - box.top) / this.size);
    const i = row * this.columns + column;
    return column >= 0 && column < this.columns && row >= 0 && i < this.nodes.length ? i : -1;
  }

  /** move moves the cursor for a key, and reports whether the key does that. */
  move(key) {
    const last = this.nodes.length - 1, c = this.cursor;
    const to = {
      ArrowLeft: c - 1, ArrowRight: c + 1, ArrowUp: c - this.columns, ArrowDown: c + this.columns, Home: 0, End: last,
    }[key];
    if (to === undefined || last < 0) return false;
    this.cursor = c < 0 ? 0 : Math.min(Math.max(to, 0), last);
    return true;
  }
}

const shape = (name, attributes, text) => {
  const e = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
  if (text) e.textContent = text;
  return e;
};

const left = 52, right = 620, top = 12, bottom = 216;

/** drawCurves draws how many nodes had each change within which time. */
export function drawCurves(svg, changes, chosen, now) {
  let least = Infinity, most = 0;
  for (const c of changes) {
    for (const [t] of c.curve) {
      least = Math.min(least, t);
      most = Math.max(most, t);
    }
    if (c.lacking) most = Math.max(most, now - c.published);
  }
  const from = Math.floor(Math.log10(Math.max(Math.min(least, 1), 0.01)));
  const to = Math.max(from + 1, Math.ceil(Math.log10(Math.max(most, 10))));
  const x = (t) => left + (right - left) * Math.min(Math.max((Math.log10(Math.max(t, 1e-3)) - from) / (to - from), 0), 1);
  const y = (share) => bottom - (bottom - top) * share;
  const parts = [];
  for (let d = from; d <= to; d++) {
    const at = x(10 ** d), unit = d < 0 ? `${10 ** (d + 3)} µs` : d < 3 ? `${10 ** d} ms` : d < 5 ? `${10 ** (d - 3)} s` : `${count(10 ** (d - 3))} s`;
    parts.push(shape("line", { x1: at, x2: at, y1: top, y2: bottom, class: "grid" }));
    parts.push(shape("text", { x: at, y: bottom + 18, "text-anchor": "middle" }, unit));
  }
  for (const share of [0, 0.5, 0.99]) {
    parts.push(shape("line", { x1: left, x2: right, y1: y(share), y2: y(share), class: "grid" }));
    parts.push(shape("text", { x: left - 6, y: y(share) + 4, "text-anchor": "end" }, `${share * 100} %`));
  }
  parts.push(shape("text", { x: (left + right) / 2, y: bottom + 38, "text-anchor": "middle" },
    "time since the change was published; nodes that have it programmed"));
  for (const c of [...changes].reverse()) { // newest on top
    if (!c.nodes || !c.curve.length) continue;
    const points = [`${x(0)},${y(0)}`];
    let before = 0;
    for (const [t, n] of c.curve) {
      points.push(`${x(t)},${y(before)}`, `${x(t)},${y(Math.min(n / c.nodes, 1))}`);
      before = Math.min(n / c.nodes, 1);
    }
    if (c.lacking) points.push(`${x(now - c.published)},${y(before)}`);
    const is = `${c.lacking ? "open" : ""} ${chosen === `${c.shard}/${c.sequence}` ? "chosen" : ""}`;
    parts.push(shape("polyline", { points: points.join(" "), class: is.trim() }));
  }
  svg.replaceChildren(...parts);
}
