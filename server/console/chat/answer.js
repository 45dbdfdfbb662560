// Answers that the server makes in the background: asked for, followed, taken up again after a reload, stopped.

import { ApiError, reasonOf } from "../lib/api.js";
import { inputUpTo, itemsOf } from "./conversation.js";

/** A browser opens six connections to a server at most, over all its tabs. */
const MAX_STREAMS = 3;
const KEEP_MS = 500;
const MAX_RETRY_MS = 8000;
/** How long a page without locks leaves a question to the page that sends it. */
const OTHERS_MS = 10000;
const FINISHES = { completed: "stop", incomplete: "length", cancelled: "stopped", failed: "failed" };

/**
 * The answers that this page follows. A message that is being answered has `run`: the response's id, which is null
 * until the server has taken the question, the number of the last event, and the page that sends the question. One page
 * at a time follows an answer, the next one where that page is closed; without locks, as over plain http, each page does.
 */
export class Answers {
  /** `changed(node)` is called after each piece, `ended(conversation, node)` at the end, `keep(conversation)` keeps it. */
  constructor(api, store, { changed, ended, keep }) {
    Object.assign(this, { api, store, changed, ended, keep });
    this.followed = new Map();
    this.numStreams = 0;
    this.queue = [];
    // A connection of the time before may never be closed.
    addEventListener("online", () => this.followed.forEach(({ node, line }) => node.run?.id && line?.abort()));
  }

  /** Asks for an answer, or goes on with following it. */
  async follow(conversation, node) {
    if (!node.run || this.followed.has(node.id)) return;
    const one = { conversation, node, abort: new AbortController(), asked: node.run.id ? null : performance.now(), trouble: null };
    this.followed.set(node.id, one);
    const work = () => this.placed(() => this.toEnd(one));
    try {
      if (navigator.locks) await navigator.locks.request(`mlx-serve-answer/${node.id}`, { signal: one.abort.signal }, work);
      else await work();
    } catch (error) {
      if (error.name !== "AbortError") node.error = reasonOf(error);
    }
    this.followed.delete(node.id);
    this.changed(node);
  }

  /** Ends an answer, on the server too. */
  async stop(node) {
    try {
      if (!node.run.id) throw new Error("The server has not taken the question.");
      await this.api.post(`v1/responses/${node.run.id}/cancel`);
    } catch {
      // Who cannot reach the server need not wait for it.
      this.followed.get(node.id)?.abort.abort();
    }
  }

  /** Why an answer makes no progress at the moment. */
  trouble(node) {
    return this.followed.get(node.id)?.trouble ?? null;
  }

  async placed(work) {
    if (this.numStreams >= MAX_STREAMS) await new Promise((go) => this.queue.push(go));
    else this.numStreams += 1;
    try {
      return await work();
    } finally {
      const next = this.queue.shift();
      if (next) next();
      else this.numStreams -= 1;
    }
  }

  async toEnd(one) {
    const { conversation, node } = one;
    // Another page may have followed it meanwhile.
    await this.keep(conversation);
    if (!navigator.locks) await this.leftToOthers(one);
    one.response = node.run?.id;
    for (let wait = 500; node.run; wait = Math.min(2 * wait, MAX_RETRY_MS)) {
      const from = node.run.number;
      try {
        await this.read(one);
      } catch (error) {
        if (one.abort.signal.aborted) end(node, "stopped");
        else if (error instanceof ApiError) await this.refused(one, error);
        else one.trouble = "The server does not answer. What has been said is kept, and this goes on as soon as it does.";
      }
      if (!node.run) break;
      if (node.run.number > from) wait = 250;
      this.changed(node);
      await new Promise((go) => setTimeout(go, wait));
    }
    clearTimeout(one.timer);
    if ((await this.keep(conversation)) && one.response) {
      // The answer is kept here now, and not needed on the server.
      this.api.del(`v1/responses/${one.response}`).catch(() => {});
    }
    this.followed.delete(node.id);
    this.ended(conversation, node);
  }

  /** Waits for what another page hears of its question; that page may be gone, which only locks would tell. */
  async leftToOthers({ conversation, node, abort }) {
    const until = Date.now() + OTHERS_MS;
    while (node.run && !node.run.id && node.run.page !== this.store.page && !abort.signal.aborted && Date.now() < until) {
      await new Promise((go) => setTimeout(go, KEEP_MS));
      await this.keep(conversation);
    }
  }

