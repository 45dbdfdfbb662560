// Conversations, turn by turn: how much was kept, what the rest cost, and which words were to blame.

import { Questions, reasonOf } from "../lib/api.js";
import { h, update } from "../lib/dom.js";
import { ago, count, counted, ms, percent, seconds, sessionLink } from "../lib/format.js";
import { shortened, titleOf } from "../lib/names.js";
import { bar } from "./now.js";

export const view = { id: "sessions", title: "Sessions", mount };

const MAX_ROWS = 300;
const GROUPS = { none: "nothing", key: "key", client: "client", model: "model" };
const COLUMNS = [
  ["Session", (one) => titleOf(one).toLowerCase()],
  ["Turns", (one) => one.num_turns],
  ["Kept", (one) => one.kept ?? -1],
  ["Restored", (one) => one.cached_tokens],
  ["Evaluated", (one) => one.evaluated_tokens],
  ["Lost", (one) => one.lost_tokens],
  ["Last", (one) => one.last_used],
];

function mount(root, app) {
  const filter = { text: "", group: "none", by: "Last", isUp: false };
  let list = null;
  let detail = null;
  let chosen = null;
  let namespace = null;
  let error = null;
  let pinned = new Set();
  let seen = -1;
  const questions = new Questions();

  const draw = () => root.hidden || update(root, chosen ? [back(), page()] : overview());
  const unsubscribe = app.live.subscribe(() => {
    if (!root.hidden && app.live.changes !== seen) refresh();
  });

  async function refresh() {
    seen = app.live.changes;
    const counts = questions.begin();
    let found = {};
    let problem = null;
    try {
      found = chosen ? await look(chosen) : { list: await app.api.get("v1/sessions") };
    } catch (failure) {
      problem = reasonOf(failure);
    }
    if (!counts()) return;
    ({ list, detail, pinned } = { list, detail, pinned, ...found });
    error = problem;
    draw();
  }

  /** Reads a session and, when it comes to be shown, which ones are pinned. */
  async function look(id) {
    const known = list ?? (await app.api.get("v1/sessions"));
    const asked = query(known);
    const found = await app.api.get(`v1/sessions/${encodeURIComponent(id)}${asked}`);
    // Pins are those of one model, which has to be loaded.
    const cache = detail ? null : await app.api.get(`v1/cache${query(known, { limit: 0, model: found.model })}`).catch(() => null);
    return { list: known, detail: found, pinned: detail ? pinned : new Set(cache?.pinned_sessions) };
  }

  /** Names the namespace: the one of the address, or else that of the session that is called so. */
  function query(known = list, more = {}) {
    const found = namespace ?? known?.data.find((one) => one.id === chosen)?.namespace;
    return `?${new URLSearchParams(found ? { ...more, namespace: found } : more)}`;
  }

  async function act(path, said, method = "post") {
    try {
      await app.api[method](path);
      app.toast(said);
      return true;
    } catch (problem) {
      app.toast(reasonOf(problem));
      return false;
    }
  }

  function overview() {
    if (error) return h("p", { class: "empty" }, error);
    if (!list) return h("p", { class: "empty" }, "Asking the server …");
    if (!list.data.length) return [h("p", { class: "empty" }, "No conversation yet. Every request becomes a turn of one, whether or not its client names it."), refusals()];
    const text = filter.text.toLowerCase();
    const found = list.data.filter((one) => `${one.id} ${one.title} ${one.model} ${one.client} ${one.key ?? ""}`.toLowerCase().includes(text));
    const [, value] = COLUMNS.find(([name]) => name === filter.by);
    found.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (filter.isUp ? 1 : -1));
    const groups = Object.groupBy(found.slice(0, MAX_ROWS), (one) => (filter.group === "none" ? "" : one[filter.group] || "none"));
    return [
      h("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
        h("label", {}, "Search ", h("input", { type: "search", value: filter.text, oninput: set("text") })),
        h("label", {}, "Group by ", h("select", { value: filter.group, onchange: set("group") }, Object.entries(GROUPS).map(([name, said]) => h("option", { value: name }, said))))),
      h("p", { class: "hint" }, h("b", {}, "Kept"), ": how much of the turn before the last one did not have to be evaluated again. ", h("b", {}, "Restored"), ": prompt tokens that were there already, of all turns. ", h("b", {}, "Lost"), ": tokens that had been there and were evaluated again, and the time that took."),
      h("table", { class: "sessions" },
        h("thead", {}, h("tr", {}, COLUMNS.map(([name], place) => h("th", { scope: "col", class: place ? "number" : null, "aria-sort": filter.by === name ? (filter.isUp ? "ascending" : "descending") : null }, h("button", { type: "button", class: "link", onclick: sortBy(name) }, name, filter.by === name && (filter.isUp ? " ↑" : " ↓")))))),
        Object.entries(groups).map(([name, rows]) => h("tbody", { "data-key": `group-${name}` },
          name !== "" && h("tr", { class: "group" }, h("th", { colspan: COLUMNS.length, scope: "rowgroup" }, name, h("small", {}, counted(rows.length, "session")))),
          rows.map(listRow)))),
      !found.length && h("p", { class: "empty" }, "No session is like that."),
      found.length > MAX_ROWS && h("p", { class: "hint" }, `and ${count(found.length - MAX_ROWS)} more`),
      refusals(),
    ];
  }

  function set(name) {
    return (event) => {
      filter[name] = event.target.value;
      draw();
    };
  }

  function sortBy(name) {
    return () => {
      filter.isUp = filter.by === name ? !filter.isUp : name === "Session";
      filter.by = name;
      draw();
    };
  }

  function listRow(one) {
    const title = titleOf(one);
    const more = [title.startsWith("“") ? null : one.title && `“${shortened(one.title, 60)}”`, one.model, one.client, one.key].filter(Boolean);
    return h(
      "tr",
      { "data-key": `${one.namespace}/${one.id}` },
      h("th", { scope: "row" }, h("a", { href: sessionLink(one.id, one.namespace), title: one.id }, title), h("small", {}, more.join(" · "))),
      h("td", { class: "number" }, count(one.num_turns)),
      h("td", { class: "number" }, percent(one.kept)),
      h("td", { class: "number" }, count(one.cached_tokens)),
      h("td", { class: "number" }, count(one.evaluated_tokens)),
      h("td", { class: one.lost_tokens ? "number bad" : "number" }, one.lost_tokens ? `${count(one.lost_tokens)}, ${seconds(one.lost_seconds)}` : "–"),
      h("td", { class: "number" }, ago(one.last_used)),
    );
  }

  function refusals() {
    if (!list?.refused.length) return null;
    return h("section", { class: "panel" }, h("h2", {}, "Refused"), h("ul", { class: "refused" }, list.refused.slice(0, 20).map((one) =>
      h("li", {}, h("b", {}, `${one.status} ${one.code}`), ` ${one.path}: ${one.message}`, one.count > 1 && ` (${count(one.count)} times)`, h("small", {}, ` ${ago(one.ended)}`)))));
  }

  function back() {
    return h("p", {}, h("a", { href: "#/sessions" }, "← All sessions"));
  }

  function page() {
    if (error) return h("p", { class: "empty" }, error);
    if (!detail || detail.id !== chosen) return h("p", { class: "empty" }, "Asking the server …");
    const id = chosen;
    const path = `v1/sessions/${encodeURIComponent(id)}`;
    const isPinned = pinned.has(id);
    return h(
      "article",
      {},
      h("h2", {}, titleOf(detail), h("small", {}, [detail.title && !titleOf(detail).startsWith("“") && `“${detail.title}”`, detail.model, detail.client, detail.key, counted(detail.num_turns, "turn"), `last used ${ago(detail.last_used)}`].filter(Boolean).join(" · "))),
      h(
        "menu",
        {},
        h("button", { type: "button", title: "Its state is not given up for others", onclick: async () => {
          const said = isPinned ? "It may be given up again." : "Its state stays, also that of turns to come.";
          if (await act(`${path}/${isPinned ? "unpin" : "pin"}${query(list, { model: detail.model })}`, said)) isPinned ? pinned.delete(id) : pinned.add(id);
          questions.giveUp();
          draw();
          refresh();
        } }, isPinned ? "Unpin" : "Pin"),
        h("button", { type: "button", onclick: async () => {
          const isGone = await act(`${path}${query()}`, "Forgotten.", "del");
          if (isGone && chosen === id && !root.hidden) app.navigate("#/sessions");
        } }, "Forget"),
      ),
      adviceOf(detail),
      h("ol", { class: "turns" }, detail.turns.map((one, place) => turn(one, detail.num_turns - detail.turns.length + place + 1, app.live.requests.get(one.id)?.saved_seconds)).reverse()),
    );
  }

  return {
    show([id, of] = []) {
      questions.giveUp();
      chosen = id || null;
      namespace = of || null;
      detail = null;
      error = null;
      draw();
      refresh();
    },
    hide() {},
    end: unsubscribe,
  };
}

