// A chat: a client of /v1/responses like any other, whose answers the server makes in the background.

import { Answers, sessionOf } from "../chat/answer.js";
import { absorb, add, choose, enqueue, exported, imported, newConversation, path, siblings, unfinished, waiting } from "../chat/conversation.js";
import { read, shownFiles } from "../chat/files.js";
import { whenLoaded } from "../chat/libraries.js";
import { markdown } from "../chat/render.js";
import { Store } from "../chat/store.js";
import { Window } from "../chat/window.js";
import { Questions, reasonOf } from "../lib/api.js";
import { confirmed, copy, h, openDialog, update } from "../lib/dom.js";
import { count, counted, ms, rate, seconds, sessionLink } from "../lib/format.js";
import { waitOf } from "../lib/names.js";
import { bar } from "./now.js";

export const view = { id: "chat", title: "Chat", mount };

const NUMBERS = {
  temperature: ["Temperature", 0, 2, 0.1],
  top_p: ["Top p", 0, 1, 0.05],
  max_tokens: ["Longest answer, tokens", 1, 1000000, 1],
  seed: ["Seed", 0, 4294967295, 1],
};
/** Settings that few change, each with what it does. */
const MORE = {
  top_k: ["Top k", 0, 1000000, 1, "so many likeliest tokens; 0 is all"],
  min_p: ["Min p", 0, 1, 0.01, "least share of the likeliest token’s probability"],
  typical_p: ["Typical p", 0.01, 1, 0.01, "the most typical tokens up to this share"],
  top_n_sigma: ["Top n sigma", -1, 100, 0.1, "so many deviations below the best logit"],
  xtc_probability: ["XTC probability", 0, 1, 0.05, "how often likely tokens are left out"],
  xtc_threshold: ["XTC threshold", 0, 1, 0.05, "from which probability on"],
  repetition_penalty: ["Repetition penalty", 0.01, 10, 0.05, "above 1: fewer repeats, of the prompt too"],
  presence_penalty: ["Presence penalty", -2, 2, 0.1, "for tokens of the answer, once"],
  frequency_penalty: ["Frequency penalty", -2, 2, 0.1, "for tokens of the answer, each time"],
  repeat_last_n: ["Penalties look at", -1, 1000000, 1, "so many last tokens; -1 is all"],
  dry_multiplier: ["DRY multiplier", 0, 100, 0.1, "against repeated sequences; 0 is off"],
  dry_base: ["DRY base", 1, 100, 0.05, "grows with their length"],
  dry_allowed_length: ["DRY allowed length", 1, 256, 1, "shorter ones are free"],
  dry_penalty_last_n: ["DRY looks at", -1, 1000000, 1, "so many last tokens; -1 is all"],
};
const SHORTCUTS = [
  ["Enter", "send; on a phone a new line"], ["Shift + Enter", "a new line"], ["↑ in an empty field", "edit your last message"], ["Escape", "stop the answer"],
  ["Ctrl or ⌘ + K", "search in all chats"], ["Alt + N", "new chat"], ["Alt + ↑, Alt + ↓", "the chat above, below"], ["Alt + U", "add files"], ["?", "this list"],
];
const AT_END = 60;
const MAX_SNIPPET = 80;
const SAVE_MS = 200;
const COARSE = matchMedia("(pointer: coarse)");

