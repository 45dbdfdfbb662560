// A chat: a client of /v1/chat/completions like any other.

import { follow } from "../chat/answer.js";
import { add, choose, exported, imported, messagesUpTo, newConversation, path, siblings } from "../chat/conversation.js";
import { markdown } from "../chat/render.js";
import { MAX_CONVERSATIONS, Store } from "../chat/store.js";
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

function mount(root, app) {
  let store = null;
  let list = [];
  let models = [];
  let chat = newConversation();
  let running = null;
  let editing = null;
  let drawn = 0;
  let cost = 0;

  const side = h("aside", { class: "chats", "aria-label": "Conversations" });
  const thread = h("div", { class: "thread", tabindex: 0, role: "region", "aria-label": "Messages" });
  const spoken = h("p", { class: "sr", role: "status", "aria-live": "polite" });
  const options = h("div", { class: "options" });
  const input = h("textarea", { rows: 2, "aria-label": "Message", placeholder: "Write a message. Enter sends, Shift+Enter begins a new line.", onkeydown: onKey, oninput: grow });
  const send = h("button", { type: "submit", class: "primary" }, "Send");
  const form = h("form", { class: "composer", onsubmit: (event) => (event.preventDefault(), running ? stop() : say(input.value)) }, input, send);
  root.append(side, h("div", { class: "talk" }, options, thread, spoken, form));
  const opened = Store.open().then(async (found) => {
    store = found;
    store.onchange = onOtherTab;
    list = await store.all();
  });

  // ------------------------------------------------------------------------------------------------ conversations

  async function show([id, model] = []) {
    await opened;
    loadModels();
    if (id === "new" || !id) {
      const last = id ? null : list[0];
      if (last && !Object.keys(chat.nodes).length) chat = await store.get(last.id);
      else if (id) chat = newConversation(model ?? chat.model);
    } else if (id !== chat.id) {
      const found = await store.get(id);
      if (found) chat = found;
      else app.toast("That conversation is not in this browser.");
    }
    editing = null;
    draw();
    thread.scrollTop = thread.scrollHeight;
    input.focus({ preventScroll: true });
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

  async function keep(conversation) {
    try {
      const whole = await store.put(conversation);
      if (chat.id === whole.id && !running) chat = whole;
      list = await store.all();
      for (const old of list.slice(MAX_CONVERSATIONS)) await store.remove(old.id);
      list = list.slice(0, MAX_CONVERSATIONS);
    } catch {
      app.toast("The browser could not keep this conversation.");
    }
    drawSide();
  }

  async function onOtherTab(id) {
    list = await store.all();
    if (id === chat.id && !running) chat = (await store.get(id)) ?? chat;
    if (!root.hidden) draw();
  }

  function begin(model = chat.model) {
    stop();
    chat = newConversation(model);
    editing = null;
    app.navigate(`#/chat/new`);
    draw();
    input.focus();
  }

  async function remove(id) {
    await store.remove(id);
    list = await store.all();
    if (id === chat.id) begin();
    draw();
  }

  function rename(one) {
    const dialog = h("dialog", { "aria-label": "Rename" });
    const field = h("input", { value: one.title, maxlength: 60, "aria-label": "Title" });
    dialog.append(h("form", { onsubmit: async (event) => {
      event.preventDefault();
      dialog.close();
      const whole = one.id === chat.id ? chat : await store.get(one.id);
      whole.title = field.value.trim() || one.title;
      whole.updated = Date.now();
      keep(whole);
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
      await keep(chat);
      app.navigate(`#/chat/${chat.id}`);
      draw();
    } catch (error) {
      app.toast(error.message);
    }
  }

  // ----------------------------------------------------------------------------------------------------- answering

  function say(text) {
    if (!text.trim() || running) return;
    const last = path(chat).at(-1);
    input.value = "";
    grow();
    answer(add(chat, last?.id ?? null, { role: "user", content: text }));
  }

  /** Has the model answer the message `last`; with `node`, goes on with that answer. */
  async function answer(last, node = null) {
    const conversation = chat;
    const into = node ?? add(conversation, last?.id ?? null, { role: "assistant", content: "" });
    const messages = messagesUpTo(conversation, node ?? last);
    for (const name of ["error", "finish", "firstMs"]) delete into[name];
    into.model = conversation.model;
    const abort = new AbortController();
    running = { abort, node: into };
    isFollowing = true;
    draw();
    try {
      await follow(app.api, bodyOf(conversation, messages), into, abort.signal, drawSoon);
    } catch (error) {
      if (error.name === "AbortError") into.finish = "stopped";
      else into.error = reasonOf(error);
    }
    running = null;
    if (into.tool_calls) into.tool_calls = into.tool_calls.filter(Boolean);
    conversation.updated = Date.now();
    spoken.textContent = into.error ?? into.content.slice(0, 2000);
    await keep(conversation);
    if (!location.hash.endsWith(conversation.id) && location.hash.startsWith("#/chat") && chat.id === conversation.id) history.replaceState(null, "", `#/chat/${conversation.id}`);
    draw();
  }

  function bodyOf(conversation, messages) {
    const { tools, effort, ...numbers } = conversation.settings;
    const body = { model: conversation.model ?? undefined, messages, session_id: `chat-${conversation.id.replaceAll("-", "").slice(0, 12)}`, ...numbers };
    if (tools?.trim()) body.tools = JSON.parse(tools);
    if (effort) body.reasoning_effort = effort;
    return body;
  }

  function stop() {
    running?.abort.abort();
  }

  function onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      say(input.value);
    } else if (event.key === "Escape" && running) stop();
    else if (event.key === "ArrowUp" && !input.value) {
      const last = path(chat).findLast((node) => node.role === "user");
      if (last) {
        event.preventDefault();
        edit(last);
      }
    }
  }

  root.onkeydown = (event) => {
    if (event.key === "Escape" && running) stop();
  };

  function grow() {
    input.rows = Math.min(10, Math.max(2, input.value.split("\n").length));
  }

  function edit(node) {
    editing = node.id;
    draw();
    root.querySelector(".edit textarea")?.focus();
  }

  function edited(node, text) {
    editing = null;
    if (text === node.content) return draw();
    const { role } = node;
    const parent = node.parent === "root" ? null : node.parent;
    const other = add(chat, parent, { role, content: text, reasoning: undefined, tool_call_id: node.tool_call_id });
    if (role === "user") answer(other);
    else keep(chat).then(draw);
  }

  function regenerate(node) {
    const before = chat.nodes[node.parent] ?? null;
    answer(before);
  }

  function answerCall(node, call, text) {
    let last = path(chat).at(-1);
    last = add(chat, last.id, { role: "tool", content: text, tool_call_id: call.id });
    const answered = new Set(path(chat).filter((one) => one.role === "tool").map((one) => one.tool_call_id));
    if (node.tool_calls.every((one) => answered.has(one.id))) answer(last);
    else keep(chat).then(draw);
  }

  // ------------------------------------------------------------------------------------------------------- drawing

  let isFollowing = true;
  thread.onscroll = () => {
    isFollowing = thread.scrollHeight - thread.scrollTop - thread.clientHeight < AT_END;
  };

  /** Draws a running answer as often as drawing it leaves time for other things. */
  function drawSoon() {
    const wait = Math.max(50, 8 * cost) - (performance.now() - drawn);
    if (wait <= 0) drawThread();
    else if (!running?.timer) {
      const current = running;
      if (current) current.timer = setTimeout(() => {
        current.timer = null;
        if (running === current) drawThread();
      }, wait);
    }
  }

  function draw() {
    drawSide();
    drawOptions();
    drawThread();
    send.textContent = running ? "Stop" : "Send";
  }

  function drawSide() {
    update(
      side,
      h("menu", {}, h("button", { type: "button", class: "primary", onclick: () => begin() }, "New chat"), h("label", { class: "button" }, "Import", h("input", { type: "file", accept: "application/json,.json", class: "sr", onchange: upload }))),
      store && !store.keeps && h("p", { class: "hint" }, "This browser keeps nothing: conversations end with this page."),
      h("ul", {}, list.map((one) =>
        h(
          "li",
          { "data-key": one.id, class: one.id === chat.id ? "current" : "" },
          h("a", { href: `#/chat/${one.id}`, "aria-current": one.id === chat.id ? "true" : null }, one.title || "untitled"),
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
      h("label", {}, "Model ", h("select", { value: chat.model ?? "", onchange: (event) => { chat.model = event.target.value; } },
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
    };
    const number = (text) => (text === "" || Number.isNaN(Number(text)) ? undefined : Number(text));
    return h(
      "div",
      { class: "settings" },
      h("label", { class: "wide" }, "System prompt", h("textarea", { rows: 3, value: chat.system, oninput: (event) => { chat.system = event.target.value; } })),
      Object.entries(NUMBERS).map(([name, [label, min, max, step]]) =>
        h("label", {}, label, h("input", { type: "number", min, max, step, placeholder: "the model's", value: chat.settings[name] ?? "", onchange: set(name, number) }))),
      h("label", {}, "Reasoning effort", h("select", { value: chat.settings.effort ?? "", onchange: set("effort", (value) => value || undefined) }, ["", "none", "low", "medium", "high"].map((value) => h("option", { value, selected: value === (chat.settings.effort ?? "") }, value || "the model's")))),
      h("label", { class: "wide" }, "Tools, as JSON", h("textarea", { rows: 2, spellcheck: "false", placeholder: '[{"type": "function", "function": {"name": "get_weather", "parameters": {…}}}]', value: chat.settings.tools ?? "", onchange: (event) => {
        const text = event.target.value;
        try {
          if (text.trim() && !Array.isArray(JSON.parse(text))) throw new Error("Tools are a list.");
          chat.settings.tools = text;
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
    update(thread, shown.length ? shown.map((node) => message(node, answered)) : h("p", { class: "empty" }, "What is said here stays in this browser, and on this server."));
    drawn = performance.now();
    cost = drawn - begun;
    if (isFollowing) thread.scrollTop = thread.scrollHeight;
  }

  function message(node, answered) {
    const isRunning = running?.node === node;
    if (editing === node.id) return editor(node);
    return h(
      "article",
      { class: `message ${node.role}`, "data-key": node.id, "aria-busy": isRunning ? "true" : null },
      h("h2", { class: "by" }, node.role === "user" ? "You" : node.role === "tool" ? "Tool" : (node.model ?? "Model")),
      node.reasoning && h("details", { class: "thought" }, h("summary", {}, isRunning && !node.content ? "Thinking …" : "Thought"), h("div", {}, node.reasoning)),
      h("div", { class: "text" }, node.role === "assistant" ? markdown(node.content) : h("p", { class: "plain" }, node.content), isRunning && h("span", { class: "caret", "aria-hidden": "true" })),
      (node.tool_calls ?? []).filter(Boolean).map((call) => toolCall(node, call, answered, isRunning)),
      node.error && h("p", { class: "bad", role: "alert" }, node.error, " ", h("button", { type: "button", onclick: () => regenerate(node) }, "Try again")),
      h("footer", {}, actions(node, isRunning), figures(node)),
    );
  }

  function actions(node, isRunning) {
    const ways = siblings(chat, node);
    const place = ways.indexOf(node);
    const go = (step) => () => {
      if (running) return;
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
      !isRunning && !running && [
        h("button", { type: "button", class: "quiet", onclick: () => copy(node.content) }, "Copy"),
        h("button", { type: "button", class: "quiet", onclick: () => edit(node) }, "Edit"),
        node.role === "assistant" && h("button", { type: "button", class: "quiet", onclick: () => regenerate(node) }, "Again"),
        node.role === "assistant" && ["length", "stopped"].includes(node.finish) && node.content && node === path(chat).at(-1) && h("button", { type: "button", class: "quiet", onclick: () => answer(null, node) }, "Go on"),
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
    const field = h("textarea", { rows: Math.min(12, node.content.split("\n").length + 1), value: node.content, "aria-label": "Edit the message", onkeydown: (event) => {
      if (event.key === "Escape") {
        editing = null;
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
        editing = null;
        draw();
      } }, "Cancel")),
    );
  }

  return { show };
}
