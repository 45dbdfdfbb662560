// Which messages of a long conversation are in the page: those that are seen, and some beside them.

import { s } from "../lib/dom.js";

/** Shorter conversations are shown whole. */
const FEW = 40;
const GUESS = 140;

export class Window {
  constructor(thread) {
    this.thread = thread;
    this.heights = new Map();
    this.shown = "";
  }

  /** Returns the nodes to draw with what stands for the others, drawn by `draw(node)`. */
  part(nodes, draw, isAtEnd) {
    if (nodes.length <= FEW) return nodes.map(draw);
    const [first, last] = this.range(nodes, isAtEnd);
    this.shown = `${first} ${last}`;
    const space = (from, to, key) => {
      const height = nodes.slice(from, to).reduce((all, node) => all + this.heightOf(node), 0);
      return s("svg", { class: "space", "data-key": key, width: 1, height: Math.round(height), "aria-hidden": "true" });
    };
    return [space(0, first, "before"), ...nodes.slice(first, last).map(draw), space(last, nodes.length, "after")];
  }

  range(nodes, isAtEnd) {
    const { clientHeight: high } = this.thread;
    const total = nodes.reduce((all, node) => all + this.heightOf(node), 0);
    const top = isAtEnd ? total - high : this.thread.scrollTop;
    let [first, last, at] = [0, nodes.length, 0];
    nodes.forEach((node, place) => {
      at += this.heightOf(node);
      if (at < top - high) first = place + 1;
      if (at < top + 2 * high) last = Math.min(nodes.length, place + 2);
    });
    return [Math.min(first, nodes.length - 1), last];
  }

  heightOf(node) {
    return this.heights.get(node.id) ?? GUESS;
  }

  /** Takes the heights of what is in the page. */
  measure() {
    const gap = parseFloat(getComputedStyle(this.thread).rowGap) || 0;
    for (const one of this.thread.children) {
      const height = one.getBoundingClientRect().height;
      if (one.dataset.key && height && !one.classList.contains("space")) this.heights.set(one.dataset.key, height + gap);
    }
  }

  /** Whether other messages are seen now than those in the page. */
  hasMoved(nodes) {
    return nodes.length > FEW && this.range(nodes, false).join(" ") !== this.shown;
  }
}
