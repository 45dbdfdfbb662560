// The latest requests as a waterfall: queue, restore, prefill, decode.

import { h, s, update } from "../lib/dom.js";
import { clock, count, counted, ms, percent, seconds, sessionLink } from "../lib/format.js";
import { whoseOf } from "../lib/names.js";
import { REASONS } from "./now.js";

export const view = { id: "requests", title: "Requests", mount };

const PHASES = { queue: "waiting", restore: "restoring", prefill: "evaluating", decode: "generating" };
const OPEN = { waiting: "waits", prefill: "evaluates", decode: "generates" };

function mount(root, app) {
  const filter = { text: "", status: "all", model: "all" };
  let open = null;
  const draw = () => root.hidden || update(root, content());
  app.live.subscribe(draw);

  function content() {
    const all = [...app.live.requests.values()].sort((a, b) => b.received - a.received);
    const found = all.filter(isWanted);
    const models = [...new Set(all.map((one) => one.model))];
    return [
      h(
        "form",
        { class: "filters", onsubmit: (event) => event.preventDefault() },
        h("label", {}, "Session or id ", h("input", { type: "search", value: filter.text, oninput: set("text") })),
        h("label", {}, "Status ", select(filter.status, ["all", "open", "done", "cancelled", "failed"], set("status"))),
        models.length > 1 && h("label", {}, "Model ", select(filter.model, ["all", ...models], set("model"))),
        h("p", { class: "legend" }, Object.entries(PHASES).map(([phase, said]) => h("span", { class: phase }, said))),
      ),
      found.length ? table(found) : h("p", { class: "empty" }, all.length ? "No request is like that." : "No request yet. Each one is shown here, the last 200 of them."),
    ];
  }

  function set(name) {
    return (event) => {
      filter[name] = event.target.value;
      draw();
    };
  }

  function isWanted(one) {
    const text = filter.text.toLowerCase();
    const isLike = !text || `${one.session_id ?? ""} ${one.title ?? ""} ${one.id}`.toLowerCase().includes(text);
    return isLike && (filter.status === "all" || statusOf(one) === filter.status) && (filter.model === "all" || one.model === filter.model);
  }

  function table(found) {
    const longest = Math.max(0.05, ...found.map((one) => timesOf(one).total));
    return h(
      "table",
      { class: "waterfall" },
      h("thead", {}, h("tr", {}, ["When", "Session", "Where the time went", "Prompt", "Reused", "Output", "Total"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, found.map((one) => [row(one, longest), open === one.id && details(one)])),
    );
  }

  function row(one, longest) {
    const times = timesOf(one);
    const toggle = () => {
      open = open === one.id ? null : one.id;
      draw();
    };
    return h(
      "tr",
      { "data-key": one.id, class: statusOf(one), onclick: toggle },
      h("td", {}, clock(one.received)),
      h("td", {}, h("button", { type: "button", class: "link", "aria-expanded": String(open === one.id) }, whoseOf(one, app.live))),
      h("td", { class: "fall" }, waterfall(times, longest)),
      h("td", { class: "number" }, count(one.prompt_tokens)),
      h("td", { class: "number" }, one.cached_tokens === undefined ? "–" : percent(one.prompt_tokens ? one.cached_tokens / one.prompt_tokens : null)),
      h("td", { class: "number" }, one.completion_tokens === undefined ? "–" : count(one.completion_tokens)),
      h("td", { class: "number" }, one.ended ? ms(one.total_ms) : statusOf(one) === "open" ? (OPEN[one.phase] ?? one.phase) : "–"),
    );
  }

  function details(one) {
    const facts = [
      ["Request", one.id],
      ["Endpoint", one.endpoint ?? "–"],
      ["Model", one.model],
      ["Session", one.session_id ?? "–"],
      ["Key", one.key ?? "none"],
      ["Slot", one.slot ?? "–"],
      ["Sampling", samplingOf(one)],
      ["Known to the cache", one.match_tokens === undefined ? "–" : counted(one.match_tokens, "token")],
      ["Restored", one.cached_tokens === undefined ? "–" : `${counted(one.cached_tokens, "token")}${one.tier ? ` from ${one.tier === "live" ? "the slot itself" : one.tier}` : ""}, ${ms(one.restore_ms)}`],
      ["Evaluated", one.evaluated_tokens === undefined ? "–" : `${counted(one.evaluated_tokens, "token")}, ${ms(one.prompt_ms)}`],
      ["Waited", ms(one.queue_ms)],
      ["First token", ms(one.first_ms)],
      ["Ended", one.finish ?? "not yet"],
      ["Evaluated again", one.lost_tokens ? [counted(one.lost_tokens, "token"), REASONS[one.miss?.reason]].filter(Boolean).join(": ") : "nothing"],
    ];
    return h(
      "tr",
      { class: "details", "data-key": `${one.id}-details` },
      h("td", { colspan: 7 }, h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
        one.session_id && h("a", { href: sessionLink(one.session_id, one.namespace) }, "The session, turn by turn")),
    );
  }

  return { show: draw };
}

function select(value, names, onchange) {
  return h("select", { value, onchange }, names.map((name) => h("option", { value: name, selected: name === value }, name)));
}

function statusOf(one) {
  if (!one.ended) return "open";
  if (one.finish === "cancelled") return "cancelled";
  return String(one.finish).startsWith("failed") ? "failed" : "done";
}

function samplingOf(one) {
  if (one.temperature === undefined) return "–";
  const parts = [`temperature ${one.temperature}`, one.top_p < 1 && `top p ${one.top_p}`, one.top_k > 0 && `top k ${one.top_k}`, one.min_p > 0 && `min p ${one.min_p}`, one.seed !== null && `seed ${one.seed}`];
  return [...parts.filter(Boolean), `at most ${count(one.max_tokens)} tokens`].join(", ");
}

/** Returns the seconds of each phase, so far where the request runs. */
function timesOf(one) {
  const end = one.ended ?? Date.now() / 1000;
  const total = one.ended ? one.total_ms / 1000 : end - one.received;
  const queue = one.queue_ms === undefined ? total : one.queue_ms / 1000;
  const restore = one.queue_ms !== undefined ? (one.restore_ms ?? 0) / 1000 : 0;
  const first = one.first_ms === undefined ? total : one.first_ms / 1000;
  const prefill = Math.max(0, Math.min(first, total) - queue - restore);
  return { total, queue, restore, prefill, decode: Math.max(0, total - queue - restore - prefill) };
}

function waterfall(times, longest) {
  const said = Object.entries(PHASES).map(([phase, name]) => `${name} ${seconds(times[phase])}`).join(", ");
  let x = 0;
  return s(
    "svg",
    { viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": said },
    s("title", {}, said),
    Object.keys(PHASES).map((phase) => {
      const width = (100 * times[phase]) / longest;
      const part = s("rect", { class: phase, x: x.toFixed(2), y: 1, width: width.toFixed(2), height: 8 });
      x += width;
      return part;
    }),
  );
}
