// A chat: a client of /v1/responses like any other, whose answers the server makes in the background.

import { Answers } from "../chat/answer.js";
import { absorb, add, choose, enqueue, exported, imported, newConversation, path, siblings, unfinished, waiting } from "../chat/conversation.js";
import { markdown } from "../chat/render.js";
import { Store } from "../chat/store.js";
import { reasonOf } from "../lib/api.js";
import { copy, h, update } from "../lib/dom.js";
import { count, ms, rate } from "../lib/format.js";

export const view = { id: "chat", title: "Chat", mount };

const NUMBERS = {
  temperature: ["Temperature", 0, 2, 0.1],
  top_p: ["Top p", 0, 1, 0.05],
  max_tokens: ["Longest answer, tokens", 1, 1000000, 1],
  seed: ["Seed", 0, 4294967295, 1],
};
const AT_END = 60;
const SAVE_MS = 200;
const COARSE = matchMedia("(pointer: coarse)");

function mount(root, app) {
  let store = null;
  let answers = null;
  let models = [];
  let chat = newConversation();
  /** What "New chat" has begun, until its address is shown: a message may have been sent by then. */
  let fresh = null;
  let editing = null;
  let editText = "";
  let drawn = 0;
  let cost = 0;
  let drawTimer = null;
  let saveTimer = null;
  let full = false;
  /** What the list shows of each conversation, by id. */
  const list = new Map();
  /** Conversations that are shown or being answered, by id: one object each. */
  const open = new Map();

  const side = h("aside", { class: "chats", "aria-label": "Conversations" });
  const thread = h("div", { class: "thread", tabindex: 0, role: "region", "aria-label": "Messages" });
  const spoken = h("p", { class: "sr", role: "status", "aria-live": "polite" });
  const options = h("div", { class: "options" });
  const hint = COARSE.matches ? "Write a message." : "Write a message. Enter sends, Shift+Enter begins a new line.";
  const input = h("textarea", { rows: 2, "aria-label": "Message", placeholder: hint, onkeydown: onKey, oninput: () => (grow(), saveDraft()) });
  const send = h("button", { type: "submit", class: "primary" }, "Send");
  const end = h("button", { type: "button", onclick: () => stop() }, "Stop");
  const form = h("form", { class: "composer", onsubmit: (event) => (event.preventDefault(), say(input.value)) }, input, h("menu", {}, send, end));
  root.append(side, h("div", { class: "talk" }, options, thread, spoken, form));
  const opened = Store.open().then(async (found) => {
    store = found;
    store.onchange = onOtherTab;
    answers = new Answers(app.api, store, { changed: (node) => node.id in chat.nodes && drawSoon(), ended, keep });
    for (const one of await store.all()) {
      note(one);
      if (unfinished(one).length || waiting(one).length) takeUp(one);
    }
  });

  // ------------------------------------------------------------------------------------------------ conversations

  async function show([id, model] = []) {
    await opened;
    loadModels();
    const last = [...list.values()].sort((a, b) => b.updated - a.updated)[0];
    if (id === "new") {
      await showNew(model);
      fresh = null;
    }
    else if (id || (last && !hasBegun(chat))) {
      const wanted = id || last.id;
      if (wanted !== chat.id) input.value = "";
      const found = wanted === chat.id ? chat : await load(wanted);
      if (found) chat = found;
      else app.toast("That conversation is not in this browser.");
      input.value ||= (await store.draft(chat.id))?.text ?? "";
    }
    editing = null;
    isFollowing = true;
    grow();
    draw();
    thread.scrollTop = thread.scrollHeight;
    input.focus({ preventScroll: true });
  }

  /** Shows a conversation that has not begun, with what was written for it. */
  async function showNew(model) {
    if (hasBegun(chat) && chat !== fresh) {
      chat = newConversation(chat.model);
      input.value = "";
      draw();
    }
    const blank = chat;
    const draft = await store.draft("new");
    // Who has written meanwhile goes on with that.
    if (chat === blank && !hasBegun(chat) && !input.value && draft) {
      chat = draft.conversation ?? chat;
      input.value = draft.text;
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

  function note({ id, title, updated }) {
    list.set(id, { id, title, updated });
  }

  async function loadModels() {
    try {
      models = (await app.api.get("v1/models")).data;
      if (!chat.model) chat.model = models.find((one) => one.loaded)?.id ?? models[0]?.id ?? null;
      drawOptions();
    } catch (error) {
      // That nobody answers is said at the top of the page.
      if (!(error instanceof TypeError)) app.toast(reasonOf(error));
    }
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

  function saveDraft() {
    const isNew = !hasBegun(chat);
    store?.keepDraft(isNew ? "new" : chat.id, input.value, isNew && (input.value || chat.system) ? chat : null).catch(() => {
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
    if (hasBegun(chat)) {
      chat = newConversation(model);
      input.value = "";
      draw();
    }
    fresh = chat;
    if (location.hash === "#/chat/new") show(["new", model]);
    else app.navigate(`#/chat/new`);
  }

  async function remove(id) {
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
    dialog.onclose = () => dialog.remove();
    document.body.append(dialog);
    dialog.showModal();
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
      input.value = "";
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

  async function say(text) {
    if (!text.trim() || !store) return;
    const isNew = !hasBegun(chat);
    if (running()) {
      enqueue(chat, text);
      spoken.textContent = "Your message waits for the end of this answer.";
      isFollowing = true;
      keep(chat);
      draw();
    } else ask(chat, add(chat, path(chat).at(-1)?.id ?? null, { role: "user", content: text }));
    input.value = "";
    grow();
    store.keepDraft(isNew ? "new" : chat.id, "").catch(() => {});
  }

  /** Has the model answer the message `last`, or go on with the answer `begun`. Both are kept before they are sent. */
  async function ask(conversation, last, begun) {
    const { content = "", reasoning } = begun ?? {};
    const node = add(conversation, last?.id ?? null, { role: "assistant", content, reasoning, begun: begun && { role: "assistant", content, reasoning }, model: conversation.model, run: { id: null, number: -1, page: store.page } });
    isFollowing = true;
    if (conversation === chat) draw();
    await keep(conversation);
    // Has the browser keep this though its disk runs full.
    navigator.storage?.persist?.().catch(() => {});
    if (conversation === chat && location.hash.startsWith("#/chat")) history.replaceState(null, "", `#/chat/${chat.id}`);
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
    const [id, { text }] = first;
    let question = null;
    await keep(conversation, () => {
      if (conversation.queued[id].gone || path(conversation).at(-1)?.run) return;
      conversation.queued[id].gone = true;
      question = add(conversation, path(conversation).at(-1)?.id ?? null, { role: "user", content: text });
    });
    if (question) ask(conversation, question);
  }

  /** Takes a message that waits back into the field. */
  function takeBack([id, { text }]) {
    chat.queued[id].gone = true;
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
      say(input.value);
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

  function grow() {
    input.rows = Math.min(10, Math.max(2, input.value.split("\n").length));
  }

  async function edit(node) {
    editText = (await store.draft(node.id))?.text ?? node.content;
    editing = node.id;
    draw();
    root.querySelector(".edit textarea")?.focus();
  }

  function endEditing(node) {
    editing = null;
    store.keepDraft(node.id, "").catch(() => {});
  }

  function edited(node, text) {
    endEditing(node);
    if (text === node.content) return draw();
    const { role } = node;
    const parent = node.parent === "root" ? null : node.parent;
    const other = add(chat, parent, { role, content: text, reasoning: undefined, tool_call_id: node.tool_call_id });
    if (role === "user") ask(chat, other);
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
  };

  /** Draws running answers as often as drawing them leaves time for other things. */
  function drawSoon() {
    drawTimer ??= setTimeout(() => {
      drawTimer = null;
      if (!root.hidden) drawThread();
    }, Math.max(50, 8 * cost) - (performance.now() - drawn));
  }

  function draw() {
    drawSide();
    drawOptions();
    drawThread();
  }

  function drawSide() {
    const known = [...list.values()].sort((a, b) => b.updated - a.updated);
    update(
      side,
      h("menu", {}, h("button", { type: "button", class: "primary", onclick: () => begin() }, "New chat"), h("label", { class: "button" }, "Import", h("input", { type: "file", accept: "application/json,.json", class: "sr", onchange: upload }))),
      store && !store.keeps && h("p", { class: "hint" }, "This browser keeps nothing: conversations end with this page. Export those that you want to have."),
      full && h("p", { class: "bad", role: "alert" }, "The browser has no room left: what is new is only on this page. Export it, or delete conversations."),
      h("ul", {}, known.map((one) =>
        h(
          "li",
          { "data-key": one.id, class: one.id === chat.id ? "current" : "" },
          h("a", { href: `#/chat/${one.id}`, "aria-current": one.id === chat.id ? "true" : null }, open.has(one.id) && unfinished(open.get(one.id)).length > 0 && h("b", { role: "img", "aria-label": "is being answered:" }, "● "), one.title || "untitled"),
          h("button", { type: "button", class: "quiet", "aria-label": `Rename ${one.title || "untitled"}`, onclick: () => rename(one) }, "✎"),
          h("button", { type: "button", class: "quiet", "aria-label": `Delete ${one.title || "untitled"}`, onclick: () => remove(one.id) }, "✕"),
        ),
      )),
    );
  }

  function drawOptions() {
    const known = models.some((one) => one.id === chat.model);
    update(
      options,
      h("label", {}, "Model ", h("select", { value: chat.model ?? "", onchange: (event) => { chat.model = event.target.value; save(); } },
        !known && h("option", { value: chat.model ?? "", selected: true }, chat.model ?? "none"),
        models.map((one) => h("option", { value: one.id, selected: one.id === chat.model }, one.id)))),
      h("details", {}, h("summary", {}, "System prompt and settings"), settings()),
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
      h("label", { class: "wide" }, "System prompt", h("textarea", { rows: 3, value: chat.system, oninput: (event) => { chat.system = event.target.value; save(); } })),
      Object.entries(NUMBERS).map(([name, [label, min, max, step]]) =>
        h("label", {}, label, h("input", { type: "number", min, max, step, placeholder: "the model's", value: chat.settings[name] ?? "", onchange: set(name, number) }))),
      h("label", {}, "Reasoning effort", h("select", { value: chat.settings.effort ?? "", onchange: set("effort", (value) => value || undefined) }, ["", "none", "low", "medium", "high"].map((value) => h("option", { value, selected: value === (chat.settings.effort ?? "") }, value || "the model's")))),
      h("label", { class: "wide" }, "Tools, as JSON", h("textarea", { rows: 2, spellcheck: "false", placeholder: '[{"type": "function", "function": {"name": "get_weather", "parameters": {…}}}]', value: chat.settings.tools ?? "", onchange: (event) => {
        const text = event.target.value;
        try {
          if (text.trim() && !Array.isArray(JSON.parse(text))) throw new Error("Tools are a list.");
          chat.settings.tools = text;
          save();
        } catch (error) {
          app.toast(`These tools are not used: ${error.message}`);
          delete chat.settings.tools;
        }
      } })),
    );
  }

  function drawThread() {
    const begun = performance.now();
    const shown = path(chat);
    const answered = new Set(shown.filter((one) => one.role === "tool").map((one) => one.tool_call_id));
    const nothing = h("p", { class: "empty" }, "What is said here stays in this browser, and on this server. A private window forgets it when it is closed.");
    update(thread, shown.length ? [...shown.map((node) => message(node, answered)), ...waiting(chat).map(queued)] : nothing);
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
      h("div", { class: "text" }, h("p", { class: "plain" }, text)),
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
    const trouble = isRunning && answers?.trouble(node);
    if (editing === node.id) return editor(node);
    return h(
      "article",
      { class: `message ${node.role}`, "data-key": node.id, "aria-busy": isRunning ? "true" : null },
      h("h2", { class: "by" }, node.role === "user" ? "You" : node.role === "tool" ? "Tool" : (node.model ?? "Model")),
      node.reasoning && h("details", { class: "thought" }, h("summary", {}, isRunning && !node.content ? "Thinking …" : "Thought"), h("div", {}, node.reasoning)),
      h("div", { class: "text" }, node.role === "assistant" ? markdown(node.content) : h("p", { class: "plain" }, node.content), isRunning && h("span", { class: "caret", "aria-hidden": "true" })),
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
        endEditing(node);
        draw();
        input.focus();
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
