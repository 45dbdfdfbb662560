// Edges and sessions in people's words, and the colours of sessions: pure.

import { count, counted } from "./format.js";

const WAITS = {
  slot: "for a slot: all of them answer others",
  memory: "for memory, which running answers hold",
  disk: "while its state is read from disk",
  order: "for its turn: others go first",
  model: "for its model to be loaded",
};
const OF_ONE = { user: "question", assistant: "answer", tool: "result of a tool", tools: "tools", system: "system message" };
const DOCUMENT_TOKENS = 400;
const GOLDEN_ANGLE = 137.508;
/** Lightness and colourfulness of a tier, and whether text on it is light. */
const SHADES = {
  light: { live: [0.47, 0.12, true], memory: [0.88, 0.07, false], disk: [0.95, 0.03, false] },
  dark: { live: [0.77, 0.11, false], memory: [0.4, 0.08, true], disk: [0.29, 0.04, true] },
};

/** Whether the server or this page made a session's name up: its first words say more. */
function isMadeUp(id) {
  return !id || /^(unnamed|chat)-[0-9a-f]{6,}$/.test(id);
}

export function titleOf(session) {
  const title = withoutTemplate(session?.title ?? "");
  if (!session) return "a conversation";
  // So the tree has what decisions leave.
  if (session.id === "") return "requests without a session";
  if (isMadeUp(session.id)) return title ? `“${shortened(title, 40)}”` : session.id ? "unnamed" : "no session yet";
  return shortened(session.id, 40);
}

/** What a request's session is called. */
export function whoseOf(request, live) {
  if (!request.session_id && /\/(decisions|systemone)$/.test(request.endpoint)) return "a decision";
  return titleOf({ id: request.session_id, title: request.title ?? live.requests.get(request.id)?.title });
}

/** What an open request waits for. */
export function waitOf({ waits_for: wait }, live) {
  const other = [...live.requests.values()].find((one) => one.title && one.session_id === wait?.session_id);
  const whose = wait?.session_id ? `${whoseOf(other ?? wait, live)}’s` : "another request’s";
  if (wait?.reason === "beginning") return `for ${whose} beginning, ${count(wait.evaluated)} of ${counted(wait.total, "token")}`;
  if (wait?.reason === "answer") return `for ${whose} answer, which it goes on from`;
  return WAITS[wait?.reason] ?? "for the step that runs now to end";
}

export function shortened(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/** A text without the template's own tokens. */
export function withoutTemplate(text) {
  return text.replace(/<\|[^|<>]{1,40}\|>(?:(?:system|user|assistant|tool)\n)?/g, " ").replace(/^\s*(?:system|user|assistant|tool)\n/, "").replace(/\s+/g, " ").trim();
}

/** Returns `{who, what, quote, isShared}` of an edge; `sessions` are those of the cache by id. */
export function nameOf(edge, sessions) {
  const quote = withoutTemplate(edge.name?.text ?? "") || withoutTemplate(edge.preview) || edge.preview.replaceAll("\n", "⏎");
  if (!edge.name) return { who: "", what: "", quote };
  const { sessions: ids, num_sessions: total } = edge.name;
  const first = titleOf(sessions.get(ids[0]) ?? { id: ids[0] });
  return { who: total > 1 ? `${first} and ${count(total - 1)} more` : first, what: whatOf(edge), quote, isShared: total > 1 };
}

function whatOf({ name, tokens }) {
  const tools = name.tools ? `tools (${count(name.tools)})` : "";
  if (name.first === null) return "text";
  if (name.role === "tools") return name.last > name.first ? `${tools} and messages to ${name.last}` : tools;
  if (name.role === "system") return ["system message", tools, name.last > name.first && "a first question"].filter(Boolean).join(", ");
  if (name.last > name.first) return `messages ${name.first} to ${name.last}`;
  return name.role === "user" && tokens >= DOCUMENT_TOKENS ? "document" : (OF_ONE[name.role] ?? name.role);
}

/** One line for an edge; `isShared` ones say first what they are, others whose. */
export function lineOf({ who, what, quote, isShared }) {
  const whose = who && what ? (isShared ? `${what} of ${who}` : `${who}: ${what}`) : who || what;
  return [whose, quote].filter(Boolean).join(" · ");
}

/** Hues of sessions: each new one is far from those before, and keeps its own while the page is open. */
export class Hues {
  constructor() {
    this.known = new Map();
  }

  /** Hands out hues, the oldest session first. */
  learn(ids) {
    for (const id of ids) if (!this.known.has(id)) this.known.set(id, (25 + this.known.size * GOLDEN_ANGLE) % 360);
  }

  /** Returns the hue of an edge; null for one of several sessions or of none. */
  of(edge) {
    return edge.name?.num_sessions === 1 ? (this.known.get(edge.name.sessions[0]) ?? null) : null;
  }
}

/** Returns `{fill, ink}` for a tier and a hue; without a hue it is grey. */
export function colour(tier, hue, isDark) {
  const [lightness, chroma, isLight] = SHADES[isDark ? "dark" : "light"][tier] ?? SHADES[isDark ? "dark" : "light"].memory;
  return { fill: `oklch(${lightness} ${hue === null ? 0.012 : chroma} ${(hue ?? 70).toFixed(1)})`, ink: isLight ? "#ffffff" : "#16130f" };
}
