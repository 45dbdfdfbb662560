// Elements without HTML: whatever text holds, it stays text.

const SVG = "http://www.w3.org/2000/svg";

/** Makes an element. `props` are attributes; `onclick` and its like are handlers; children are nodes, texts or lists. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function s(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node[name] = value;
    else if (name === "value") continue;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
  if (props?.value !== undefined && props.value !== null) {
    // A choice can be made only once its options are there.
    node.value = props.value;
    node.isGiven = true;
  }
  return node;
}

function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
}

/** Makes the children of `target` look like `wanted`, changing as little as can be: focus and selection stay. */
export function update(target, ...wanted) {
  const holder = document.createDocumentFragment();
  append(holder, wanted);
  sync(target, holder);
}

function sync(target, wanted) {
  const keyed = new Map();
  for (const child of target.children) if (child.dataset?.key) keyed.set(child.dataset.key, child);
  let place = target.firstChild;
  for (const next of [...wanted.childNodes]) {
    const known = next.dataset?.key ? keyed.get(next.dataset.key) : undefined;
    if (known && known !== place) {
      target.insertBefore(known, place);
      place = known;
    }
    if (place && isLike(place, next)) {
      morph(place, next);
      place = place.nextSibling;
    } else {
      target.insertBefore(next, place);
    }
  }
  while (place) {
    const gone = place;
    place = place.nextSibling;
    gone.remove();
  }
}

function isLike(node, next) {
  return node.nodeType === next.nodeType && node.nodeName === next.nodeName && node.dataset?.key === next.dataset?.key && node.dataset?.fixed === next.dataset?.fixed;
}

function morph(node, next) {
  if (node.nodeType === Node.TEXT_NODE) {
    if (node.data !== next.data) node.data = next.data;
    return;
  }
  if (node.dataset.fixed !== undefined) return;
  for (const { name } of [...node.attributes]) {
    if (!next.hasAttribute(name) && !(name === "open" && node.nodeName === "DETAILS")) node.removeAttribute(name);
  }
  for (const { name, value } of next.attributes) if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  for (const name of HANDLERS) node[name] = next[name];
  // Before the children: options that are new are taken from `next`, and its choice with them.
  const { isGiven, value } = next;
  sync(node, next);
  if (isGiven && document.activeElement !== node && node.value !== value) node.value = value;
}

const HANDLERS = ["onclick", "onchange", "oninput", "onkeydown", "onsubmit", "ontoggle", "onpaste"];

/** Says something to who listens to the page instead of looking at it, and shows it for a while. */
export function toast(text) {
  const line = h("p", { class: "toast" }, text);
  document.getElementById("toasts").append(line);
  setTimeout(() => line.remove(), 6000);
}

/** Shows a dialog until it is closed; resolves to its value. */
export function openDialog(dialog) {
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((done) => {
    dialog.onclose = () => {
      dialog.remove();
      done(dialog.returnValue);
    };
  });
}

/** Resolves to whether a person does what a button named `action` does. */
export async function confirmed(question, action) {
  const buttons = h("menu", {}, h("button", { value: "yes", class: "primary" }, action), h("button", { value: "" }, "Cancel"));
  return (await openDialog(h("dialog", { "aria-label": action }, h("form", { method: "dialog" }, h("p", {}, question), buttons)))) === "yes";
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    toast("Copied.");
  } catch {
    toast("The browser does not let this page copy.");
  }
}
