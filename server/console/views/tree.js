// The prefix tree as an icicle: what is above is shared by all that is below it.

import { reasonOf } from "../lib/api.js";
import { h, update } from "../lib/dom.js";
import { bytes, count, counted, seconds, sessionLink, sessionName } from "../lib/format.js";
import { boxAt, boxesOf, treeOf } from "../lib/icicle.js";

export const view = { id: "tree", title: "Tree", mount };

const ROW = 24;
const GLOW_MS = 1800;
const LIMIT = 10000;
const TIERS = { live: "live in a slot", memory: "stored in memory", disk: "on disk only" };
const POINTS = {
  system_end: "the end of the system prompt",
  user_start: "where a question begins",
  prompt_end: "the end of a prompt",
  turn_end: "the end of a turn",
  branch: "where conversations part",
  explicit: "asked for by a client",
};

function mount(root, app) {
  const state = { cache: null, tree: null, top: null, chosen: null, by: "tokens", model: null, namespace: null, error: null, detail: null };
  const glow = new Map();
  let boxes = [];
  let seen = -1;
  let isFetching = false;
  let nextFetch = 0;
  let frame = null;
  const canvas = h("canvas", {
    tabindex: 0,
    role: "application",
    "aria-label": "The prefix tree. Arrow keys move, Enter goes into an edge, Escape comes back.",
    "aria-describedby": "tree-chosen",
    onclick: (event) => choose(edgeUnder(event), true),
    onkeydown: onKey,
  });
  const controls = h("div");
  const stage = h("div", { class: "stage" }, canvas);
  const side = h("aside", { "aria-label": "The chosen edge" });
  root.append(controls, h("div", { class: "tree-page" }, stage, side));
  canvas.onpointermove = (event) => {
    const edge = edgeUnder(event);
    canvas.title = edge ? edge.preview : "";
    if (edge && edge !== state.chosen && !state.isHeld) choose(edge, false);
  };
  new ResizeObserver(() => root.hidden || draw()).observe(stage);
  app.live.subscribe(() => {
    if (root.hidden) return;
    if (app.live.changes !== seen || app.live.stats?.requests.length) refresh();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  new MutationObserver(() => draw()).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });

  /** Looks again, at most once a second, and no more often than ten times what looking takes. */
  async function refresh(isForced = false) {
    if (isFetching || (!isForced && performance.now() < nextFetch)) {
      clearTimeout(state.later);
      state.later = setTimeout(() => root.hidden || refresh(), 1000);
      return;
    }
    isFetching = true;
    seen = app.live.changes;
    const begun = performance.now();
    try {
      const query = new URLSearchParams({ limit: LIMIT });
      if (state.model) query.set("model", state.model);
      if (state.namespace !== null) query.set("namespace", state.namespace);
      take(await app.api.get(`v1/cache?${query}`));
      goWhereSomethingIs();
      state.error = null;
    } catch (error) {
      state.error = reasonOf(error);
    }
    isFetching = false;
    nextFetch = performance.now() + Math.max(1000, 10 * (performance.now() - begun));
    drawControls();
    draw();
  }

  /** A client that sends any key has a namespace of its own: the owner's own is often empty. */
  function goWhereSomethingIs() {
    const { nodes, disk_nodes: onDisk, namespaces } = state.cache;
    if (state.namespace !== null || nodes.length || onDisk.length || !namespaces?.length) return;
    state.namespace = namespaces[0].namespace;
    state.later = setTimeout(() => refresh(true), 0);
  }

  function take(cache) {
    const before = new Map((state.cache?.nodes ?? []).map((node) => [`m${node.id}`, node]));
    const beforeDisk = new Set((state.cache?.disk_nodes ?? []).map((node) => node.id));
    const now = performance.now();
    if (state.cache && state.cache.namespace === cache.namespace && state.cache.model === cache.model) {
      for (const node of cache.nodes) {
        const was = before.get(`m${node.id}`);
        if (!was || was.tier !== node.tier || was.uses !== node.uses || was.disk_tokens !== node.disk_tokens || was.stop !== node.stop) glow.set(`m${node.id}`, now);
      }
      for (const node of cache.disk_nodes) if (!beforeDisk.has(node.id)) glow.set(`d${node.id}`, now);
    }
    state.cache = cache;
    build();
  }

  function build() {
    const kept = { top: state.top?.key, chosen: state.chosen?.key };
    const measure = (node, tokens) => (state.by === "tokens" ? tokens : Math.max(1, (node.bytes * tokens) / Math.max(1, node.tokens)));
    state.tree = treeOf(state.cache, measure);
    const all = new Map();
    const order = [state.tree];
    for (const edge of order) {
      all.set(edge.key, edge);
      order.push(...edge.children);
    }
    state.top = all.get(kept.top) ?? state.tree;
    state.chosen = all.get(kept.chosen) ?? null;
    if (!state.chosen) state.isHeld = false;
  }

  // ------------------------------------------------------------------------------------------------------ drawing

  function colours() {
    const style = getComputedStyle(root);
    const read = (name) => style.getPropertyValue(name).trim();
    return { live: read("--live"), memory: read("--memory"), disk: read("--disk"), root: read("--line"), text: read("--on-tier"), line: read("--page"), mark: read("--ink"), glow: read("--glow"), on: read("--accent") };
  }

  function draw() {
    if (frame !== null || root.hidden) return;
    frame = requestAnimationFrame(paint);
  }

  function paint() {
    frame = null;
    if (!state.tree) return;
    const width = stage.clientWidth;
    const rows = Math.min(state.top.height, 400);
    const height = Math.max(4, rows) * ROW;
    const scale = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const colour = colours();
    const now = performance.now();
    boxes = boxesOf(state.top, width, rows);
    let isGlowing = false;
    for (const box of boxes) isGlowing = paintBox(pen, box, colour, now) || isGlowing;
    if (isGlowing && !matchMedia("(prefers-reduced-motion: reduce)").matches) draw();
  }

  function paintBox(pen, box, colour, now) {
    const { edge, x, width, row } = box;
    const y = row * ROW;
    const tier = edge ? edge.tier : box.tier;
    const gap = width > 3 ? 1 : 0;
    const high = edge ? ROW - 1 : Math.min(box.height, 3) * ROW - 1;
    pen.fillStyle = colour[tier] ?? colour.memory;
    pen.globalAlpha = edge ? 1 : 0.55;
    pen.fillRect(x, y, Math.max(0.6, width - gap), high);
    pen.globalAlpha = 1;
    if (!edge) return false;
    if (edge.disk_tokens > 0) {
      pen.fillStyle = colour.disk;
      pen.fillRect(x, y + ROW - 4, Math.max(0.6, (width - gap) * Math.min(1, edge.disk_tokens / edge.tokens)), 3);
    }
    if (edge.restore_point && width > 4) {
      pen.fillStyle = colour.mark;
      pen.fillRect(x + width - gap - 2, y, 2, ROW - 1);
    }
    if (edge.pinned && width > 10) {
      pen.fillStyle = colour.mark;
      pen.beginPath();
      pen.arc(x + width - 8, y + 6, 3, 0, 7);
      pen.fill();
    }
    if (width > 40) {
      pen.save();
      pen.beginPath();
      pen.rect(x, y, width - 12, ROW);
      pen.clip();
      pen.fillStyle = edge.id === null ? colour.mark : colour.text;
      pen.fillText(edge.id === null ? "all prompts" : (edge.preview || "…").replaceAll("\n", "⏎ "), x + 5, y + ROW / 2);
      pen.restore();
    }
    if (edge === state.chosen) {
      pen.strokeStyle = colour.mark;
      pen.lineWidth = 2;
      pen.strokeRect(x + 1, y + 1, Math.max(1, width - gap - 2), ROW - 3);
    }
    const since = now - (glow.get(edge.key) ?? -GLOW_MS);
    if (since >= GLOW_MS) return false;
    pen.globalAlpha = 0.7 * (1 - since / GLOW_MS);
    pen.fillStyle = colour.glow;
    pen.fillRect(x, y, Math.max(2, width - gap), ROW - 1);
    pen.globalAlpha = 1;
    return true;
  }

  // ------------------------------------------------------------------------------------------------------ choosing

  function edgeUnder(event) {
    const rect = canvas.getBoundingClientRect();
    const box = boxAt(boxes, event.clientX - rect.left, Math.floor((event.clientY - rect.top) / ROW));
    return box?.edge ?? null;
  }

  function choose(edge, isHeld) {
    if (!edge) return;
    if (isHeld && edge === state.chosen && state.isHeld) zoom(edge === state.top ? edge.parent : edge);
    state.isHeld = isHeld;
    if (edge !== state.chosen) {
      state.chosen = edge;
      state.detail = null;
      clearTimeout(state.asks);
      if (edge.id !== null && edge.tier !== "disk") state.asks = setTimeout(() => lookAt(edge), 250);
    }
    drawSide();
    draw();
  }

  function zoom(edge) {
    if (!edge) return;
    state.top = edge;
    drawControls();
    draw();
  }

  async function lookAt(edge) {
    try {
      const query = new URLSearchParams();
      if (state.model) query.set("model", state.model);
      if (state.namespace !== null) query.set("namespace", state.namespace);
      const detail = await app.api.get(`v1/cache/edges/${edge.id}?${query}`);
      if (state.chosen?.key === edge.key) state.detail = detail;
    } catch {
      // It is gone meanwhile; the next look shows that.
    }
    drawSide();
  }

  function onKey(event) {
    const edge = state.chosen ?? state.top;
    if (!edge) return;
    const siblings = edge.parent?.children ?? [edge];
    const place = siblings.indexOf(edge);
    const moves = {
      ArrowDown: () => edge.children[0],
      ArrowUp: () => (edge === state.top ? null : edge.parent),
      ArrowRight: () => siblings[place + 1],
      ArrowLeft: () => siblings[place - 1],
      Home: () => state.top,
    };
    if (event.key === "Enter") zoom(edge);
    else if (event.key === "Escape") zoom(state.top.parent ?? state.tree);
    else if (moves[event.key]) {
      const next = moves[event.key]();
      if (next) choose(next, true);
    } else return;
    event.preventDefault();
  }

  function drawControls() {
    const namespaces = state.cache?.namespaces ?? [];
    const models = app.live.stats?.models ?? [];
    const path = [];
    for (let edge = state.top; edge; edge = edge.parent) path.unshift(edge);
    update(
      controls,
      h(
        "form",
        { class: "filters", onsubmit: (event) => event.preventDefault() },
        h("label", {}, "Width by ", h("select", { value: state.by, onchange: (event) => { state.by = event.target.value; build(); draw(); } }, h("option", { value: "tokens" }, "tokens"), h("option", { value: "bytes" }, "bytes"))),
        models.length > 1 && h("label", {}, "Model ", h("select", { value: state.model ?? "", onchange: other("model") }, h("option", { value: "" }, "the first"), models.map((one) => h("option", { value: one.id }, one.id)))),
        namespaces.length > 1 && h("label", {}, "Namespace ", h("select", { value: state.namespace ?? state.cache.namespace, onchange: other("namespace") }, namespaces.map((one) => h("option", { value: one.namespace }, `${one.namespace || "without a key"} (${count(one.num_nodes)})`)))),
        h("p", { class: "legend" }, h("span", { class: "live" }, "live"), h("span", { class: "memory" }, "memory"), h("span", { class: "disk" }, "disk"), h("span", { class: "point" }, "restore point"), h("span", { class: "pin" }, "pinned")),
      ),
      path.length > 1 && h("nav", { class: "path", "aria-label": "Way from the root" }, path.map((edge) => h("button", { type: "button", class: "link", onclick: () => zoom(edge) }, edge.id === null ? "all prompts" : (edge.preview.slice(0, 24) || "…")))),
      state.error && h("p", { class: "bad" }, state.error),
      state.cache && !state.cache.nodes.length && !state.cache.disk_nodes.length && h("p", { class: "empty" }, "Nothing is held yet. ", h("a", { href: "#/now" }, "Now"), " has three things to try."),
      state.cache?.truncated && h("p", { class: "hint" }, `${count(state.cache.nodes.length)} of ${count(state.cache.num_nodes)} edges are shown, those used last.`),
    );
  }

  function other(name) {
    return (event) => {
      state[name] = event.target.value;
      if (name === "model") state.namespace = null;
      Object.assign(state, { cache: null, tree: null, top: null, chosen: null, detail: null });
      refresh(true);
    };
  }

  function drawSide() {
    const edge = state.chosen;
    update(side, edge ? facts(edge) : h("p", { class: "hint", id: "tree-chosen" }, "Point at an edge, or use the arrow keys. What lies above is shared by all that hangs below it; a second click goes into it."));
  }

  function facts(edge) {
    if (edge.id === null) return h("p", { id: "tree-chosen", role: "status" }, `All prompts: ${counted(edge.count - 1, "edge")}, ${state.by === "tokens" ? counted(edge.total, "token") : bytes(edge.total)}.`);
    const detail = state.detail;
    const text = detail?.text ?? edge.preview;
    const rows = [
      ["Tokens", `${count(edge.tokens)} (${count(edge.start)} to ${count(edge.stop)})`],
      ["Where", TIERS[edge.tier] + (edge.disk_tokens && edge.tier !== "disk" ? `, ${count(edge.disk_tokens)} on disk too` : "")],
      ["Takes", edge.tier === "live" ? "the slot's memory" : bytes(edge.bytes)],
      edge.uses !== undefined && ["Restored", edge.uses === 1 ? "once" : `${count(edge.uses)} times`],
      detail?.seconds != null && ["Evaluating it again", `about ${seconds(detail.seconds)}`],
      edge.restore_point && ["Restore point", POINTS[edge.restore_point] ?? edge.restore_point],
      edge.pinned && ["Pinned", "it is not given up"],
      ["Below it", counted(edge.count - 1, "edge")],
    ].filter(Boolean);
    return [
      h("p", { class: "sr", id: "tree-chosen", role: "status" }, `${edge.preview.slice(0, 60)}, ${count(edge.tokens)} tokens, ${TIERS[edge.tier]}, ${count(edge.children.length)} branches`),
      h("blockquote", { tabindex: 0, "aria-label": "Text of the edge" }, text, detail?.truncated && " …"),
      h("dl", { class: "facts" }, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      detail?.sessions.length ? h("section", {}, h("h2", {}, "Used by"), h("ul", { class: "users" }, detail.sessions.map((id) =>
        h("li", {}, h("a", { href: sessionLink(id, state.cache.namespace) }, sessionName(id)), " ", h("button", { type: "button", class: "link", onclick: () => pin(id) }, "pin"))))) : null,
    ];
  }

  async function pin(id) {
    try {
      const namespace = state.namespace ?? state.cache.namespace;
      const query = namespace ? `?namespace=${encodeURIComponent(namespace)}` : "";
      await app.api.post(`v1/sessions/${encodeURIComponent(id)}/pin${query}`);
      app.toast(`The state of ${sessionName(id)} stays.`);
      refresh(true);
    } catch (error) {
      app.toast(reasonOf(error));
    }
  }

  return {
    show() {
      drawSide();
      refresh(true);
    },
    /** For measurements: draws a given cache, and returns the milliseconds that takes. */
    paintNow(cache) {
      if (cache) take(cache);
      const begun = performance.now();
      paint();
      return performance.now() - begun;
    },
  };
}
