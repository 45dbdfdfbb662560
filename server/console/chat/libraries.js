// Colours in code and formulas: libraries of others, loaded when a message needs them. What they make becomes elements.

import { h } from "../lib/dom.js";

const MAX_CODE = 30000;
const MAX_FORMULA = 4000;
const MAX_KEPT = 300;

/** A library that is loaded when first asked for; `onready` is called once it is there. */
class Library {
  constructor(path) {
    Object.assign(this, { path, found: null, asked: null, made: new Map() });
  }

  /** Returns what `make(library)` gives for `key`, made once; null until the library is there, or where it fails. */
  of(key, make) {
    this.asked ??= import(this.path).then(({ default: found }) => {
      this.found = found;
      for (const listener of listeners) listener();
    }, () => {});
    if (!this.found) return null;
    if (!this.made.has(key)) {
      if (this.made.size >= MAX_KEPT) this.made.delete(this.made.keys().next().value);
      try {
        this.made.set(key, make(this.found));
      } catch {
        this.made.set(key, null);
      }
    }
    return this.made.get(key);
  }
}

const listeners = new Set();
const highlight = new Library("../vendor/highlight.js");
const formulas = new Library("../vendor/temml.js");

/** Has `listener` called when a library has come: what was drawn without it can be drawn again. */
export function whenLoaded(listener) {
  listeners.add(listener);
}

/** Returns the children of a code element: the text, in colours where its language is known. */
export function coloured(text, language) {
  if (text.length > MAX_CODE || !language) return text;
  const tree = highlight.of(`${language}\n${text}`, (library) => library.getLanguage(language) && library.highlight(text, { language, ignoreIllegals: true })._emitter.rootNode);
  return tree ? tree.children.map(nodeOf) : text;
}

function nodeOf(one) {
  if (typeof one === "string") return one;
  const children = one.children.map(nodeOf);
  return one.scope && !one.scope.startsWith("language:") ? h("span", { class: `hljs-${one.scope.split(".")[0]}` }, children) : children;
}

/** Returns a formula, or its source until it can be drawn and where it cannot. */
export function formula(text, isBlock) {
  const tag = isBlock ? "div" : "span";
  const made = text.length <= MAX_FORMULA && formulas.of(`${isBlock} ${text}`, (library) => {
    const place = document.createElement(tag);
    library.render(text, place, { displayMode: isBlock, trust: false, throwOnError: true, strict: false, maxExpand: 200, maxSize: [20, 100] });
    return place;
  });
  if (!made) return h(tag, { class: "math" }, h("code", {}, text));
  const shown = made.cloneNode(true);
  shown.className = "math";
  if (isBlock) shown.tabIndex = 0;
  // It is replaced as a whole: its styles may not be set by name.
  shown.dataset.fixed = text;
  return shown;
}
