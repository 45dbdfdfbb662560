// What happens now: slots as lanes, the queue, memory by tier, what was saved.

import { chart } from "../lib/chart.js";
import { h, update } from "../lib/dom.js";
import { bytes, count, counted, percent, rate, seconds, sessionLink } from "../lib/format.js";
import { sum } from "../lib/live.js";
import { waitOf, whoseOf } from "../lib/names.js";
import { firstSteps } from "./first.js";

export const view = { id: "now", title: "Now", mount };

const REASONS = {
  evicted: "given up for lack of memory",
  messages_changed: "an earlier message was changed",
  history_trimmed: "earlier messages were left out",
  reply_changed: "an answer came back otherwise than it was given",
  thoughts_removed: "thoughts were left out of an answer",
  tools_changed: "other tools",
  system_changed: "another system message",
  note_moved: "a note moves from message to message",
  branched: "the conversation went on from an earlier message",
  model_changed: "another model",
  namespace_changed: "another key or salt",
  side_request: "a request beside the conversation, such as one for a title",
  template: "the model’s template shows an earlier message otherwise",
  template_changed: "a setting of the model’s template was changed",
  model_unloaded: "the model was unloaded",
  disabled: "the request does without the cache",
  no_restore_point: "the model’s state can be restored at few places only",
  cleared: "the cache was cleared",
  restarted: "the server was restarted",
};
/** How long a slot that has become idle keeps its row: rows below would jump. */
const STAY_SECONDS = 20;

function mount(root, app) {
  const draw = () => root.hidden || update(root, content(app));
  const steps = firstSteps(app, draw);
  app.steps = steps;
  app.lastHeld = {};
  app.live.subscribe(draw);
  return { show: draw };
}

function content(app) {
  const { stats, error } = app.live;
  if (!stats) return h("p", { class: "empty" }, error ? `No figures: ${error.message}` : "Asking the server …");
  return [
    headline(app.live),
    app.steps.isWanted(stats) && app.steps.panel(),
    stats.models.map((model) => lanes(app, model)),
    stats.loading.map((one) => h("p", { class: "loading" }, h("b", {}, one.id), ` is being loaded: ${one.step}`)),
    !stats.models.length && !stats.loading.length && h("p", { class: "empty" }, "No model is loaded. The first request that names one has it loaded; ", h("a", { href: "#/models" }, "Models"), " shows which there are."),
    queue(app),
    memory(stats),
    charts(app.live),
    misses(stats),
  ];
}

function headline(live) {
  const { totals } = live.stats;
  const lastMinute = (name) => live.grown(name, 60);
  const prompt = totals.prompt_tokens;
  const recent = lastMinute("prompt");
  return h(
    "dl",
    { class: "headline" },
    figure("Tokens not evaluated again", count(totals.cached_tokens), `${count(lastMinute("cached"))} in the last minute`, "accent"),
    figure("Waiting saved", seconds(totals.saved_seconds), `${seconds(lastMinute("saved"))} in the last minute`),
    figure("Hit rate", percent(prompt ? totals.cached_tokens / prompt : null), `${percent(recent ? lastMinute("cached") / recent : null)} in the last minute`),
    figure("Requests", count(totals.requests), `${count(totals.failed)} failed, ${count(totals.cancelled)} left early`),
  );
}

function figure(name, value, more, kind = "") {
  return h("div", {}, h("dt", {}, name), h("dd", { class: kind }, value, h("small", {}, more)));
}

function lanes(app, model) {
  const open = app.live.stats.requests.filter((one) => one.model === model.id || model.slots.total);
  const held = new Map(open.filter((one) => one.slot !== null && belongs(app, one, model)).map((one) => [one.slot, one]));
  const { slots } = model;
  const shown = rowsOf(app, model, held);
  const ahead = slots.prefilling + slots.decoding - held.size;
  return h(
    "section",
    { class: "panel", "data-key": `model-${model.id}` },
    h("h2", {}, model.id, h("small", {}, `${held.size} of ${counted(slots.total, "slot")} ${held.size === 1 ? "answers" : "answer"}${ahead > 0 ? ", turns to come are evaluated ahead" : ""}${drafts(model)}`)),
    h(
      "ol",
      { class: "lanes", "aria-label": `Slots of ${model.id}` },
      shown.map((slot) => lane(app, slot, held.get(slot))),
      slots.total > shown.length && h("li", { class: "lane idle", "data-key": "idle" }, h("span", { class: "slot" }), h("span", { class: "who" }, shown.length ? `${count(slots.total - shown.length)} more idle` : counted(slots.total, "idle slot"))),
    ),
  );
}

