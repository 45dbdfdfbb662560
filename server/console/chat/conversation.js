// A conversation as a tree of messages, of which one way is shown: pure.

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
  if (!conversation.title && message.role === "user") conversation.title = message.content.trim().slice(0, 60);
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

/** Returns what a request says, up to and with the message `last`. */
export function messagesUpTo(conversation, last) {
  const before = [];
  for (let node = last; node; node = conversation.nodes[node.parent]) before.unshift(node);
  const system = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  return [...system, ...before.map(sent)];
}

function sent(node) {
  const message = { role: node.role, content: node.content };
  if (node.role === "tool") message.tool_call_id = node.tool_call_id;
  if (node.role === "assistant") {
    if (node.reasoning) message.reasoning_content = node.reasoning;
    if (node.tool_calls?.length) {
      message.tool_calls = node.tool_calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
      if (!node.content) message.content = null;
    }
  }
  return message;
}

/** Returns both conversations in one: each has the messages that the other lacks, and the later choice counts. */
export function merged(ours, theirs) {
  const [older, newer] = ours.updated >= theirs.updated ? [theirs, ours] : [ours, theirs];
  return { ...newer, nodes: { ...older.nodes, ...newer.nodes }, chosen: { ...older.chosen, ...newer.chosen } };
}

/** Returns a conversation read from a file; throws where it is none. */
export function imported(text) {
  const found = JSON.parse(text);
  const isText = (value) => typeof value === "string";
  if (found?.format !== "mlx-serve-chat" || typeof found.nodes !== "object" || found.nodes === null) throw new Error("This file is no exported conversation.");
  const conversation = { ...newConversation(isText(found.model) ? found.model : null), title: isText(found.title) ? found.title.slice(0, 60) : "", system: isText(found.system) ? found.system : "" };
  for (const node of Object.values(found.nodes)) {
    if (!isText(node?.id) || !isText(node.parent) || !["user", "assistant", "tool"].includes(node.role) || !isText(node.content)) throw new Error("A message of this file cannot be read.");
    const calls = Array.isArray(node.tool_calls) ? node.tool_calls.filter((call) => isText(call?.id) && isText(call.name) && isText(call.arguments)) : undefined;
    conversation.nodes[node.id] = {
      id: node.id, parent: node.parent, role: node.role, content: node.content, created: Number(node.created) || 0,
      reasoning: isText(node.reasoning) ? node.reasoning : undefined,
      tool_call_id: isText(node.tool_call_id) ? node.tool_call_id : undefined,
      tool_calls: calls?.map(({ id, name, arguments: given }) => ({ id, name, arguments: given })),
    };
  }
  for (const [parent, child] of Object.entries(found.chosen ?? {})) if (isText(child)) conversation.chosen[parent] = child;
  return conversation;
}

export function exported(conversation) {
  const { model, title, system, settings, nodes, chosen } = conversation;
  return JSON.stringify({ format: "mlx-serve-chat", title, model, system, settings, nodes, chosen }, null, 1);
}