  /** Takes the events of an answer until its end, or that of the connection. */
  async read(one) {
    const { node } = one;
    one.line = new AbortController();
    const signal = AbortSignal.any([one.abort.signal, one.line.signal]);
    const after = node.run.number >= 0 ? `&starting_after=${node.run.number}` : "";
    const events = node.run.id
      ? this.api.events(`v1/responses/${node.run.id}?stream=true${after}`, { signal })
      : this.api.events("v1/responses", { method: "POST", body: bodyOf(one.conversation, node), signal });
    for await (const { data } of events) {
      if (!data) continue;
      const event = JSON.parse(data);
      if (event.type === "error") throw new ApiError(400, event.code, event.message);
      if (!node.run) return;
      one.trouble = null;
      if (event.response) one.response = event.response.id;
      // Another page may have been further.
      if (event.sequence_number > node.run.number) take(node, event);
      if (one.asked !== null && event.delta) {
        node.firstMs = Math.round(performance.now() - one.asked);
        one.asked = null;
      }
      one.timer ??= setTimeout(() => {
        one.timer = null;
        this.keep(one.conversation);
      }, event.response ? 0 : KEEP_MS);
      this.changed(node);
      if (!node.run) return;
    }
  }

  /** Looks what has become of an answer whose events the server refuses. */
  async refused({ conversation, node, abort }, error) {
    if (!node.run) return;
    if (!node.run.id || error.status === 401) {
      fail(node, error.message);
      return;
    }
    try {
      const whole = await this.api.get(`v1/responses/${node.run.id}`, { signal: abort.signal });
      if (FINISHES[whole.status]) finish(node, whole);
    } catch (other) {
      if (other.status === 404) {
        await this.keep(conversation);
        if (node.run) fail(node, "The server has been started anew, and no longer has the rest of this answer.");
      } else if (other.name === "AbortError") end(node, "stopped");
    }
  }
}

/** The session of a chat, as the server knows it. */
export function sessionOf(conversation) {
  return `chat-${conversation.id.replaceAll("-", "").slice(0, 12)}`;
}

function bodyOf(conversation, node) {
  const { tools, effort, max_tokens, fields, ...sampling } = conversation.settings;
  const before = inputUpTo(conversation, conversation.nodes[node.parent]);
  return {
    model: node.model ?? undefined,
    instructions: conversation.system.trim() ? conversation.system : undefined,
    input: node.begun ? [...before, ...itemsOf(node.begun, "incomplete")] : before,
    session_id: sessionOf(conversation),
    tools: tools?.trim() ? JSON.parse(tools).map((one) => (one.function ? { type: "function", ...one.function } : one)) : undefined,
    reasoning: effort ? { effort } : undefined,
    max_output_tokens: max_tokens,
    ...sampling,
    ...(fields?.trim() ? JSON.parse(fields) : {}),
    background: true,
    stream: true,
  };
}

/** Adds an event to a message. */
function take(node, event) {
  const { delta, item, response, output_index: index } = event;
  node.run.number = event.sequence_number;
  if (response) node.run.id = response.id;
  switch (event.type) {
    case "response.output_text.delta":
      node.content += delta;
      break;
    case "response.reasoning_text.delta":
      node.reasoning = (node.reasoning ?? "") + delta;
      break;
    case "response.output_item.added":
      if (item.type === "function_call") (node.tool_calls ??= [])[index] = { id: item.call_id, name: item.name, arguments: item.arguments };
      break;
    case "response.function_call_arguments.delta":
      node.tool_calls[index].arguments += delta;
      break;
    default:
      if (response && FINISHES[response.status]) finish(node, response);
  }
}

/** Makes a message what the whole response says. */
function finish(node, response) {
  const parts = (type) => response.output.filter((item) => item.type === type).flatMap((item) => item.content ?? []).map((part) => part.text).join("");
  const content = (node.begun?.content ?? "") + parts("message");
  // Of what has failed, more may have come than the server has kept.
  if (response.status !== "failed" || content.length >= node.content.length) {
    node.content = content;
    node.reasoning = (node.begun?.reasoning ?? "") + parts("reasoning") || undefined;
  }
  const calls = response.output.filter((item) => item.type === "function_call" && item.status === "completed");
  node.tool_calls = calls.length ? calls.map((item) => ({ id: item.call_id, name: item.name, arguments: item.arguments })) : undefined;
  if (response.usage) node.usage = { prompt: response.usage.input_tokens, output: response.usage.output_tokens, cached: response.usage.input_tokens_details.cached_tokens };
  node.response = response.id;
  node.speed = response.timings?.predicted_per_second ?? undefined;
  if (response.status === "failed") fail(node, response.error?.message ?? "The answer failed.");
  else end(node, FINISHES[response.status]);
}

function fail(node, why) {
  node.error = why;
  end(node, "failed");
}

function end(node, how) {
  node.finish = how;
  node.tool_calls = node.tool_calls?.filter(Boolean);
  delete node.run;
  delete node.begun;
}
