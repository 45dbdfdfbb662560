// The prefix tree as an icicle: what is above is shared by all that is below it. One canvas, whatever the tree.

import { Questions, reasonOf } from "../lib/api.js";
import { h, s, update } from "../lib/dom.js";
import { ago, bytes, clock, count, counted, seconds, sessionLink } from "../lib/format.js";
import { below, boxAt, boxesOf, evenly, joined, treeOf } from "../lib/icicle.js";
import { Hues, colour, lineOf, nameOf, shortened, titleOf } from "../lib/names.js";

export const view = { id: "tree", title: "Tree", mount };

const ROW = { least: 24, most: 72, twoLines: 38 };
const GLOW_MS = 1800;
const MOVE_MS = 350;
/** More boxes than this jump to where they belong. */
const MAX_MOVING = 800;
const LIMIT = 10000;
/** Edges of fewer tokens join the one before them. */
const FEW_TOKENS = 8;
const MAX_CHIPS = 24;
const SEARCH_MS = 300;
/** Narrower boxes hold no words. */
const MIN_TEXT = 56;
/** In narrower boxes the colour alone says whose it is. */
const MIN_NAME = 130;
const TIERS = { live: "live in a slot", memory: "stored in memory", disk: "on disk only" };
const POINTS = {
  system_end: "the end of the system message",
  user_start: "where a question begins",
  prompt_end: "the end of a prompt",
  turn_end: "the end of a turn",
  branch: "where conversations part",
  explicit: "asked for by a client",
};

const NOTHING = { cache: null, past: null, tree: null, top: null, chosen: null, detail: null, session: null, found: null, text: "" };

