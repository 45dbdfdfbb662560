// What is installed, loaded and on its way; loading, unloading and pulling.

import { reasonOf } from "../lib/api.js";
import { h, update } from "../lib/dom.js";
import { bytes, count, counted, percent } from "../lib/format.js";
import { bar } from "./now.js";

export const view = { id: "models", title: "Models", mount };

function mount(root, app) {
  let models = null;
  let sizes = new Map();
  let error = null;
  let seen = null;
  const pulls = new Map();
  const busy = new Set();
  const draw = () => root.hidden || update(root, content());

  app.live.subscribe(() => {
    const loaded = JSON.stringify([app.live.stats?.models.map((one) => one.id), app.live.stats?.loading]);
    if (!root.hidden && loaded !== seen) {
      seen = loaded;
      refresh();
    } else draw();
  });

  async function refresh() {
    try {
      models = (await app.api.get("v1/models")).data;
      error = null;
      const tags = await app.api.get("api/tags");
      sizes = new Map(tags.models.map((one) => [one.name.replace(/:latest$/, ""), one]));
    } catch (problem) {
      if (!models) error = reasonOf(problem);
    }
    draw();
  }

  async function change(id, what) {
    busy.add(id);
    draw();
    try {
      await app.api.post(`v1/models/${what}`, { model: id });
      app.toast(what === "load" ? `${id} is loaded.` : `${id} is unloaded; its conversations are kept.`);
    } catch (problem) {
      app.toast(reasonOf(problem));
    }
    busy.delete(id);
    refresh();
  }

  async function pull(name) {
    const state = { name, status: "asking", completed: 0, total: 0, abort: new AbortController() };
    pulls.set(name, state);
    draw();
    const files = new Map();
    try {
      for await (const line of app.api.lines("api/pull", { method: "POST", body: { model: name }, signal: state.abort.signal })) {
        if (!line.trim()) continue;
        const said = JSON.parse(line);
        if (said.error) throw new Error(said.error);
        state.status = said.status;
        if (said.digest) files.set(said.digest, said);
        state.total = [...files.values()].reduce((all, one) => all + (one.total ?? 0), 0);
        state.completed = [...files.values()].reduce((all, one) => all + (one.completed ?? 0), 0);
        draw();
      }
      pulls.delete(name);
      app.toast(`${name} is here.`);
    } catch (problem) {
      if (problem.name === "AbortError") pulls.delete(name);
      else state.error = reasonOf(problem);
    }
    refresh();
  }

  function content() {
    if (error) return h("p", { class: "empty" }, error);
    if (!models) return h("p", { class: "empty" }, "Asking the server …");
    const loading = new Map((app.live.stats?.loading ?? []).map((one) => [one.id, one.step]));
    return [
      h(
        "form",
        { class: "filters", onsubmit: begin },
        h("label", { for: "pull-name" }, "Pull a model"),
        h("input", { id: "pull-name", name: "name", required: true, placeholder: "qwen3:0.6b, or org/repository", autocomplete: "off", spellcheck: "false" }),
        h("button", { type: "submit", class: "primary" }, "Pull"),
      ),
      [...pulls.values()].map(pulling),
      h("ul", { class: "models" }, models.map((one) => model(one, loading.get(one.id)))),
    ];
  }

  function begin(event) {
    event.preventDefault();
    const field = event.target.elements.name;
    const name = field.value.trim();
    if (name && !pulls.has(name)) pull(name);
    field.value = "";
  }

  function pulling(one) {
    const share = one.total ? one.completed / one.total : null;
    return h(
      "section",
      { class: "panel", "data-key": `pull-${one.name}` },
      h("h2", {}, one.name, h("small", {}, one.error ? "could not be pulled" : one.status)),
      one.error
        ? h("p", { class: "bad" }, one.error)
        : h("p", { class: "pulling" }, h("span", { class: "bar", role: "progressbar", "aria-label": `Pulling ${one.name}`, "aria-valuenow": share === null ? null : Math.round(100 * share), "aria-valuemin": 0, "aria-valuemax": 100 }, bar(100 * (share ?? 0), "work")), one.total ? ` ${bytes(one.completed)} of ${bytes(one.total)}, ${percent(share)}` : " "),
      h("menu", {}, h("button", { type: "button", onclick: () => (one.error ? (pulls.delete(one.name), draw()) : one.abort.abort()) }, one.error ? "Dismiss" : "Stop"), one.error && h("button", { type: "button", onclick: () => pull(one.name) }, "Try again")),
    );
  }

  function model(one, step) {
    const stats = app.live.stats?.models.find((other) => other.id === one.id);
    const size = sizes.get(one.id);
    const isBusy = busy.has(one.id) || step !== undefined;
    const isVariant = one.parent && one.parent !== one.id;
    const facts = [
      size && `${bytes(size.size)}`,
      size?.details?.parameter_size && !size.details.parameter_size.startsWith("0.00") && `${size.details.parameter_size} parameters`,
      size?.details?.quantization_level,
      one.context_length && `context ${count(one.context_length)} tokens`,
      isVariant && `of ${one.parent}`,
      one.tool_calls === "parsed" && "tools",
    ].filter(Boolean);
    return h(
      "li",
      { class: one.loaded ? "loaded" : "", "data-key": one.id },
      h("div", {}, h("b", {}, one.id), h("small", {}, facts.join(" · "))),
      h("span", { class: "state" }, step ? `loading: ${step}` : one.loaded ? (stats ? `loaded, ${counted(stats.cache.nodes, "edge")}, ${bytes(stats.cache.stored_bytes + stats.cache.live_bytes)} of state` : "loaded") : "on disk"),
      h(
        "menu",
        {},
        one.loaded && h("a", { class: "button", href: `#/chat/new/${encodeURIComponent(one.id)}` }, "Chat"),
        !isVariant && h("button", { type: "button", "aria-disabled": isBusy ? "true" : null, onclick: () => isBusy || change(one.id, one.loaded ? "unload" : "load") }, isBusy ? "…" : one.loaded ? "Unload" : "Load"),
      ),
    );
  }

  return { show: refresh };
}
