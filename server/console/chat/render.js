// Parsed Markdown as elements.

import { copy, h } from "../lib/dom.js";
import { parse } from "./markdown.js";

const MAX_CHARACTERS = 200000;

/** Returns elements for a text; a very long one is shown as it is. */
export function markdown(text) {
  if (text.length > MAX_CHARACTERS) return [h("pre", {}, text)];
  return parse(text).map(block);
}

function block(one) {
  switch (one.type) {
    case "paragraph":
      return h("p", {}, one.inline.map(span));
    case "heading":
      // The page's own headings come first, so that of an answer is never higher than these.
      return h(`h${Math.min(6, one.level + 2)}`, { class: `level-${one.level}` }, one.inline.map(span));
    case "code":
      return h(
        "figure",
        { class: "code" },
        h("figcaption", {}, one.language || "text", h("button", { type: "button", class: "quiet", "aria-label": "Copy this code", onclick: () => copy(one.text) }, "Copy")),
        h("pre", { tabindex: 0 }, h("code", {}, one.text)),
      );
    case "quote":
      return h("blockquote", { class: "said" }, one.children.map(block));
    case "list":
      return h(one.ordered ? "ol" : "ul", { start: one.ordered && one.start !== 1 ? one.start : null, class: "said" }, one.items.map((item) => h("li", {}, item.length === 1 && item[0].type === "paragraph" ? item[0].inline.map(span) : item.map(block))));
    case "table":
      return h("div", { class: "scroll", tabindex: 0 }, h("table", {}, h("thead", {}, h("tr", {}, one.head.map((cell) => h("th", { scope: "col" }, cell.map(span))))), h("tbody", {}, one.rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell.map(span))))))));
    default:
      return h("hr");
  }
}

function span(one) {
  if (typeof one === "string") return one;
  switch (one.type) {
    case "code":
      return h("code", {}, one.text);
    case "link":
      return h("a", { href: one.href, rel: "noopener noreferrer nofollow", target: "_blank", title: one.href }, one.text, one.text !== one.href && h("small", {}, new URL(one.href).host));
    case "break":
      return h("br");
    default:
      return h(one.type, {}, one.children.map(span));
  }
}