/** Returns the slots with a row: those that answer, and those that did just now. */
function rowsOf(app, model, held) {
  const last = (app.lastHeld[model.id] ??= new Map());
  const now = app.live.stats.time;
  for (const slot of held.keys()) last.set(slot, now);
  for (const [slot, time] of last) if (now - time > STAY_SECONDS) last.delete(slot);
  return [...last.keys()].sort((a, b) => a - b);
}

function drafts(model) {
  const [drafted, accepted] = ["drafted", "accepted"].map((kind) => sum(Object.values(model.drafts?.[kind] ?? {}), (one) => one));
  return drafted ? `, ${percent(accepted / drafted)} of ${count(drafted)} drafted tokens accepted` : "";
}

/** An adapter's requests run in the slots of its model; with one model loaded they are all its. */
function belongs(app, request, model) {
  const ids = app.live.stats.models.map((one) => one.id);
  return request.model === model.id || (!ids.includes(request.model) && ids.length === 1);
}

function lane(app, slot, request) {
  if (!request) return h("li", { class: "lane idle", "data-key": `slot-${slot}` }, h("span", { class: "slot" }, slot), h("span", { class: "who" }, "idle"));
  const done = request.cached_tokens + request.evaluated_tokens;
  const isPrefill = request.phase === "prefill";
  const speed = app.live.speeds.get(request.id);
  const what = isPrefill ? `evaluating ${count(done)} of ${count(request.prompt_tokens)}` : `${counted(request.completion_tokens, "token")}${speed > 0 ? `, ${rate(speed)}` : ""}`;
  return h(
    "li",
    { class: `lane ${request.phase}`, "data-key": `slot-${slot}` },
    h("span", { class: "slot" }, slot),
    h("a", { class: "who", href: request.session_id ? sessionLink(request.session_id, request.namespace) : "#/requests" }, whoseOf(request, app.live)),
    promptBar(request, done),
    h("span", { class: "what" }, what),
    h("span", { class: "time" }, seconds(request.seconds)),
  );
}

function promptBar(request, done) {
  const share = (part) => `${(100 * part) / Math.max(1, request.prompt_tokens)}`;
  const said = `${count(request.cached_tokens)} restored, ${count(request.evaluated_tokens)} evaluated of ${count(request.prompt_tokens)}`;
  return h("span", { class: "bar", role: "img", "aria-label": said, title: said }, bar(share(request.cached_tokens), request.tier ?? "live"), bar(share(done - request.cached_tokens), "work"));
}

/** A part of a bar. Widths are attributes of SVG, since a style would be refused by the page's own policy. */
function bar(width, kind) {
  const ns = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(ns, "svg");
  svg.setAttribute("class", `part ${kind}`);
  svg.setAttribute("width", `${width}%`);
  svg.setAttribute("aria-hidden", "true");
  return svg;
}

function queue(app) {
  const waiting = app.live.stats.requests.filter((one) => one.phase === "waiting");
  if (!waiting.length) return null;
  return h(
    "section",
    { class: "panel" },
    h("h2", {}, "Waiting", h("small", {}, `${waiting.length}`)),
    h("ol", { class: "queue" }, waiting.slice(0, 12).map((one) => h("li", { "data-key": one.id }, h("b", {}, whoseOf(one, app.live)), ` waits ${waitOf(one, app.live)} · ${one.prompt_tokens ? `${counted(one.prompt_tokens, "token")}, ` : ""}${seconds(one.seconds)}`))),
    waiting.length > 12 && h("p", { class: "hint" }, `and ${waiting.length - 12} more`),
  );
}