function mount(root, app) {
  const state = { ...NOTHING, by: "conversations", isWhole: false, model: null, namespace: null, error: null };
  const glow = new Map();
  const hues = new Hues();
  const picture = document.createElement("canvas");
  const motion = matchMedia("(prefers-reduced-motion: reduce)");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let sessions = new Map();
  let boxes = [];
  let places = new Map();
  let row = ROW.least;
  let moved = -Infinity;
  let isStale = true;
  let seen = -1;
  let isFetching = false;
  /** Whether what is being fetched is no longer what is asked for. */
  let isOutdated = false;
  let nextFetch = 0;
  let frame = null;
  const times = new Questions();
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
  const time = h("div", { class: "time" });
  const side = h("aside", { "aria-label": "The chosen edge" });
  root.append(controls, h("div", { class: "tree-page" }, h("div", { class: "picture" }, stage, time), side));
  canvas.onpointermove = (event) => {
    const edge = edgeUnder(event);
    canvas.title = edge && edge.id !== null ? lineOf(nameOf(edge, sessions)) : "";
    if (edge && edge !== state.chosen && !state.isHeld) choose(edge, false);
  };
  new ResizeObserver(() => redraw()).observe(stage);
  addEventListener("resize", () => redraw());
  app.live.subscribe(() => {
    if (root.hidden) return;
    if (app.live.changes !== seen || app.live.stats?.requests.length) refresh();
    if (state.cache && !state.past && app.live.stats?.requests.some((one) => one.phase === "decode")) build();
  });
  dark.addEventListener("change", () => redraw());
  new MutationObserver(() => redraw()).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });

  // ----------------------------------------------------------------------------------------------------- fetching

  /** Looks again, at most once a second, and no more often than ten times what looking takes. */
  async function refresh(isForced = false) {
    if (isFetching && isForced) {
      isOutdated = true;
      return;
    }
    if (isFetching || (!isForced && state.cache && performance.now() < nextFetch)) {
      clearTimeout(state.later);
      state.later = setTimeout(() => root.hidden || refresh(), 1000);
      return;
    }
    isFetching = true;
    const begun = performance.now();
    do {
      isOutdated = false;
      await look();
    } while (isOutdated);
    isFetching = false;
    nextFetch = performance.now() + Math.max(1000, 10 * (performance.now() - begun));
    drawAll();
  }

  async function look() {
    seen = app.live.changes;
    try {
      const cache = await app.api.get(`v1/cache?${query({ limit: LIMIT })}`);
      if (isOutdated) return;
      take(cache);
      goWhereSomethingIs();
      state.error = null;
    } catch (error) {
      state.error = reasonOf(error);
    }
  }

  function query(more = {}) {
    const asked = new URLSearchParams(more);
    if (state.model) asked.set("model", state.model);
    if (state.namespace !== null) asked.set("namespace", state.namespace);
    return asked;
  }

  /** A client that sends any key has a namespace of its own: the owner's own is often empty. */
  function goWhereSomethingIs() {
    const { nodes, disk_nodes: onDisk, namespaces } = state.cache;
    if (state.namespace !== null || nodes.length || onDisk.length || !namespaces?.length) return;
    state.namespace = namespaces[0].namespace;
    state.later = setTimeout(() => refresh(true), 0);
  }

  function take(cache) {
    const before = new Map((state.cache?.nodes ?? []).map((node) => [node.id, node]));
    const beforeDisk = new Set((state.cache?.disk_nodes ?? []).map((node) => node.id));
    const now = performance.now();
    if (state.cache && state.cache.namespace === cache.namespace && state.cache.model === cache.model) {
      for (const node of cache.nodes) {
        const was = before.get(node.id);
        if (!was || was.tier !== node.tier || was.uses !== node.uses || was.disk_tokens !== node.disk_tokens || was.stop !== node.stop) glow.set(`m${node.id}`, now);
      }
      for (const node of cache.disk_nodes) if (!beforeDisk.has(node.id)) glow.set(`d${node.id}`, now);
    }
    state.cache = cache;
    sessions = new Map((cache.sessions ?? []).map((one) => [one.id, one]));
    hues.learn([...sessions.keys()].reverse());
    // What is painted needs a frame that has a size.
    stage.hidden = false;
    if (!state.past) build();
  }

  function build() {
    if (!state.past && !state.cache) return;
    const kept = { top: state.top?.key, chosen: state.chosen?.key };
    const measure = (node, tokens) => (state.by === "bytes" ? Math.max(1, (node.bytes * tokens) / Math.max(1, node.tokens)) : tokens);
    state.tree = treeOf(state.past ?? state.cache, measure);
    if (!state.past) grow();
    joined(state.tree, state.isWhole ? 0 : FEW_TOKENS);
    if (state.by === "conversations") evenly(state.tree);
    const all = new Map(below(state.tree).map((edge) => [edge.key, edge]));
    state.top = all.get(kept.top) ?? state.tree;
    state.chosen = all.get(kept.chosen) ?? null;
    if (!state.chosen) state.isHeld = false;
    redraw();
  }

  /** Makes the last edge of each running answer as long as the answer is now: the server adds its tokens in chunks. */
  function grow() {
    for (const { session_id: id, model, prompt_tokens: prompt, completion_tokens: said } of app.live.stats?.requests ?? []) {
      const own = below(state.tree).filter((edge) => edge.tier === "live" && model === state.cache.model && edge.name?.num_sessions === 1 && edge.name.sessions[0] === id);
      const last = own.reduce((far, edge) => (edge.stop > (far?.stop ?? 0) ? edge : far), null);
      if (!said || !last || last.stop >= prompt + said) continue;
      last.weight += state.by === "bytes" ? 0 : prompt + said - last.stop;
      Object.assign(last, { stop: prompt + said, tokens: prompt + said - last.start });
    }
  }

  /** Shows what was there at one of the times that the server keeps; null for now. */
  async function goTo(at) {
    const counts = times.begin();
    let past = null;
    let problem = null;
    try {
      if (at !== null) past = await app.api.get(`v1/cache?${query({ at: Math.floor(at) })}`);
    } catch (error) {
      problem = reasonOf(error);
    }
    if (!counts()) return;
    if (problem) app.toast(problem);
    state.past = past;
    build();
    drawAll();
  }

  function search(text) {
    state.text = text;
    clearTimeout(state.searches);
    state.searches = setTimeout(async () => {
      let answer = null;
      let problem = null;
      try {
        if (text.trim()) answer = await app.api.get(`v1/cache/search?${query({ text })}`);
      } catch (error) {
        problem = reasonOf(error);
      }
      if (state.text !== text) return;
      if (!problem) state.found = answer && { keys: new Set([...answer.nodes.map((id) => `m${id}`), ...answer.disk_nodes.map((id) => `d${id}`)]), isPart: answer.truncated };
      state.error = problem;
      drawAll();
      redraw();
    }, SEARCH_MS);
  }

  // ------------------------------------------------------------------------------------------------------ drawing

  function drawAll() {
    stage.hidden = !state.cache;
    drawControls();
    drawTime();
    drawSide();
    redraw();
  }

  /** Has the picture made anew with the next frame. */
  function redraw() {
    isStale = true;
    draw();
  }

  function draw() {
    if (frame !== null || root.hidden) return;
    frame = requestAnimationFrame(paint);
  }

  function isDark() {
    const { theme } = document.documentElement.dataset;
    return theme === "dark" || (theme !== "light" && dark.matches);
  }

  function paint() {
    frame = null;
    // Who has gone to another view meanwhile sees none of it.
    if (!state.tree || !stage.clientWidth) return;
    const now = performance.now();
    if (isStale) lay(now);
    const isMoving = now - moved < MOVE_MS;
    if (isStale || isMoving || picture.isMoving) paintPicture(isMoving ? (now - moved) / MOVE_MS : 1);
    picture.isMoving = isMoving;
    isStale = false;
    const pen = canvas.getContext("2d");
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(picture, 0, 0);
    pen.scale(devicePixelRatio || 1, devicePixelRatio || 1);
    const isGlowing = paintGlow(pen, now);
    paintChosen(pen);
    if (isMoving || (isGlowing && !motion.matches)) draw();
  }

  /** Says where boxes belong; rows use the height there is. */
  function lay(now) {
    const width = stage.clientWidth;
    const rows = Math.min(state.top.height, 400);
    const high = Math.max(240, innerHeight - stage.getBoundingClientRect().top - scrollY - 90);
    row = Math.max(ROW.least, Math.min(ROW.most, Math.floor(high / rows)));
    const scale = devicePixelRatio || 1;
    const size = [Math.round(width * scale), Math.round(rows * row * scale)];
    for (const one of [canvas, picture]) if (one.width !== size[0] || one.height !== size[1]) [one.width, one.height] = size;
    boxes = boxesOf(state.top, width, rows);
    const before = places;
    places = new Map(boxes.filter((box) => box.edge).map((box) => [box.edge.key, box]));
    const isOther = boxes.some(({ edge, x, width: wide }) => edge && before.has(edge.key) && (Math.abs(before.get(edge.key).x - x) > 1 || Math.abs(before.get(edge.key).width - wide) > 1));
    if (!isOther || boxes.length > MAX_MOVING || motion.matches) return;
    for (const box of boxes) box.from = box.edge && before.get(box.edge.key);
    moved = now;
  }

  function paintPicture(share) {
    const pen = picture.getContext("2d");
    const scale = devicePixelRatio || 1;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, picture.width, picture.height);
    pen.textBaseline = "middle";
    const style = getComputedStyle(root);
    const tones = Object.fromEntries(["ink", "disk", "line"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    const part = share * (2 - share);
    for (const box of boxes) {
      const { from } = box;
      const at = from ? { x: from.x + (box.x - from.x) * part, width: from.width + (box.width - from.width) * part } : box;
      paintBox(pen, box, at, tones);
    }
  }

  /** Whether an edge is of what is searched for, or of the session that is looked at. */
  function isLit(edge) {
    if (state.found) return edge.parts.some((one) => state.found.keys.has(one.key));
    return state.session === null || edge.id === null || Boolean(edge.name?.sessions.includes(state.session));
  }

  function paintBox(pen, box, { x, width }, tones) {
    const { edge } = box;
    const y = box.row * row;
    const gap = width > 3 ? 1 : 0;
    const high = edge ? row - 1 : Math.min(box.height, 3) * row - 1;
    const { fill, ink } = edge?.id === null ? { fill: tones.line, ink: tones.ink } : colour(edge?.tier ?? box.tier, edge ? hues.of(edge) : null, isDark());
    pen.globalAlpha = edge ? (isLit(edge) ? 1 : 0.22) : 0.55;
    pen.fillStyle = fill;
    pen.fillRect(x, y, Math.max(0.6, width - gap), high);
    if (edge?.disk_tokens > 0) {
      pen.fillStyle = tones.disk;
      pen.fillRect(x, y + row - 4, Math.max(0.6, (width - gap) * Math.min(1, edge.disk_tokens / edge.tokens)), 3);
    }
    if (edge && width > MIN_TEXT) paintText(pen, edge, x, y, width, ink);
    pen.fillStyle = tones.ink;
    if (edge?.restore_point && width > 4) pen.fillRect(x + width - gap - 2, y, 2, row - 1);
    if (edge?.pinned && width > 10) {
      pen.beginPath();
      pen.arc(x + width - 8, y + 6, 3, 0, 7);
      pen.fill();
    }
    pen.globalAlpha = 1;
  }

  function paintText(pen, edge, x, y, width, ink) {
    pen.save();
    pen.beginPath();
    pen.rect(x, y, width - 12, row);
    pen.clip();
    pen.fillStyle = ink;
    const name = edge.id === null ? { who: "", what: "", quote: "all prompts" } : nameOf(edge, sessions);
    const isTwo = row >= ROW.twoLines && name.who && width > MIN_NAME;
    const short = width > MIN_NAME || !name.quote ? lineOf(isTwo ? { ...name, quote: "" } : name) : name.quote;
    const line = state.isWhole && edge.id !== null ? edge.preview.replaceAll("\n", "⏎ ") : short;
    pen.font = "12px system-ui, sans-serif";
    pen.fillText(fitting(pen, line, width - 20), x + 5, y + (isTwo ? row * 0.32 : row / 2));
    if (isTwo) {
      pen.font = "11px system-ui, sans-serif";
      pen.fillText(fitting(pen, name.quote, width - 20), x + 5, y + row * 0.7);
      const tokens = counted(edge.tokens, "token");
      if (pen.measureText(line).width * 1.1 + pen.measureText(tokens).width + 30 < width) {
        pen.textAlign = "right";
        pen.fillText(tokens, x + width - 14, y + row * 0.32);
        pen.textAlign = "left";
      }
    }
    pen.restore();
  }

  function paintGlow(pen, now) {
    pen.fillStyle = getComputedStyle(root).getPropertyValue("--glow").trim();
    for (const [key, since] of glow) {
      const left = 1 - (now - since) / GLOW_MS;
      const box = places.get(key);
      if (left <= 0) glow.delete(key);
      else if (box) {
        // Beside the words, which stay readable.
        pen.globalAlpha = left;
        pen.fillRect(box.x, box.row * row, Math.max(2, box.width - 1), 4);
        pen.fillRect(box.x, box.row * row, Math.min(4, Math.max(2, box.width - 1)), row - 1);
      }
    }
    pen.globalAlpha = 1;
    return glow.size > 0;
  }

  function paintChosen(pen) {
    const box = state.chosen && places.get(state.chosen.key);
    if (!box) return;
    pen.strokeStyle = getComputedStyle(root).getPropertyValue("--ink").trim();
    pen.lineWidth = 2;
    pen.strokeRect(box.x + 1, box.row * row + 1, Math.max(1, box.width - 3), row - 3);
  }

  // ------------------------------------------------------------------------------------------------------ choosing

  function edgeUnder(event) {
    const rect = canvas.getBoundingClientRect();
    const box = boxAt(boxes, event.clientX - rect.left, Math.floor((event.clientY - rect.top) / row));
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
      if (edge.id !== null && edge.tier !== "disk" && !state.past) state.asks = setTimeout(() => lookAt(edge), 250);
    }
    drawSide();
    draw();
  }

  function zoom(edge) {
    if (!edge) return;
    state.top = edge;
    drawControls();
    redraw();
  }

  async function lookAt(edge) {
    try {
      const detail = await app.api.get(`v1/cache/edges/${edge.id}?${query()}`);
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
        h("label", {}, "Search ", h("input", { type: "search", value: state.text, placeholder: "a text in any prompt", oninput: (event) => search(event.target.value) })),
        h("label", {}, "Width by ", h("select", { value: state.by, onchange: (event) => { state.by = event.target.value; build(); } }, h("option", { value: "conversations" }, "conversations"), h("option", { value: "tokens" }, "tokens"), h("option", { value: "bytes" }, "bytes"))),
        h("label", {}, h("input", { type: "checkbox", onchange: (event) => { state.isWhole = event.target.checked; build(); } }), " every edge, with template tokens"),
        models.length > 1 && h("label", {}, "Model ", h("select", { value: state.model ?? state.cache?.model, onchange: other("model") }, models.map((one) => h("option", { value: one.id }, one.id)))),
        namespaces.length > 1 && h("label", {}, "Namespace ", h("select", { value: state.namespace ?? state.cache.namespace, onchange: other("namespace") }, namespaces.map((one) => h("option", { value: one.namespace }, `${one.namespace ? `key ${one.namespace.slice(0, 8)}…` : "without a key"} (${counted(one.num_nodes, "edge")})`)))),
      ),
      path.length > 1 && h("nav", { class: "path", "aria-label": "Way from the root" }, path.map((edge) => h("button", { type: "button", class: "link", onclick: () => zoom(edge) }, edge.id === null ? "all prompts" : shortened(lineOf(nameOf(edge, sessions)), 32)))),
      state.error ? h("p", { class: "bad" }, state.error) : !state.cache && h("p", { class: "empty" }, "Asking the server …"),
      state.found && state.tree && h("p", { class: "hint", role: "status" }, `The text is in ${counted(below(state.tree).filter((edge) => edge.id !== null && isLit(edge)).length, "place")}${state.found.isPart ? ", and maybe in more" : ""}.`),
      state.cache && !state.cache.nodes.length && !state.cache.disk_nodes.length && h("p", { class: "empty" }, "Nothing is held yet. ", h("a", { href: "#/now" }, "Now"), " has three things to try."),
      state.cache?.truncated && h("p", { class: "hint" }, `${count(state.cache.nodes.length)} of ${count(state.cache.num_nodes)} edges are shown, those used last.`),
    );
  }

  function other(name) {
    return (event) => {
      leave({ ...(name === "model" && { namespace: null }), [name]: event.target.value });
      drawAll();
      refresh(true);
    };
  }

  /** Leaves the tree that is shown for another one. */
  function leave(more) {
    clearTimeout(state.asks);
    times.giveUp();
    Object.assign(state, NOTHING, more);
  }

  /** The slider: the times that the server keeps, then now. */
  function drawTime() {
    const earlier = state.cache?.earlier ?? [];
    if (!earlier.length) return update(time);
    const shown = state.past ? earlier.filter((at) => at <= state.past.time + 1).length - 1 : earlier.length;
    const said = state.past ? `${clock(state.past.time)}, ${ago(state.past.time)}` : "now";
    update(
      time,
      h("label", {}, "Time ", h("input", { type: "range", min: 0, max: earlier.length, value: Math.max(0, shown), "aria-valuetext": said, oninput: (event) => goTo(earlier[Number(event.target.value)] ?? null) })),
      h("span", { role: "status" }, said),
      h("p", { class: "legend" }, ["live", "memory", "disk"].map((tier) => h("span", { class: "shade" }, s("svg", { width: 11, height: 11, "aria-hidden": "true" }, s("rect", { width: 11, height: 11, rx: 2, fill: colour(tier, null, isDark()).fill })), tier === "live" ? " in a slot" : tier === "memory" ? " in memory" : " on disk")), h("span", { class: "point" }, "restore point"), h("span", { class: "pin" }, "pinned")),
    );
  }

  function drawSide() {
    const edge = state.chosen;
    update(side, state.past && changes(), edge ? facts(edge) : h("p", { class: "hint", id: "tree-chosen" }, "Point at an edge, or use the arrow keys. What lies above is shared by all that hangs below it; a second click goes into it."), chips());
  }

  /** What has come and gone since the time that is shown, and why. */
  function changes() {
    const [then, now] = [state.past, state.cache].map((cache) => new Map(cache.nodes.map((node) => [node.id, node])));
    const come = state.cache.nodes.filter((node) => !then.has(node.id));
    const gone = state.past.nodes.filter((node) => !now.has(node.id)).map((node) => ({ ...node, why: whyGone(node, now) }));
    const reasons = Object.entries(Object.groupBy(gone, (node) => node.why));
    return h("section", { class: "changes" }, h("h2", {}, `Since ${clock(state.past.time)}`),
      h("ul", {}, h("li", {}, `${counted(come.length, "edge")} came, ${counted(come.reduce((all, node) => all + node.tokens, 0), "token")}`),
        reasons.map(([why, nodes]) => h("li", {}, `${counted(nodes.length, "edge")} ${why}: `, nodes.slice(0, 3).map((node) => shortened(lineOf(nameOf(node, sessions)), 60)).join("; "), nodes.length > 3 && " …"))));
  }

  function whyGone(node, now) {
    const heirs = state.past.nodes.filter((one) => one.parent === node.id);
    if (heirs.some((one) => now.get(one.id)?.start <= node.start)) return "joined with what follows";
    if (state.cache.disk_nodes.some((one) => one.start <= node.start && one.stop >= node.stop && one.memory_tokens < one.tokens)) return "went to disk only";
    return state.cache.evictions > state.past.evictions ? "given up for lack of memory" : "replaced by newer state";
  }

  function chips() {
    const all = [...sessions.values()];
    if (!all.length) return null;
    const known = state.session === null || all.slice(0, MAX_CHIPS).some((one) => one.id === state.session) ? all.slice(0, MAX_CHIPS) : [sessions.get(state.session), ...all.slice(0, MAX_CHIPS - 1)];
    return h("section", {}, h("h2", {}, "Whose it is"), h("ul", { class: "whose" }, known.filter(Boolean).map((one) =>
      h("li", { "data-key": one.id },
        s("svg", { width: 12, height: 12, "aria-hidden": "true" }, s("rect", { width: 12, height: 12, rx: 3, fill: colour("live", hues.known.get(one.id) ?? null, isDark()).fill })),
        h("button", { type: "button", class: "link", "aria-pressed": String(state.session === one.id), onclick: () => {
          state.session = state.session === one.id ? null : one.id;
          drawSide();
          redraw();
        } }, titleOf(one)), !titleOf(one).includes(one.question.slice(0, 20)) && h("small", {}, shortened(one.question.replace(/\s+/g, " "), 70))))),
      all.length > known.length && h("p", { class: "hint" }, `and ${count(all.length - known.length)} more`));
  }

  function facts(edge) {
    if (edge.id === null) return h("p", { id: "tree-chosen", role: "status" }, `All prompts: ${counted(edge.count - 1, "edge")}, ${state.by === "bytes" ? bytes(edge.total) : counted(below(edge).reduce((all, one) => all + one.tokens, 0), "token")}.`);
    const detail = state.detail;
    const text = detail?.text ?? edge.preview;
    const name = nameOf(edge, sessions);
    const rows = [
      ["Tokens", `${count(edge.tokens)} (${count(edge.start)} to ${count(edge.stop)})`],
      ["Where", TIERS[edge.tier] + (edge.disk_tokens && edge.tier !== "disk" ? `, ${count(edge.disk_tokens)} on disk too` : "")],
      ["Takes", edge.tier === "live" ? "the slot's memory" : bytes(edge.bytes)],
      edge.uses !== undefined && ["Restored", edge.uses === 1 ? "once" : counted(edge.uses, "time")],
      detail?.seconds != null && ["Evaluating it again", `about ${seconds(detail.seconds)}`],
      edge.restore_point && ["Restore point", POINTS[edge.restore_point] ?? edge.restore_point],
      edge.pinned && ["Pinned", "it is not given up"],
      ["Below it", counted(edge.count - 1, "edge")],
    ].filter(Boolean);
    return [
      h("h2", {}, name.what || "Text", name.who && h("small", {}, `of ${name.who}`)),
      h("p", { class: "sr", id: "tree-chosen", role: "status" }, `${shortened(lineOf(name), 90)}, ${counted(edge.tokens, "token")}, ${TIERS[edge.tier]}, ${edge.children.length === 1 ? "1 branch" : `${count(edge.children.length)} branches`}`),
      h("blockquote", { tabindex: 0, "aria-label": "Text of the edge", dir: "auto" }, text, (detail?.truncated || edge.parts.length > 1) && " …"),
      h("dl", { class: "facts" }, rows.map(([title, value]) => h("div", {}, h("dt", {}, title), h("dd", {}, value)))),
      detail?.sessions.length ? h("section", {}, h("h2", {}, "Used by"), h("ul", { class: "users" }, detail.sessions.map((id) =>
        h("li", {}, h("a", { href: sessionLink(id, state.cache.namespace) }, titleOf(sessions.get(id) ?? { id })), " ", h("button", { type: "button", class: "link", onclick: () => pin(id) }, "pin"))))) : null,
    ];
  }

  async function pin(id) {
    try {
      await app.api.post(`v1/sessions/${encodeURIComponent(id)}/pin?${query({ model: state.cache.model })}`);
      app.toast(`The state of ${titleOf(sessions.get(id) ?? { id })} stays.`);
      refresh(true);
    } catch (error) {
      app.toast(reasonOf(error));
    }
  }

  return {
    /** Shows the tree, of a session and its model if they are named, the session's edges lit: the page's own session. */
    show([session, model] = []) {
      if (session) {
        const isOther = model && model !== (state.model ?? state.cache?.model);
        if (isOther || state.namespace !== null) leave({ model: model || state.model, namespace: null });
        Object.assign(state, { session, found: null, text: "" });
      }
      drawAll();
      refresh(true);
    },
    /** For measurements: draws a given cache, or what is shown once more, and returns the milliseconds that takes. */
    paintNow(cache) {
      if (cache) take(cache);
      const begun = performance.now();
      paint();
      return performance.now() - begun;
    },
  };
}

/** As much of a text as fits a width. */
function fitting(pen, text, width) {
  const line = shortened(text, 160);
  const wide = pen.measureText(line).width;
  return wide <= width ? line : shortened(line, Math.max(2, Math.floor((line.length * width) / wide) - 1));
}