function mount(root, app) {
  let store = null;
  let answers = null;
  let models = [];
  /** Settled once the models have been listed, or cannot be. */
  let listed = Promise.resolve();
  const lists = new Questions();
  let chat = newConversation();
  /** How often a chat was asked for: the last one is shown, however long another takes to read. */
  let shows = 0;
  /** Settled once the first chat is there: what is written or given before that is for it. */
  const shown = Promise.withResolvers();
  let isShown = false;
  /** What "New chat" has begun, until its address is shown: a message may have been sent by then. */
  let fresh = null;
  let editing = null;
  let editText = "";
  let drawn = 0;
  let cost = 0;
  let drawTimer = null;
  let saveTimer = null;
  let full = false;
  /** Files of the message that is being written. */
  let files = [];
  /** Settled once all files that were given are read. */
  let reading = Promise.resolve();
  let presets = [];
  /** What is searched for in all chats, and the words found, by id. */
  let wanted = "";
  let found = null;
  /** What the list shows of each conversation, by id. */
  const list = new Map();
  /** Conversations that are shown or being answered, by id: one object each. */
  const open = new Map();

  const side = h("aside", { class: "chats", "aria-label": "Conversations" });
  const thread = h("div", { class: "thread", tabindex: 0, role: "region", "aria-label": "Messages" });
  const spoken = h("p", { class: "sr", role: "status", "aria-live": "polite" });
  const options = h("div", { class: "options" });
  const hint = COARSE.matches ? "Write a message." : "Write a message. Enter sends, Shift+Enter begins a new line.";
  const input = h("textarea", { rows: 2, dir: "auto", "aria-label": "Message", placeholder: hint, onkeydown: onKey, oninput: () => (grow(), saveDraft()), onpaste: (event) => take(event, event.clipboardData.files) });
  const send = h("button", { type: "submit", class: "primary" }, "Send");
  const end = h("button", { type: "button", onclick: () => stop() }, "Stop");
  const picker = h("input", { type: "file", multiple: true, class: "sr", "aria-label": "Add files", onchange: (event) => attach([...event.target.files]).then(() => (picker.value = "")) });
  const attached = h("div", { class: "attached" });
  const strip = h("div", { class: "strip" });
  const form = h("form", { class: "composer", onsubmit: (event) => (event.preventDefault(), say()) }, attached, input, h("menu", {}, send, end, h("label", { class: "button" }, "Files", picker)));
  const talk = h("div", { class: "talk", ondragover: (event) => event.preventDefault(), ondrop: (event) => take(event, event.dataTransfer.files) }, options, strip, thread, spoken, form);
  const drawer = h("details", { class: "drawer", open: !matchMedia("(max-width: 760px)").matches }, h("summary", {}, "Chats"), side);
  root.append(drawer, talk);
  const seen = new Window(thread);
  whenLoaded(() => root.hidden || drawThread());
  app.live.subscribe(() => root.hidden || (running() ? drawSoon() : drawStrip()));
  const opened = Store.open().then(async (found) => {
    store = found;
    store.onchange = onOtherTab;
    answers = new Answers(app.api, store, { changed: (node) => node.id in chat.nodes && drawSoon(), ended, keep });
    presets = await store.presets();
    for (const one of await store.all()) {
      note(one);
      if (unfinished(one).length || waiting(one).length) takeUp(one);
    }
  });

  // ------------------------------------------------------------------------------------------------ conversations

  async function show([id, model] = []) {
    const own = (shows += 1);
    await opened;
    listed = loadModels();
    const last = [...list.values()].sort((a, b) => b.updated - a.updated)[0];
    if (id === "new") {
      await showNew(model);
      fresh = null;
    } else if (id || (last && !hasBegun(chat))) await showKept(id || last.id, own);
    if (own !== shows) return;
    isShown = true;
    shown.resolve();
    chooseModel();
    editing = null;
    isFollowing = true;
    if (COARSE.matches) drawer.open = false;
    grow();
    draw();
    thread.scrollTop = thread.scrollHeight;
    input.focus({ preventScroll: true });
  }

  /** Shows a conversation that the browser keeps, with what was being written; until it is read, the one before stays. */
  async function showKept(id, own) {
    const known = id === chat.id ? chat : await load(id);
    const draft = await store.draft((known ?? chat).id);
    if (own !== shows) return;
    if (!known) app.toast("That conversation is not in this browser.");
    else if (known !== chat) {
      if (isShown) clear();
      chat = known;
    }
    input.value ||= draft?.text ?? "";
    if (!files.length) files = draft?.files ?? [];
  }

  /** Shows a conversation that has not begun, with what was written for it. */
  async function showNew(model) {
    if (hasBegun(chat) && chat !== fresh) {
      chat = newConversation(chat.model);
      clear();
      draw();
    }
    const blank = chat;
    const draft = await store.draft("new");
    // Who has written meanwhile goes on with that.
    if (chat === blank && !hasBegun(chat) && !input.value && draft) {
      chat = draft.conversation ?? chat;
      input.value = draft.text;
      files = draft.files ?? [];
    }
    if (model && !hasBegun(chat)) chat.model = model;
  }

  function hasBegun(conversation) {
    return list.has(conversation.id) || Object.keys(conversation.nodes).length > 0;
  }

  /** Returns a conversation, its answers taken up; null where the browser has none of that id. */
  async function load(id) {
    const found = open.get(id) ?? (await store.get(id));
    return found && takeUp(found);
  }

  /** Follows the answers that have not ended, and sends what waited for those that have; returns the object that stays. */
  function takeUp(found) {
    // Who has read the same meanwhile was first.
    const conversation = open.get(found.id) ?? found;
    if (conversation !== found) absorb(conversation, found);
    open.set(conversation.id, conversation);
    for (const node of unfinished(conversation)) answers.follow(conversation, node);
    sendWaiting(conversation);
    return conversation;
  }

  function note({ id, title, updated, isPinned }) {
    list.set(id, { id, title, updated, isPinned });
  }

  /** Empties what is being written. */
  function clear() {
    input.value = "";
    files = [];
  }

  /** Finds the chats in which a text is, with the words around it. */
  async function search(text) {
    wanted = text;
    const low = text.trim().toLowerCase();
    if (!low) found = null;
    else {
      const hits = new Map();
      for (const one of await store.all()) {
        const place = Object.values(one.nodes).find((node) => node.content.toLowerCase().includes(low));
        if (place) hits.set(one.id, snippet(place.content, low));
        else if (one.title.toLowerCase().includes(low)) hits.set(one.id, "");
      }
      if (wanted !== text) return;
      found = hits;
    }
    drawSide();
  }

  function snippet(text, low) {
    const at = text.toLowerCase().indexOf(low);
    return `${at > 20 ? "…" : ""}${text.slice(Math.max(0, at - 20), at + MAX_SNIPPET)}`.replace(/\s+/g, " ");
  }

  async function loadModels() {
    const counts = lists.begin();
    try {
      const { data } = await app.api.get("v1/models");
      if (!counts()) return;
      models = data;
      chooseModel();
      if (isShown) drawOptions();
    } catch (error) {
      // That nobody answers is said at the top of the page.
      if (!(error instanceof TypeError)) app.toast(reasonOf(error));
    }
  }

  function chooseModel() {
    chat.model ||= models.find((one) => one.loaded)?.id ?? models[0]?.id ?? null;
  }

  /** Keeps a conversation, with what other tabs have added and with `change`; returns whether the browser took it. */
  async function keep(conversation, change) {
    if (conversation.isRemoved) return true;
    open.set(conversation.id, conversation);
    note(conversation);
    let isKept = true;
    try {
      await store.put(conversation, change);
    } catch {
      isKept = false;
    }
    if (full === isKept) {
      full = !isKept;
      drawSide();
    }
    return isKept;
  }

  async function onOtherTab(id) {
    const found = await store.get(id);
    if (!found) {
      if (!open.has(id)) list.delete(id);
    } else {
      note(open.has(id) || unfinished(found).length ? takeUp(found) : found);
    }
    if (!root.hidden) draw();
  }

  async function saveDraft() {
    await shown.promise;
    const isNew = !hasBegun(chat);
    store.keepDraft(isNew ? "new" : chat.id, input.value, isNew && (input.value || files.length || chat.system) ? chat : null, files).catch(() => {
      full = true;
      drawSide();
    });
  }

  /** Keeps a change of the settings. */
  function save() {
    const conversation = chat;
    conversation.updated = Date.now();
    clearTimeout(saveTimer);
    saveTimer = setTimeout(() => (hasBegun(conversation) ? keep(conversation) : conversation === chat && saveDraft()), SAVE_MS);
  }

  function begin(model = chat.model) {
    editing = null;
    shows += 1;
    if (hasBegun(chat)) {
      chat = newConversation(model);
      clear();
      draw();
    }
    fresh = chat;
    if (location.hash === "#/chat/new") show(["new", model]);
    else app.navigate(`#/chat/new`);
  }

  async function remove({ id, title }) {
    if (!(await confirmed(`Delete “${title || "untitled"}”? Nothing brings it back; Export keeps a copy.`, "Delete"))) return;
    const one = await load(id);
    if (one) one.isRemoved = true;
    for (const node of one ? unfinished(one) : []) answers.stop(node);
    await store.remove(id);
    open.delete(id);
    list.delete(id);
    if (id === chat.id) {
      chat = newConversation(chat.model);
      begin();
    }
    draw();
  }

  function rename(one) {
    const dialog = h("dialog", { "aria-label": "Rename" });
    const field = h("input", { value: one.title, maxlength: 60, "aria-label": "Title" });
    dialog.append(h("form", { onsubmit: async (event) => {
      event.preventDefault();
      dialog.close();
      const whole = await load(one.id);
      whole.title = field.value.trim() || one.title;
      whole.updated = Date.now();
      await keep(whole);
      drawSide();
    } }, field, h("menu", {}, h("button", { type: "submit", class: "primary" }, "Rename"), h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"))));
    openDialog(dialog);
  }

  function download() {
    const address = URL.createObjectURL(new Blob([exported(chat)], { type: "application/json" }));
    h("a", { href: address, download: `${(chat.title || "chat").replace(/[^\w-]+/g, "-").slice(0, 40)}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  }

  async function upload(event) {
    const [file] = event.target.files;
    event.target.value = "";
    if (!file) return;
    try {
      chat = imported(await file.text());
      shows += 1;
      clear();
      await keep(chat);
      app.navigate(`#/chat/${chat.id}`);
      draw();
    } catch (error) {
      app.toast(error.message);
    }
  }

  // ----------------------------------------------------------------------------------------------------- answering

  /** The answer that is made below what is shown. */
  function running() {
    return path(chat).findLast((node) => node.run);
  }

  /** Whether the chat's model sees images; one that nobody knows is asked. */
  function seesImages() {
    const model = models.find((one) => one.id === chat.model);
    return !model?.capabilities || model.capabilities.includes("vision");
  }

  /** Takes files from a paste or drop; text that is pasted goes into the field. */
  function take(event, given) {
    if (!given.length) return;
    event.preventDefault();
    attach([...given]);
  }

  function attach(given) {
    const added = addFiles(given);
    reading = Promise.all([reading, added]);
    return added;
  }

  async function addFiles(given) {
    await shown.promise;
    const conversation = chat;
    await listed;
    const { taken, refused } = await read(given, files.length, seesImages());
    if (chat !== conversation) refused.push("The files were not added: another chat is shown now.");
    else if (taken.length) {
      files = [...files, ...taken];
      saveDraft();
    }
    refused.forEach(app.toast);
    drawAttached();
    input.focus();
  }

  function drawAttached() {
    update(attached, shownFiles(files, (place) => {
      files = files.filter((_, at) => at !== place);
      saveDraft();
      drawAttached();
    }));
  }

  /** Sends what is in the field, with its files once they are read. */
  async function say() {
    await shown.promise;
    const conversation = chat;
    await reading;
    const text = input.value;
    if (chat !== conversation || (!text.trim() && !files.length)) return;
    const isNew = !hasBegun(chat);
    const sent = files;
    if (sent.some((one) => one.kind === "image") && !seesImages()) return app.toast("This model sees no images. Choose one that does.");
    files = [];
    if (running()) {
      enqueue(chat, text, sent);
      spoken.textContent = "Your message waits for the end of this answer.";
      isFollowing = true;
      keep(chat);
      draw();
    } else askAll(chat, add(chat, path(chat).at(-1)?.id ?? null, { role: "user", content: text, files: sent.length ? sent : undefined }));
    input.value = "";
    grow();
    drawAttached();
    store.keepDraft(isNew ? "new" : chat.id, "").catch(() => {});
  }

  /** Has the model answer, and the other one beside it where two are compared. */
  async function askAll(conversation, last) {
    if (conversation.other) await ask(conversation, last, null, conversation.other);
    await ask(conversation, last);
  }

  /** Has the model answer the message `last`, or go on with the answer `begun`. Both are kept before they are sent. */
  async function ask(conversation, last, begun, model = conversation.model) {
    const { content = "", reasoning } = begun ?? {};
    const node = add(conversation, last?.id ?? null, { role: "assistant", content, reasoning, begun: begun && { role: "assistant", content, reasoning }, model, run: { id: null, number: -1, page: store.page } });
    isFollowing = true;
    if (conversation === chat) draw();
    await keep(conversation);
    // Has the browser keep this though its disk runs full.
    navigator.storage?.persist?.().catch(() => {});
    const [, view, id] = location.hash.split("/");
    // Who has asked for another chat meanwhile waits for that.
    if (conversation === chat && view === "chat" && !list.has(id)) history.replaceState(null, "", `#/chat/${chat.id}`);
    answers.follow(conversation, node);
    draw();
  }

  function ended(conversation, node) {
    if (conversation === chat) spoken.textContent = node.error ?? node.content.slice(0, 2000);
    else if (!conversation.isRemoved) app.toast(`“${conversation.title}” has its answer.`);
    if (["stop", "length"].includes(node.finish)) sendWaiting(conversation);
    draw();
  }

  /** Sends the first message that waits, if nothing is being answered; only one tab does. */
  async function sendWaiting(conversation, isAsked = false) {
    const last = path(conversation).at(-1);
    const [first] = waiting(conversation);
    if (!first || last?.run || (!isAsked && last && !["stop", "length"].includes(last.finish))) return;
    const [id, { text, files: sent }] = first;
    let question = null;
    await keep(conversation, () => {
      if (conversation.queued[id].gone || path(conversation).at(-1)?.run) return;
      conversation.queued[id].gone = true;
      question = add(conversation, path(conversation).at(-1)?.id ?? null, { role: "user", content: text, files: sent?.length ? sent : undefined });
    });
    if (question) askAll(conversation, question);
  }

  /** Takes a message that waits back into the field. */
  function takeBack([id, { text, files: sent }]) {
    chat.queued[id].gone = true;
    files = [...(sent ?? []), ...files];
    drawAttached();
    input.value = [text, input.value].filter(Boolean).join("\n");
    grow();
    saveDraft();
    keep(chat).then(draw);
    input.focus();
  }

  async function stop() {
    const node = running();
    if (node) await answers.stop(node);
    draw();
  }

  function onKey(event) {
    // On a phone Enter is the only way to begin a line.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !COARSE.matches) {
      event.preventDefault();
      say();
    } else if (event.key === "ArrowUp" && !input.value) {
      const last = path(chat).findLast((node) => node.role === "user");
      if (last) {
        event.preventDefault();
        edit(last);
      }
    }
  }

  root.onkeydown = (event) => {
    if (event.key === "Escape" && !editing) stop();
  };
  addEventListener("keydown", (event) => {
    if (root.hidden || document.querySelector("dialog[open]")) return;
    const isWriting = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.nodeName);
    const keys = { KeyN: () => begin(), KeyU: () => picker.click(), ArrowUp: () => step(-1), ArrowDown: () => step(1) };
    if (event.key === "?" && !isWriting) help();
    else if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
      drawer.open = true;
      side.querySelector("input[type=search]")?.focus();
    } else if (event.altKey && !event.ctrlKey && keys[event.code]) keys[event.code]();
    else return;
    event.preventDefault();
  });

  /** Goes to the chat above or below in the list. */
  function step(by) {
    const known = shownChats();
    const next = known[known.findIndex((one) => one.id === chat.id) + by];
    if (next) app.navigate(`#/chat/${next.id}`);
  }

  function help() {
    const dialog = h("dialog", { "aria-labelledby": "keys-title" }, h("h2", { id: "keys-title" }, "Keys"),
      h("table", { class: "keys" }, h("tbody", {}, SHORTCUTS.map(([keys, does]) => h("tr", {}, h("th", { scope: "row" }, keys), h("td", {}, does))))),
      h("form", { method: "dialog" }, h("button", { type: "submit", class: "primary" }, "Close")));
    openDialog(dialog);
  }

  function grow() {
    input.rows = Math.min(10, Math.max(2, input.value.split("\n").length));
  }

  async function edit(node) {
    const draft = await store.draft(node.id);
    if (!chat.nodes[node.id]) return;
    editText = draft?.text ?? node.content;
    editing = node.id;
    draw();
    root.querySelector(".edit textarea")?.focus();
  }

  function endEditing(node) {
    editing = null;
    // What had the keyboard goes.
    input.focus({ preventScroll: true });
    store.keepDraft(node.id, "").catch(() => {});
  }

  function edited(node, text) {
    endEditing(node);
    if (text === node.content) return draw();
    const { role } = node;
    const parent = node.parent === "root" ? null : node.parent;
    const other = add(chat, parent, { role, content: text, reasoning: undefined, files: node.files, tool_call_id: node.tool_call_id });
    if (role === "user") askAll(chat, other);
    else keep(chat).then(draw);
  }

  function regenerate(node) {
    ask(chat, chat.nodes[node.parent] ?? null);
  }

  function answerCall(node, call, text) {
    let last = path(chat).at(-1);
    last = add(chat, last.id, { role: "tool", content: text, tool_call_id: call.id });
    const answered = new Set(path(chat).filter((one) => one.role === "tool").map((one) => one.tool_call_id));
    if (node.tool_calls.every((one) => answered.has(one.id))) ask(chat, last);
    else keep(chat).then(draw);
  }

  // ------------------------------------------------------------------------------------------------------- drawing

  let isFollowing = true;
  thread.onscroll = () => {
    isFollowing = thread.scrollHeight - thread.scrollTop - thread.clientHeight < AT_END;
    if (!editing && seen.hasMoved(path(chat))) drawThread();
  };
  // What is written, attached or set takes height from the messages: the last one stays in sight.
  new ResizeObserver(() => isFollowing && (thread.scrollTop = thread.scrollHeight)).observe(thread);

  /** Draws running answers as often as drawing them leaves time for other things. */
  function drawSoon() {
    drawTimer ??= setTimeout(() => {
      drawTimer = null;
      if (!root.hidden) drawThread();
    }, Math.max(50, 8 * cost) - (performance.now() - drawn));
  }

  function draw() {
    if (!isShown) return;
    drawSide();
    drawOptions();
    drawAttached();
    drawThread();
  }

  /** The chats of the list: pinned ones first, then the last used. */
  function shownChats() {
    const all = [...list.values()].filter((one) => !found || found.has(one.id));
    return all.sort((a, b) => Boolean(b.isPinned) - Boolean(a.isPinned) || b.updated - a.updated);
  }

  async function pin(id) {
    const one = await load(id);
    one.isPinned = !one.isPinned;
    one.updated = Math.max(Date.now(), one.updated + 1);
    await keep(one);
    drawSide();
  }

  function drawSide() {
    const known = shownChats();
    update(
      side,
      h("menu", {}, h("button", { type: "button", class: "primary", onclick: () => begin() }, "New chat"), h("label", { class: "button" }, "Import", h("input", { type: "file", accept: "application/json,.json", class: "sr", onchange: upload }))),
      h("input", { type: "search", value: wanted, placeholder: "Search all chats", "aria-label": "Search all chats", oninput: (event) => search(event.target.value) }),
      found && h("p", { class: "hint", role: "status" }, `Found in ${counted(found.size, "chat")}.`),
      store && !store.keeps && h("p", { class: "hint" }, "This browser keeps nothing: conversations end with this page. Export those that you want to have."),
      full && h("p", { class: "bad", role: "alert" }, "The browser has no room left: what is new is only on this page. Export it, or delete conversations."),
      h("ul", {}, known.map((one) =>
        h(
          "li",
          { "data-key": one.id, class: one.id === chat.id ? "current" : "" },
          h("a", { href: `#/chat/${one.id}`, title: one.title, "aria-current": one.id === chat.id ? "true" : null }, open.has(one.id) && unfinished(open.get(one.id)).length > 0 && h("b", { role: "img", "aria-label": "is being answered:" }, "● "), one.title || "untitled", found?.get(one.id) && h("small", {}, found.get(one.id))),
          h("button", { type: "button", class: "quiet", "aria-label": `${one.isPinned ? "Unpin" : "Pin"} ${one.title || "untitled"}`, "aria-pressed": String(Boolean(one.isPinned)), onclick: () => pin(one.id) }, one.isPinned ? "★" : "☆"),
          h("button", { type: "button", class: "quiet", "aria-label": `Rename ${one.title || "untitled"}`, onclick: () => rename(one) }, "✎"),
          h("button", { type: "button", class: "quiet", "aria-label": `Delete ${one.title || "untitled"}`, onclick: () => remove(one) }, "✕"),
        ),
      )),
    );
  }

  function drawOptions() {
    const known = models.some((one) => one.id === chat.model);
    update(
      options,
      h("label", {}, "Model ", h("select", { value: chat.model ?? "", onchange: (event) => { chat.model = event.target.value; if (chat.other === chat.model) delete chat.other; drawOptions(); save(); } },
        !known && h("option", { value: chat.model ?? "", selected: true }, chat.model ?? "none"),
        models.map((one) => h("option", { value: one.id, selected: one.id === chat.model }, one.id)))),
      models.length > 1 && h("label", {}, "Compare with ", h("select", { value: chat.other ?? "", onchange: (event) => { chat.other = event.target.value || undefined; save(); } },
        h("option", { value: "" }, "no other"), models.filter((one) => one.id !== chat.model).map((one) => h("option", { value: one.id, selected: one.id === chat.other }, one.id)))),
      h("details", {}, h("summary", {}, "System message and settings"), settings()),
      h("button", { type: "button", "aria-label": "Keys", onclick: help }, "?"),
      h("button", { type: "button", onclick: download, "aria-disabled": Object.keys(chat.nodes).length ? null : "true" }, "Export"),
    );
  }

  function settings() {
    const set = (name, read) => (event) => {
      const value = read(event.target.value);
      if (value === undefined) delete chat.settings[name];
      else chat.settings[name] = value;
      save();
    };
    const number = (text) => (text === "" || Number.isNaN(Number(text)) ? undefined : Number(text));
    return h(
      "div",
      { class: "settings" },
      presetMenu(),
      h("label", { class: "wide" }, "System message", h("textarea", { rows: 3, value: chat.system, oninput: (event) => { chat.system = event.target.value; save(); } })),
      Object.entries(NUMBERS).map(numberField),
      h("label", {}, "Reasoning effort", h("select", { value: chat.settings.effort ?? "", onchange: set("effort", (value) => value || undefined) }, ["", "none", "low", "medium", "high"].map((value) => h("option", { value, selected: value === (chat.settings.effort ?? "") }, value || "the model's")))),
      h("details", { class: "wide" }, h("summary", {}, "More ways to sample"), h("div", { class: "settings more" },
        Object.entries(MORE).map(numberField),
        h("label", { class: "wide" }, "Texts that end the answer, one a line", h("textarea", { rows: 2, value: chat.settings.stop?.join("\n") ?? "", onchange: set("stop", (text) => (text.trim() ? text.split("\n").filter(Boolean) : undefined)) })),
        jsonField("fields", "Other fields of the API, as JSON", '{"logit_bias": {"42": -5}, "bad_words": ["alas"]}', (value) => value?.constructor === Object))),
      jsonField("tools", "Tools, as JSON", '[{"type": "function", "function": {"name": "get_weather", "parameters": {…}}}]', Array.isArray),
    );

    function numberField([name, [label, min, max, step, does]]) {
      return h("label", {}, label, h("input", { type: "number", min, max, step, placeholder: "the model's", value: chat.settings[name] ?? "", onchange: set(name, number) }), does && h("small", {}, does));
    }

    function jsonField(name, label, placeholder, isRight) {
      return h("label", { class: "wide" }, label, h("textarea", { rows: 2, spellcheck: "false", placeholder, value: chat.settings[name] ?? "", onchange: (event) => {
        const text = event.target.value;
        try {
          if (text.trim() && !isRight(JSON.parse(text))) throw new Error("It has another form.");
          chat.settings[name] = text;
        } catch (error) {
          app.toast(`“${label}” is not used: ${error.message}`);
          delete chat.settings[name];
        }
        save();
      } }));
    }
  }

  function presetMenu() {
    const use = (event) => {
      const one = presets.find(({ name }) => name === event.target.value);
      if (one) Object.assign(chat, { system: one.preset.system, settings: { ...one.preset.settings } });
      save();
      draw();
    };
    const change = async (name, preset) => {
      try {
        await store.keepPreset(name, preset);
        if (preset) app.toast(`The preset ${name} is kept.`);
      } catch {
        app.toast("The browser has no room left.");
      }
      presets = await store.presets();
      drawOptions();
    };
    const keepIt = (event) => {
      const field = event.target.parentNode.querySelector("input");
      const name = field.value.trim();
      if (!name) return field.focus();
      field.value = "";
      return change(name, { system: chat.system, settings: { ...chat.settings } });
    };
    return h("div", { class: "wide presets" },
      h("label", {}, "Preset", h("select", { value: "", onchange: use }, h("option", { value: "" }, presets.length ? "choose one" : "none yet"), presets.map(({ name }) => h("option", { value: name }, name)))),
      h("label", {}, "Keep these as", h("input", { maxlength: 40, placeholder: "a name" }), h("button", { type: "button", onclick: keepIt }, "Keep")),
      presets.length > 0 && h("menu", {}, presets.map(({ name }) => h("button", { type: "button", class: "quiet", "aria-label": `Forget the preset ${name}`, onclick: () => change(name, null) }, `${name} ✕`))));
  }

  /** Its own path in the tree, of the last answer. */
  function drawStrip() {
    const last = path(chat).findLast((node) => node.usage);
    if (!last) return update(strip);
    const { prompt, cached, output } = last.usage;
    const rest = Math.max(0, prompt - cached);
    const all = Math.max(1, prompt + output);
    const saved = app.live.requests.get(last.response)?.saved_seconds;
    const said = [`${count(cached)} reused`, `${count(rest)} evaluated`, `${count(output)} generated`, saved && `about ${seconds(saved)} saved`].filter(Boolean).join(", ");
    return update(strip, h("span", { class: "bar", role: "img", "aria-label": said }, bar((100 * cached) / all, "memory"), bar((100 * rest) / all, "work"), bar((100 * output) / all, "live")),
      h("span", {}, said), h("a", { href: sessionLink(sessionOf(chat)) }, "turn by turn"), h("a", { href: `#/tree/${sessionOf(chat)}/${encodeURIComponent(last.model ?? "")}` }, "in the tree"));
  }

  /** Why an answer has not begun, as far as the server says. */
  function delayOf(node) {
    const { stats } = app.live;
    if (!stats || node.content || node.reasoning || node.tool_calls) return null;
    const names = [node.model, models.find((one) => one.id === node.model)?.parent];
    const loading = stats.loading.find((one) => names.includes(one.id));
    if (loading) return `Waits for ${loading.id} to load: ${loading.step}.`;
    const request = stats.requests.find((one) => one.id === node.run.id);
    if (request?.phase === "waiting") return `Waits ${waitOf(request, app.live)}.`;
    return request?.phase === "prefill" ? `Evaluates the prompt: ${count(request.cached_tokens + request.evaluated_tokens)} of ${counted(request.prompt_tokens, "token")}.` : null;
  }

  function drawThread() {
    drawStrip();
    const begun = performance.now();
    const shown = path(chat);
    const answered = new Set(shown.filter((one) => one.role === "tool").map((one) => one.tool_call_id));
    const nothing = h("p", { class: "empty" }, "What is said here stays in this browser, and on this server. A private window forgets it when it is closed.");
    const one = (node) => {
      const beside = node.role === "assistant" ? siblings(chat, node).filter((other) => other.model !== node.model).slice(-1) : [];
      if (!chat.other || !beside.length || node !== shown.at(-1)) return message(node, answered);
      const both = [...beside, node].sort((a, b) => a.created - b.created);
      return h("div", { class: "pair", "data-key": `${node.parent}-pair` }, both.map((each) => message(each, answered)));
    };
    update(thread, shown.length ? [...seen.part(shown, one, isFollowing), ...waiting(chat).map(queued)] : nothing);
    seen.measure();
    send.textContent = running() ? "Queue" : "Send";
    end.hidden = !running();
    drawn = performance.now();
    cost = drawn - begun;
    if (isFollowing) thread.scrollTop = thread.scrollHeight;
  }

  function queued(one) {
    const [id, { text }] = one;
    return h(
      "article",
      { class: "message user waits", "data-key": id },
      h("h2", { class: "by" }, "You"),
      shownFiles(one[1].files),
      h("div", { class: "text" }, h("p", { class: "plain", dir: "auto" }, text)),
      h(
        "footer",
        {},
        h("small", {}, running() ? "Waits for the end of this answer" : "Not sent"),
        h("menu", {}, !running() && h("button", { type: "button", class: "quiet", onclick: () => sendWaiting(chat, true) }, "Send now"), h("button", { type: "button", class: "quiet", onclick: () => takeBack(one) }, "Take back")),
      ),
    );
  }

  function message(node, answered) {
    const isRunning = Boolean(node.run);
    const trouble = isRunning && (answers?.trouble(node) ?? delayOf(node));
    if (editing === node.id) return editor(node);
    return h(
      "article",
      { class: `message ${node.role}`, "data-key": node.id, "aria-busy": isRunning ? "true" : null },
      h("h2", { class: "by" }, node.role === "user" ? "You" : node.role === "tool" ? "Tool" : (node.model ?? "Model")),
      node.reasoning && h("details", { class: "thought" }, h("summary", {}, isRunning && !node.content ? "Thinking …" : "Thought"), h("div", {}, node.reasoning)),
      shownFiles(node.files),
      h("div", { class: "text" }, node.role === "assistant" ? markdown(node.content) : node.content && h("p", { class: "plain", dir: "auto" }, node.content), isRunning && h("span", { class: "caret", "aria-hidden": "true" })),
      (node.tool_calls ?? []).filter(Boolean).map((call) => toolCall(node, call, answered, isRunning)),
      trouble && h("p", { class: "hint", role: "status" }, trouble),
      node.error && h("p", { class: "bad", role: "alert" }, node.error, " ", h("button", { type: "button", onclick: () => regenerate(node) }, "Try again")),
      h("footer", {}, actions(node, isRunning), figures(node)),
    );
  }

  function actions(node, isRunning) {
    const ways = siblings(chat, node);
    const place = ways.indexOf(node);
    const go = (step) => () => {
      choose(chat, ways[place + step]);
      // The way's own message stays under the pointer, however long what follows is.
      isFollowing = false;
      keep(chat);
      draw();
    };
    return h(
      "menu",
      {},
      ways.length > 1 && [
        h("button", { type: "button", class: "quiet", "aria-label": "Earlier way", "aria-disabled": place === 0 ? "true" : null, onclick: place > 0 ? go(-1) : null }, "‹"),
        h("span", { class: "way" }, `${place + 1}/${ways.length}`),
        h("button", { type: "button", class: "quiet", "aria-label": "Later way", "aria-disabled": place === ways.length - 1 ? "true" : null, onclick: place < ways.length - 1 ? go(1) : null }, "›"),
      ],
      !isRunning && [
        h("button", { type: "button", class: "quiet", onclick: () => copy(node.content) }, "Copy"),
        h("button", { type: "button", class: "quiet", onclick: () => edit(node) }, "Edit"),
        node.role === "assistant" && h("button", { type: "button", class: "quiet", onclick: () => regenerate(node) }, "Again"),
        node.role === "assistant" && ["length", "stopped", "failed"].includes(node.finish) && node.content && !node.tool_calls?.length && h("button", { type: "button", class: "quiet", onclick: () => ask(chat, chat.nodes[node.parent] ?? null, node) }, "Go on"),
      ],
    );
  }

  function figures(node) {
    if (node.role !== "assistant" || (!node.usage && !node.finish)) return null;
    const { usage } = node;
    const parts = [
      usage && `reused ${count(usage.cached)} of ${count(usage.prompt)} tokens`,
      node.firstMs !== undefined && `first token ${ms(node.firstMs)}`,
      node.speed && rate(node.speed),
      node.finish === "length" && "cut off at the limit",
      node.finish === "stopped" && "stopped",
    ].filter(Boolean);
    return h("small", {}, parts.join(" · "));
  }

  function toolCall(node, call, answered, isRunning) {
    return h(
      "div",
      { class: "call" },
      h("p", {}, "Calls ", h("b", {}, call.name)),
      h("pre", { tabindex: 0 }, call.arguments),
      !isRunning && call.id && !answered.has(call.id) && h(
        "form",
        { onsubmit: (event) => {
          event.preventDefault();
          answerCall(node, call, event.target.elements.result.value);
        } },
        h("label", {}, `What ${call.name} answers`, h("textarea", { name: "result", rows: 2 })),
        h("button", { type: "submit" }, "Answer"),
      ),
    );
  }

  function editor(node) {
    const field = h("textarea", { rows: Math.min(12, node.content.split("\n").length + 1), value: editText, "aria-label": "Edit the message", oninput: (event) => {
      editText = event.target.value;
      store.keepDraft(node.id, editText).catch(() => {});
    }, onkeydown: (event) => {
      if (event.key === "Escape") {
        // Outside of the editor the key stops the answer.
        event.stopPropagation();
        endEditing(node);
        draw();
      } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) edited(node, event.target.value);
    } });
    return h(
      "form",
      { class: "edit", "data-key": `${node.id}-edit`, onsubmit: (event) => {
        event.preventDefault();
        edited(node, event.target.querySelector("textarea").value);
      } },
      field,
      h("menu", {}, h("button", { type: "submit", class: "primary" }, node.role === "user" ? "Send as another way" : "Keep as another way"), h("button", { type: "button", onclick: () => {
        endEditing(node);
        draw();
      } }, "Cancel")),
    );
  }

  return { show };
}