/** The advice of the costliest misses, each once. */
function adviceOf(detail) {
  const cures = new Map();
  for (const one of detail.turns.flatMap((turn) => turn.misses)) {
    if (one.lost_tokens && one.cure) cures.set(one.cure, (cures.get(one.cure) ?? 0) + one.lost_tokens);
  }
  if (!cures.size) return h("p", { class: "good" }, "Nothing to mend: every turn found what the one before left.");
  const best = [...cures].sort((a, b) => b[1] - a[1]).slice(0, 3);
  return h("section", { class: "advice" }, h("h3", {}, "What to do"), h("ul", {}, best.map(([cure, lost]) => h("li", {}, cure, h("small", {}, ` ${count(lost)} tokens`)))));
}

/** `saved` seconds are the server's, which knows those of the last requests. */
function turn(one, number, saved) {
  const all = Math.max(1, one.prompt_tokens);
  const said = `${count(one.cached_tokens)} of ${count(one.prompt_tokens)} tokens restored`;
  return h(
    "li",
    { "data-key": one.id },
    h("h3", {}, `Turn ${number}`, h("small", {}, `${ago(one.ended)} · ${one.finish}`)),
    h("span", { class: "bar", role: "img", "aria-label": said }, bar((100 * one.cached_tokens) / all, one.tier ?? "live"), bar((100 * (one.evaluated_tokens - one.lost_tokens)) / all, "new"), bar((100 * one.lost_tokens) / all, "lost")),
    h("p", {}, `${said}${one.tier ? ` from ${one.tier === "live" ? "the slot itself" : one.tier}` : ""}; ${count(one.evaluated_tokens)} evaluated in ${ms(one.prompt_ms)}${one.kept === null ? "" : `; ${percent(one.kept)} of the turn before kept`}.`, saved ? ` About ${seconds(saved)} saved.` : null),
    one.misses.filter((found) => found.lost_tokens || found.before || found.after).map(miss),
  );
}

