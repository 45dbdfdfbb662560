// Parsed Markdown as elements.

import { copy, h } from "../lib/dom.js";
import { coloured, formula } from "./libraries.js";
import { parse } from "./markdown.js";

const MAX_CHARACTERS = 200000;

/** Returns elements for a text; a very long one is shown as it is. */
export function markdown(text) {
  if (text.length > MAX_CHARACTERS) return [h("pre", { dir: "auto" }, text)];
  const blocks = parse(text);
  const notes = new Map(blocks.filter((one) => one.type === "note").map((one, place) => [one.id, { ...one, number: place + 1 }]));
  const draw = new Drawing(notes);
  const said = blocks.filter((one) => one.type !== "note").map((one) => draw.block(one));
  if (notes.size) said.push(h("section", { class: "notes", "aria-label": "Footnotes" }, h("ol", { class: "said" }, [...notes.values()].map((one) => h("li", { dir: "auto" }, draw.spans(one.inline))))));
  return said;
}

class Drawing {
  constructor(notes) {
    this.notes = notes;
    this.block = this.block.bind(this);
    this.span = this.span.bind(this);
  }

  spans(inline) {
    return inline.map(this.span);
  }

  block(one) {
    switch (one.type) {
      case "paragraph":
        return h("p", { dir: "auto" }, this.spans(one.inline));
      case "heading":
        // The page's own headings come first, so that of an answer is never higher than these.
        return h(`h${Math.min(6, one.level + 2)}`, { class: `level-${one.level}`, dir: "auto" }, this.spans(one.inline));
      case "code":
        return h(
          "figure",
          { class: "code" },
          h("figcaption", {}, one.language || "text", h("button", { type: "button", class: "quiet", "aria-label": "Copy this code", onclick: () => copy(one.text) }, "Copy")),
          h("pre", { tabindex: 0 }, h("code", {}, coloured(one.text, one.language))),
        );
      case "math":
        return formula(one.text, true);
      case "quote":
        return h("blockquote", { class: "said", dir: "auto" }, one.children.map(this.block));
      case "list":
        return h(one.ordered ? "ol" : "ul", { start: one.ordered && one.start !== 1 ? one.start : null, class: "said", dir: "auto" }, one.items.map((item) => this.item(item)));
      case "table":
        return h("div", { class: "scroll", tabindex: 0 }, h("table", { dir: "auto" }, h("thead", {}, h("tr", {}, one.head.map((cell) => h("th", { scope: "col" }, this.spans(cell))))), h("tbody", {}, one.rows.map((row) => h("tr", {}, row.map((cell) => h("td", { dir: "auto" }, this.spans(cell))))))));
      default:
        return h("hr");
    }
  }

  item({ children, isDone }) {
    const said = children.length === 1 && children[0].type === "paragraph" ? this.spans(children[0].inline) : children.map(this.block);
    if (isDone === null) return h("li", {}, said);
    return h("li", { class: "task" }, h("span", { role: "img", "aria-label": isDone ? "done:" : "to do:" }, isDone ? "☑" : "☐"), " ", said);
  }

  span(one) {
    if (typeof one === "string") return one;
    switch (one.type) {
      case "code":
        return h("code", {}, one.text);
      case "math":
        return formula(one.text, false);
      case "ref": {
        const note = this.notes.get(one.id);
        return note ? h("sup", {}, note.number) : `[^${one.id}]`;
      }
      case "link":
        return h("a", { href: one.href, rel: "noopener noreferrer nofollow", target: "_blank", title: one.href }, one.text, one.text !== one.href && h("small", {}, new URL(one.href).host));
      case "break":
        return h("br");
      default:
        return h(one.type, {}, this.spans(one.children));
    }
  }
}