function memory(stats) {
  return h(
    "section",
    { class: "panel" },
    h("h2", {}, "State of past tokens"),
    stats.models.map(({ id, cache, moved, disk_budget_bytes: diskBudget }) => {
      const budget = cache.budget_bytes || 1;
      const said = `${bytes(cache.live_bytes)} live and ${bytes(cache.stored_bytes)} stored of ${bytes(cache.budget_bytes)}`;
      return h(
        "div",
        { class: "tier", "data-key": id },
        stats.models.length > 1 && h("h3", {}, id),
        h("span", { class: "label" }, "Memory"),
        h("span", { class: "bar", role: "img", "aria-label": said }, bar((100 * cache.live_bytes) / budget, "live"), bar((100 * cache.stored_bytes) / budget, "memory")),
        h("span", { class: "amount" }, h("span", { class: "live" }, `live ${bytes(cache.live_bytes)}`), h("span", { class: "memory" }, `stored ${bytes(cache.stored_bytes)}`), `of ${bytes(cache.budget_bytes)}`),
        diskBudget && [
          h("span", { class: "label" }, "Disk"),
          h("span", { class: "bar", role: "img", "aria-label": `${bytes(cache.disk_bytes)} of ${bytes(diskBudget)} on disk` }, bar((100 * cache.disk_bytes) / diskBudget, "disk")),
          h("span", { class: "amount" }, h("span", { class: "disk" }, `files ${bytes(cache.disk_bytes)}`), `of ${bytes(diskBudget)}`),
        ],
        h("p", { class: "hint" }, `${counted(cache.nodes, "edge")} · brought into a slot ${counted(moved.page_ins, "time")}, out of one ${counted(moved.page_outs, "time")} · given up ${counted(cache.evictions, "time")}${diskBudget ? ` · ${bytes(moved.disk_written_bytes)} written, ${bytes(moved.disk_read_bytes)} read` : ""}`),
      );
    }),
  );
}

function charts(live) {
  const { samples } = live;
  const now = samples.at(-1)?.time ?? Date.now() / 1000;
  const speed = (name) =>
    samples.slice(1).map((one, place) => {
      const before = samples[place];
      return [one.time, Math.max(0, (one[name] - before[name]) / Math.max(0.2, one.time - before.time))];
    });
  const level = (name) => samples.map((one) => [one.time, one[name]]);
  return h(
    "section",
    { class: "panel charts" },
    h("h2", {}, "The last 15 minutes", samples.length > 1 && now - samples[0].time < 840 && h("small", {}, `of which ${seconds(now - samples[0].time)} are known`)),
    chart("Generated", [{ name: "", color: "live", values: speed("completion") }], { text: rate, now }),
    chart("Evaluated", [{ name: "", color: "work", values: speed("evaluated") }], { text: rate, now }),
    chart("Held", [["live", "live"], ["stored", "memory"], ["disk", "disk"]].filter(([, tier]) => tier === "live" || samples.some((one) => one[tier])).map(([name, tier]) => ({ name, color: tier, values: level(tier) })), { text: bytes, now, stacked: true }),
  );
}

function misses(stats) {
  const lost = stats.totals.lost_tokens;
  const found = stats.totals.misses.filter((one) => one.tokens);
  if (!found.length) return null;
  return h(
    "section",
    { class: "panel" },
    h("h2", {}, "Evaluated again", h("small", {}, counted(lost, "token"))),
    h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Why"), h("th", { scope: "col", class: "number" }, "Times"), h("th", { scope: "col", class: "number" }, "Tokens"))),
      h("tbody", {}, found.map((one) => h("tr", {}, h("th", { scope: "row" }, REASONS[one.reason] ?? one.reason.replaceAll("_", " ")), h("td", { class: "number" }, count(one.count)), h("td", { class: "number" }, count(one.tokens)))))),
    h("p", { class: "hint" }, h("a", { href: "#/sessions" }, "Sessions"), " shows which words changed, and what to do."),
  );
}

export { REASONS, bar };
