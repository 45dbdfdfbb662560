// Conversations, turn by turn: how much was kept, what the rest cost, and which words were to blame.

import { reasonOf } from "../lib/api.js";
import { h, update } from "../lib/dom.js";
import { ago, count, ms, percent, seconds, sessionLink, sessionName } from "../lib/format.js";
import { bar } from "./now.js";

export const view = { id: "sessions", title: "Sessions", mount };

function mount(root, app) {
  let list = null;
  let detail = null;
  let chosen = null;
  let namespace = null;
  let error = null;
  let pinned = new Set();
  let seen = -1;

  const draw = () => root.hidden || update(root, chosen ? [back(), page()] : overview());
  const unsubscribe = app.live.subscribe(() => {
    if (!root.hidden && app.live.changes !== seen) refresh();
  });

  async function refresh() {
    seen = app.live.changes;
    try {
      if (chosen) {
        detail = await app.api.get(`v1/sessions/${encodeURIComponent(chosen)}${query()}`);
      } else {
        list = await app.api.get("v1/sessions");
      }
      error = null;
    } catch (problem) {
      error = reasonOf(problem);
    }
    draw();
  }

  /** Names the namespace: the one of the address, or else that of the session that is called so. */
  function query() {
    const found = namespace ?? list?.data.find((one) => one.id === chosen)?.namespace;
    return found ? `?namespace=${encodeURIComponent(found)}` : "";
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
    return [
      h(
        "table",
        { class: "sessions" },
        h("thead", {}, h("tr", {}, ["Session", "Turns", "Kept", "Restored", "Evaluated", "Lost", "Last"].map((name, place) => h("th", { scope: "col", class: place ? "number" : null }, name)))),
        h("tbody", {}, list.data.slice(0, 300).map(listRow)),
      ),
      list.data.length > 300 && h("p", { class: "hint" }, `and ${count(list.data.length - 300)} more`),
      refusals(),
    ];
  }

  function listRow(one) {
    return h(
      "tr",
      { "data-key": `${one.namespace}/${one.id}` },
      h("th", { scope: "row" }, h("a", { href: sessionLink(one.id, one.namespace) }, sessionName(one.id)), h("small", {}, one.key ? ` ${one.key}` : "", one.named ? "" : " (named by the server)")),
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
    const path = `v1/sessions/${encodeURIComponent(chosen)}`;
    const isPinned = pinned.has(chosen);
    return h(
      "article",
      {},
      h("h2", {}, sessionName(detail.id), h("small", {}, `${detail.model}, ${count(detail.num_turns)} turns`)),
      h(
        "menu",
        {},
        h("button", { type: "button", title: "Its state is not given up for others", onclick: async () => {
          const said = isPinned ? "It may be given up again." : "Its state stays, also that of turns to come.";
          if (await act(`${path}/${isPinned ? "unpin" : "pin"}${query()}`, said)) isPinned ? pinned.delete(chosen) : pinned.add(chosen);
          draw();
        } }, isPinned ? "Unpin" : "Pin"),
        h("button", { type: "button", onclick: async () => {
          if (await act(`${path}${query()}`, "Forgotten.", "del")) app.navigate("#/sessions");
        } }, "Forget"),
      ),
      adviceOf(detail),
      h("ol", { class: "turns" }, detail.turns.map(turn).reverse()),
    );
  }

  return {
    show([id, of] = []) {
      chosen = id || null;
      namespace = of || null;
      detail = null;
      draw();
      refreshWithList();
    },
    hide() {},
    end: unsubscribe,
  };

  async function refreshWithList() {
    if (chosen && !list) {
      try {
        list = await app.api.get("v1/sessions");
        const cache = await app.api.get("v1/cache?limit=0");
        pinned = new Set(cache.pinned_sessions);
      } catch {
        // The page itself says what is wrong.
      }
    }
    refresh();
  }
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

function turn(one, place) {
  const all = Math.max(1, one.prompt_tokens);
  const said = `${count(one.cached_tokens)} of ${count(one.prompt_tokens)} tokens restored`;
  return h(
    "li",
    { "data-key": one.id },
    h("h3", {}, `Turn ${place + 1}`, h("small", {}, `${ago(one.ended)} · ${one.finish}`)),
    h("span", { class: "bar", role: "img", "aria-label": said }, bar((100 * one.cached_tokens) / all, one.tier ?? "live"), bar((100 * (one.evaluated_tokens - one.lost_tokens)) / all, "new"), bar((100 * one.lost_tokens) / all, "lost")),
    h("p", {}, `${said}${one.tier ? ` from ${one.tier === "live" ? "the slot itself" : one.tier}` : ""}; ${count(one.evaluated_tokens)} evaluated in ${ms(one.prompt_ms)}${one.kept === null ? "" : `; ${percent(one.kept)} of the turn before kept`}.`, withoutCache(one)),
    one.misses.filter((found) => found.lost_tokens || found.before || found.after).map(miss),
  );
}

/** What the first token would have waited for, by what a token took in this very turn. */
function withoutCache(one) {
  if (!one.evaluated_tokens || !one.cached_tokens) return null;
  return ` Without the cache: about ${ms((one.prompt_ms * one.prompt_tokens) / one.evaluated_tokens)}.`;
}

function miss(one) {
  return h(
    "div",
    { class: "miss" },
    h("p", {}, h("b", {}, `${count(one.lost_tokens)} tokens again: `), `${one.reason.replaceAll("_", " ")}, ${one.cause}`, one.message_index !== null && ` in message ${one.message_index}${one.role ? ` (${one.role})` : ""}`),
    (one.before || one.after) && h("p", { class: "words" }, h("del", {}, one.before || "nothing"), " ", h("ins", {}, one.after || "nothing")),
    one.cure && h("p", { class: "hint" }, one.cure),
  );
}
