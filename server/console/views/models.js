// What is installed, loaded and on its way, and what could be; pulling, loading, unloading, deleting.

import { Questions, reasonOf } from "../lib/api.js";
import { confirmed, h, update } from "../lib/dom.js";
import { bytes, count, counted, percent } from "../lib/format.js";
import { bar } from "./now.js";

export const view = { id: "models", title: "Models", mount };

const BUILT_IN = ["demo", "demo-hybrid"];
const FITS = { fits: ["✓", "fits this machine"], tight: ["△", "fits, but leaves little memory for conversations"], large: ["✕", "too large for this machine"] };

function mount(root, app) {
  let models = null;
  let library = null;
  let sizes = new Map();
  let error = null;
  let seen = null;
  let text = "";
  const pulls = new Map();
  const busy = new Set();
  const questions = new Questions();
  const draw = () => root.hidden || update(root, content());

  app.live.subscribe(() => {
    const loaded = JSON.stringify([app.live.stats?.models.map((one) => one.id), app.live.stats?.loading]);
    if (!root.hidden && loaded !== seen) {
      seen = loaded;
      refresh();
    } else draw();
  });

  async function refresh() {
    const counts = questions.begin();
    let found = null;
    let problem = null;
    try {
      found = await Promise.all([app.api.get("v1/models"), app.api.get("api/tags"), library ?? app.api.get("v1/library")]);
    } catch (failure) {
      problem = failure;
    }
    if (!counts()) return;
    if (found) {
      const [listed, tags, all] = found;
      [models, library, error] = [listed.data, all, null];
      sizes = new Map(tags.models.map((one) => [one.name.replace(/:latest$/, ""), one]));
    } else if (!models) error = reasonOf(problem);
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
    await refresh();
    busy.delete(id);
    draw();
  }

  async function remove(id, parent) {
    const what = parent ? `Delete the name ${id}? The weights of ${parent} stay.` : `Delete ${id}, ${bytes(sizes.get(id)?.size)}, from Hugging Face’s cache? Other programs share it.`;
    if (!(await confirmed(what, "Delete"))) return;
    try {
      // Else a "#" or "?" in the name of a folder would end the name, and another model would be deleted.
      await app.api.del(`v1/models/${id.split("/").map(encodeURIComponent).join("/")}`);
      app.toast(`${id} is gone.`);
    } catch (problem) {
      app.toast(reasonOf(problem));
    }
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
    const wanted = text.trim().toLowerCase();
    const shown = models.filter((one) => one.id.toLowerCase().includes(wanted));
    const loading = new Map((app.live.stats?.loading ?? []).map((one) => [one.id, one.step]));
    return [
      h("div", { class: "filters" }, h("label", {}, "Search ", h("input", { type: "search", value: text, oninput: (event) => { text = event.target.value; draw(); } })), h("p", { class: "hint", role: "status" }, `${counted(shown.length, "model")} here, ${bytes(weightsOf(shown))}`)),
      [...pulls.values()].map(pulling),
      shown.length ? h("ul", { class: "models" }, shown.map((one) => model(one, loading.get(one.id)))) : h("p", { class: "empty" }, "No model here is called so."),
      toPull(wanted),
    ];
  }

  /** Names and adapters have the weights of their model, which count once. */
  function weightsOf(shown) {
    const ids = new Set(shown.map((one) => one.parent ?? one.id));
    return [...ids].reduce((all, id) => all + (sizes.get(id)?.size ?? 0), 0);
  }

  /** The models that can be pulled, a row for each family; other names are typed. */
  function toPull(wanted) {
    const found = (library?.data ?? []).filter((one) => `${one.id} ${one.repository}`.toLowerCase().includes(wanted));
    const families = Map.groupBy(found, (one) => one.id.split(":")[0]);
    return h(
      "section",
      { class: "panel" },
      h("h2", {}, "Pull", h("small", {}, `from Hugging Face, ${counted(found.length, "model")} by a short name`)),
      h("p", { class: "legend fit" }, Object.entries(FITS).map(([fit, [mark, said]]) => h("span", { class: fit }, `${mark} ${said}`))),
      h("dl", { class: "library" }, [...families].map(([family, sizes]) => h("div", { "data-key": family }, h("dt", {}, family), h("dd", {}, sizes.map(one))))),
      h(
        "form",
        { class: "filters", onsubmit: begin },
        h("label", { for: "pull-name" }, "Another model"),
        h("input", { id: "pull-name", name: "name", required: true, placeholder: "org/repository of MLX weights", autocomplete: "off", spellcheck: "false" }),
        h("button", { type: "submit", class: "primary" }, "Pull"),
      ),
    );

    function one({ id, repository, size_bytes: size }) {
      const isHere = models.some((other) => other.id === repository);
      const fit = fitOf(size);
      const [mark, said] = isHere ? ["", "is here"] : FITS[fit];
      const isOff = isHere || fit === "large" || pulls.has(id);
      return h("button", { type: "button", class: isHere ? "here" : fit, "aria-disabled": isOff ? "true" : null, title: `${repository}: ${said}`, "aria-label": `Pull ${id}, ${bytes(size)}: ${said}`, onclick: () => isOff || pull(id) },
        `${mark} ${id.split(":")[1]}`, h("small", {}, isHere ? "here" : bytes(size)));
    }
  }

  function fitOf(size) {
    if (!library || size <= library.comfortable_bytes) return "fits";
    return size <= library.largest_bytes ? "tight" : "large";
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
      size && fitOf(size.size) !== "fits" && FITS[fitOf(size.size)][1],
      size?.details?.parameter_size && !size.details.parameter_size.startsWith("0.00") && `${size.details.parameter_size} parameters`,
      size?.details?.quantization_level,
      one.context_length && `context ${count(one.context_length)} tokens`,
      isVariant && `weights of ${one.parent}`,
      one.tool_calls === "parsed" && "tools",
      one.capabilities?.includes("vision") && "sees images",
    ].filter(Boolean);
    return h(
      "li",
      { class: one.loaded ? "loaded" : "", "data-key": one.id },
      h("div", {}, h("b", {}, one.id), h("small", {}, facts.join(" · "))),
      h("span", { class: "state" }, step ? `loading: ${step}` : one.loaded ? (stats ? `loaded, ${counted(stats.cache.nodes, "edge")}, ${bytes(stats.cache.stored_bytes + stats.cache.live_bytes)} of state` : "loaded") : "on disk"),
      h(
        "menu",
        {},
        h("a", { class: "button", title: one.loaded ? null : "The first question loads it", href: `#/chat/new/${encodeURIComponent(one.id)}` }, "Chat"),
        !isVariant && h("button", { type: "button", "aria-disabled": isBusy ? "true" : null, onclick: () => isBusy || change(one.id, one.loaded ? "unload" : "load") }, isBusy ? "…" : one.loaded ? "Unload" : "Load"),
        !BUILT_IN.includes(one.id) && (isVariant || !one.loaded) && h("button", { type: "button", "aria-label": `Delete ${one.id}`, onclick: () => remove(one.id, isVariant && one.parent) }, "Delete"),
      ),
    );
  }

  return { show: refresh };
}
