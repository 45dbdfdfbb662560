// The console: one page, a view for each question, told apart by the part of the address behind the #.

import { Api } from "./lib/api.js";
import { h, openDialog, toast, update } from "./lib/dom.js";
import { clock, seconds } from "./lib/format.js";
import { Live } from "./lib/live.js";
import { view as chat } from "./views/chat.js";
import { view as models } from "./views/models.js";
import { view as now } from "./views/now.js";
import { view as requests } from "./views/requests.js";
import { view as sessions } from "./views/sessions.js";
import { view as tree } from "./views/tree.js";

const VIEWS = [now, tree, sessions, requests, chat, models];
const THEMES = { auto: "Auto", light: "Light", dark: "Dark" };

const api = new Api(askForKey);
const live = new Live(api);
const app = { api, live, toast, navigate: (hash) => (location.hash = hash) };
const main = document.getElementById("main");
const shown = new Map();
let current = null;

async function askForKey(message) {
  const field = h("input", { type: "password", name: "key", autocomplete: "current-password", required: true, id: "key" });
  const dialog = h(
    "dialog",
    { "aria-labelledby": "key-title" },
    h(
      "form",
      { method: "dialog" },
      h("h2", { id: "key-title" }, message),
      h("label", { for: "key" }, "Key"),
      field,
      h("p", { class: "hint" }, "It is kept until this tab is closed, and sent to this server only."),
      h("menu", {}, h("button", { value: "given", class: "primary" }, "Use it"), h("button", { type: "button", onclick: () => dialog.close() }, "Not now")),
    ),
  );
  return (await openDialog(dialog)) === "given" ? field.value.trim() : null;
}

function route() {
  const [id, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  const next = VIEWS.find((one) => one.id === id) ?? now;
  if (current !== next) {
    if (current) {
      shown.get(current).control.hide?.();
      shown.get(current).root.hidden = true;
    }
    if (!shown.has(next)) {
      const root = h("section", { "aria-label": next.title, class: `view ${next.id}` });
      main.append(root);
      shown.set(next, { root, control: next.mount(root, app) });
    }
    shown.get(next).root.hidden = false;
    current = next;
    document.title = `${next.title} · mlx-serve`;
    drawNav();
  }
  shown.get(next).control.show?.(rest.map(decode));
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function drawNav() {
  update(
    document.getElementById("nav"),
    VIEWS.map((one) => h("a", { href: `#/${one.id}`, "aria-current": one === current ? "page" : null }, one.title)),
  );
}

function drawStatus() {
  const { stats, error } = live;
  const line = document.getElementById("status");
  line.className = `status ${error ? "bad" : "good"}`;
  main.classList.toggle("stale", live.isGone);
  if (error?.status === 401) update(line, h("button", { type: "button", onclick: giveKey }, "Give a key"));
  else if (live.isGone) line.textContent = `The server does not answer${stats ? `; what is shown is of ${clock(stats.time)}` : ""}.`;
  else if (error) line.textContent = error.message;
  else if (stats) line.textContent = `${stats.status === "ok" ? "up" : stats.status} ${seconds(stats.uptime_seconds)}`;
}

/** Asks for the key once more; what is shown then asks the server again. */
async function giveKey() {
  api.isDeclined = false;
  await live.poll();
  route();
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  const button = document.getElementById("theme");
  button.textContent = THEMES[name];
  button.title = `Colours: ${THEMES[name]}`;
  button.setAttribute("aria-label", button.title);
  try {
    localStorage.setItem("mlx-serve-theme", name);
  } catch {
    // A browser that keeps nothing forgets it with the page.
  }
}

function storedTheme() {
  try {
    return localStorage.getItem("mlx-serve-theme");
  } catch {
    return null;
  }
}

document.getElementById("theme").onclick = () => {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
};
document.getElementById("skip").onclick = () => main.focus();
setTheme(THEMES[storedTheme()] ? storedTheme() : "auto");
window.addEventListener("hashchange", route);
live.subscribe(drawStatus);
live.start();
route();
