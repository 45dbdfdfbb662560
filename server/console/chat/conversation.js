// A conversation as a tree of messages, of which one way is shown: pure.

import { isFile, partsOf } from "./files.js";

export function newId() {
  return crypto.randomUUID?.() ?? Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation(model = null) {
  return { id: newId(), version: 1, title: "", model, system: "", settings: {}, nodes: {}, chosen: {}, created: Date.now(), updated: Date.now() };
}

const ROOT = "root";

function childrenOf(conversation, parent) {
  return Object.values(conversation.nodes).filter((node) => node.parent === parent).sort((a, b) => a.created - b.created);
}

/** Adds a message below another, or at the beginning for `null`, and shows it. */
export function add(conversation, parent, message) {
  const node = { id: newId(), parent: parent ?? ROOT, created: Date.now(), ...message };
  const last = childrenOf(conversation, node.parent).at(-1);
  if (last && last.created >= node.created) node.created = last.created + 1;
  conversation.nodes[node.id] = node;
  conversation.chosen[node.parent] = node.id;
  conversation.updated = Date.now();
  if (!conversation.title && message.role === "user") conversation.title = (message.content.trim() || message.files?.[0]?.name || "").slice(0, 60);
  return node;
}

/** Returns the messages that are shown, the first one first. */
export function path(conversation) {
  const shown = [];
  const seen = new Set();
  for (let at = ROOT; ; ) {
    const children = childrenOf(conversation, at);
    const next = children.find((node) => node.id === conversation.chosen[at]) ?? children.at(-1);
    if (!next || seen.has(next.id)) return shown;
    seen.add(next.id);
    shown.push(next);
    at = next.id;
  }
}

/** Returns the ways that lead on from where a message stands, it included. */
export function siblings(conversation, node) {
  return childrenOf(conversation, node.parent);
}

export function choose(conversation, node) {
  conversation.chosen[node.parent] = node.id;
  conversation.updated = Date.now();
}

/** Returns the items of a request, up to and with the message `last`. */
export function inputUpTo(conversation, last) {
  const before = [];
  for (let node = last; node; node = conversation.nodes[node.parent]) before.unshift(node);
  return before.flatMap(itemsOf);
}

/** Returns a message as items; the text of one that is gone on with is `incomplete`. */
export function itemsOf(node, status) {
  if (node.role === "user") return [{ role: "user", content: node.files?.length ? partsOf(node.content, node.files) : node.content }];
  if (node.role === "tool") return [{ type: "function_call_output", call_id: node.tool_call_id, output: node.content }];
  return [
    node.reasoning && { type: "reasoning", summary: [], content: [{ type: "reasoning_text", text: node.reasoning }] },
    node.content && { type: "message", role: "assistant", content: node.content, status },
    ...(node.tool_calls ?? []).map(({ id, name, arguments: given }) => ({ type: "function_call", call_id: id, name, arguments: given })),
  ].filter(Boolean);
}

/** Returns the answers that have not ended. */
export function unfinished(conversation) {
  return Object.values(conversation.nodes).filter((node) => node.run);
}

/** Has a message wait for the end of an answer. */
export function enqueue(conversation, text, files = []) {
  (conversation.queued ??= {})[newId()] = { text, files, created: Date.now(), gone: false };
}

/** Returns the messages that wait, each with its id. */
export function waiting(conversation) {
  return Object.entries(conversation.queued ?? {}).filter(([, one]) => !one.gone).sort(([, a], [, b]) => a.created - b.created);
}

/** Adds to a conversation what another copy of it has: messages, more of an answer, and choices that are later. */
export function absorb(ours, theirs) {
  for (const node of Object.values(theirs.nodes)) {
    const known = ours.nodes[node.id];
    if (known && !isFurther(node, known)) continue;
    // The object stays, for an answer is written into it.
    const kept = known ?? {};
    for (const name of Object.keys(kept)) delete kept[name];
    ours.nodes[node.id] = Object.assign(kept, structuredClone(node));
  }
  for (const [id, one] of Object.entries(theirs.queued ?? {})) {
    (ours.queued ??= {})[id] = { ...one, gone: one.gone || ours.queued[id]?.gone || false };
  }
  const isOlder = ours.updated < theirs.updated;
  ours.chosen = isOlder ? { ...ours.chosen, ...theirs.chosen } : { ...theirs.chosen, ...ours.chosen };
  if (isOlder) for (const name of ["title", "model", "other", "isPinned", "system", "settings", "updated"]) ours[name] = theirs[name];
}

/** Whether an answer has more than another copy of it: it has ended, or more of its events have come. */
function isFurther(node, known) {
  if (!known.run || !node.run) return Boolean(known.run) && !node.run;
  return node.run.number > known.run.number || (node.run.id !== null && known.run.id === null);
}

/** Returns a conversation read from a file; throws where it is none. */
export function imported(text) {
  const found = JSON.parse(text);
  const isText = (value) => typeof value === "string";
  if (found?.format !== "mlx-serve-chat" || typeof found.nodes !== "object" || found.nodes === null) throw new Error("This file is no exported conversation.");
  const conversation = { ...newConversation(isText(found.model) ? found.model : null), other: isText(found.other) ? found.other : undefined, title: isText(found.title) ? found.title.slice(0, 60) : "", system: isText(found.system) ? found.system : "", settings: importedSettings(found.settings) };
  for (const node of Object.values(found.nodes)) {
    if (!isText(node?.id) || !isText(node.parent) || !["user", "assistant", "tool"].includes(node.role) || !isText(node.content)) throw new Error("A message of this file cannot be read.");
    const calls = Array.isArray(node.tool_calls) ? node.tool_calls.filter((call) => isText(call?.id) && isText(call.name) && isText(call.arguments)) : undefined;
    conversation.nodes[node.id] = {
      finish: node.run ? "stopped" : isText(node.finish) ? node.finish : undefined, error: isText(node.error) ? node.error : undefined, model: isText(node.model) ? node.model : undefined, id: node.id, parent: node.parent, role: node.role, content: node.content, created: Number(node.created) || 0,
      files: Array.isArray(node.files) ? node.files.filter(isFile).map(({ kind, name, size, url, text }) => ({ kind, name, size: Number(size) || 0, url, text })) : undefined,
      reasoning: isText(node.reasoning) ? node.reasoning : undefined,
      tool_call_id: isText(node.tool_call_id) ? node.tool_call_id : undefined,
      tool_calls: calls?.map(({ id, name, arguments: given }) => ({ id, name, arguments: given })),
    };
  }
  for (const [parent, child] of Object.entries(found.chosen ?? {})) if (isText(child)) conversation.chosen[parent] = child;
  return conversation;
}

/** Returns those settings of a file that have the form in which the page keeps them. */
function importedSettings(given) {
  const isText = (value) => typeof value === "string";
  const forms = { effort: isText, stop: (value) => Array.isArray(value) && value.every(isText), tools: (value) => Array.isArray(parsed(value)), fields: (value) => parsed(value)?.constructor === Object };
  return Object.fromEntries(Object.entries(given ?? {}).filter(([name, value]) => (Object.hasOwn(forms, name) ? forms[name](value) : Number.isFinite(value))));
}

function parsed(text) {
  try {
    return typeof text === "string" ? JSON.parse(text) : null;
  } catch {
    return null;
  }
}

export function exported(conversation) {
  const { model, other, title, system, settings, nodes, chosen } = conversation;
  return JSON.stringify({ format: "mlx-serve-chat", title, model, other, system, settings, nodes, chosen }, null, 1);
}
