// Files of a message: images and texts, chosen, pasted or dropped, shown before they are sent.

import { h } from "../lib/dom.js";
import { bytes } from "../lib/format.js";

const IMAGES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_IMAGE_BYTES = 20 << 20;
const MAX_TEXT_BYTES = 1 << 20;
const MAX_FILES = 20;

/** Whether a value read from elsewhere is a file of a message. */
export function isFile(one) {
  const isText = (value) => typeof value === "string";
  if (!isText(one?.name)) return false;
  return one.kind === "text" ? isText(one.text) : one.kind === "image" && isText(one.url) && IMAGES.some((type) => one.url.startsWith(`data:${type};base64,`));
}

/**
 * Reads files as `{kind: "image", name, size, url}` with a data URL, or `{kind: "text", name, size, text}`.
 * Returns those as `taken`, and as `refused` a sentence for each fault: neither image nor text, too large, or an image
 * for a model that sees none (`seesImages` is false).
 */
export async function read(files, have, seesImages) {
  if (have + files.length > MAX_FILES) return { taken: [], refused: [`A message takes ${MAX_FILES} files at most.`] };
  const all = await Promise.allSettled([...files].map((file) => readOne(file, seesImages)));
  const taken = all.filter((one) => one.status === "fulfilled").map((one) => one.value);
  return { taken, refused: [...new Set(all.filter((one) => one.reason).map((one) => one.reason.message))] };
}

async function readOne(file, seesImages) {
  const { name, size, type } = file;
  if (IMAGES.includes(type)) {
    if (!seesImages) throw new Error("This model sees no images. Choose one that does.");
    if (size > MAX_IMAGE_BYTES) throw new Error(`${name} has ${bytes(size)}; an image may have ${bytes(MAX_IMAGE_BYTES)}.`);
    return { kind: "image", name, size, url: await asUrl(file) };
  }
  if (size > MAX_TEXT_BYTES) throw new Error(`${name} has ${bytes(size)}; a text may have ${bytes(MAX_TEXT_BYTES)}.`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (text.includes("\0")) throw new TypeError();
    return { kind: "text", name, size, text };
  } catch {
    throw new Error(`${name} is neither a text nor an image (PNG, JPEG, WebP, GIF).`);
  }
}

function asUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

/** Returns the parts of a question with files, as the API takes them. */
export function partsOf(text, files) {
  return [
    ...files.map((one) => (one.kind === "image" ? { type: "input_image", image_url: one.url } : { type: "input_text", text: `${one.name}:\n\n${one.text}\n\n` })),
    ...(text ? [{ type: "input_text", text }] : []),
  ];
}

/** Shows files; `onremove(place)` takes one away, where that is possible. */
export function shownFiles(files, onremove) {
  if (!files?.length) return null;
  return h("ul", { class: "files" }, files.map((one, place) =>
    h("li", { "data-key": `${place}-${one.name}` },
      one.kind === "image" ? h("img", { src: one.url, alt: one.name }) : h("details", {}, h("summary", {}, one.name, h("small", {}, bytes(one.size))), h("pre", { tabindex: 0, dir: "auto" }, one.text.slice(0, 5000), one.text.length > 5000 && " …")),
      onremove && h("button", { type: "button", class: "quiet", "aria-label": `Remove ${one.name}`, onclick: () => onremove(place) }, "✕"))));
}