const WORDS = new Intl.Segmenter(undefined, { granularity: "word" });
const MAX_WORDS = 200;

/** Returns `[kind, text]` pieces of two texts: what is in both, and the words that changed, as `del` and `ins`. */
function changesOf(before, after) {
  const [ours, theirs] = [before, after].map((text) => [...WORDS.segment(text)].map(({ segment }) => segment).slice(0, MAX_WORDS));
  const same = Array.from({ length: ours.length + 1 }, () => new Uint16Array(theirs.length + 1));
  for (let i = ours.length - 1; i >= 0; i -= 1) for (let j = theirs.length - 1; j >= 0; j -= 1) same[i][j] = ours[i] === theirs[j] ? same[i + 1][j + 1] + 1 : Math.max(same[i + 1][j], same[i][j + 1]);
  const pieces = [];
  const put = (kind, text) => (pieces.at(-1)?.[0] === kind ? (pieces.at(-1)[1] += text) : pieces.push([kind, text]));
  let [i, j] = [0, 0];
  while (i < ours.length || j < theirs.length) {
    if (i < ours.length && j < theirs.length && ours[i] === theirs[j]) put("", ours[(j += 1, i++)]);
    else if (i < ours.length && (j === theirs.length || same[i + 1][j] >= same[i][j + 1])) put("del", ours[i++]);
    else put("ins", theirs[j++]);
  }
  return together(pieces);
}

/** Joins changes between which nothing but blanks is the same: words that changed together are read together. */
function together(pieces) {
  const joined = [];
  for (let at = 0; at < pieces.length; ) {
    const change = { del: "", ins: "" };
    for (; at < pieces.length && (pieces[at][0] || (pieces[at + 1] && change.del + change.ins && !pieces[at][1].trim())); at += 1) {
      const [kind, text] = pieces[at];
      for (const one of kind ? [kind] : ["del", "ins"]) change[one] += text;
    }
    joined.push(...Object.entries(change).filter(([, text]) => text));
    if (at < pieces.length) joined.push(pieces[at++]);
  }
  return joined;
}

function miss(one) {
  return h(
    "div",
    { class: "miss" },
    h("p", {}, h("b", {}, `${counted(one.lost_tokens, "token")} again: `), one.cause, one.message_index !== null && ` in ${one.role === "system" && one.message_index === 0 ? "the system message" : `message ${one.message_index}${one.role ? ` (${one.role})` : ""}`}`),
    (one.before || one.after) && h("p", { class: "words", dir: "auto" }, changesOf(one.before ?? "", one.after ?? "").map(([kind, text]) => (kind ? h(kind, {}, text) : text))),
    one.cure && h("p", { class: "hint" }, one.cure),
  );
}
