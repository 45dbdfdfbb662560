// Three things to click that show sharing at once, for who comes here first.

import { h } from "../lib/dom.js";
import { count } from "../lib/format.js";
import { reasonOf } from "../lib/api.js";

const SYSTEM = "You are a careful assistant. You answer in one short sentence. You know people by their names, and where they live, and you never make anything up. When somebody asks about the weather, you say that you cannot see it from here.";
const ADA = { role: "user", content: "My name is Ada and I live in Paris." };
const BOB = { role: "user", content: "My name is Bob and I live in Rome." };
const WHO = { role: "user", content: "What is my name?" };

export function firstSteps(app, changed) {
  const said = new Map();
  let running = null;

  const keepsOnDisk = () => app.live.stats?.models.some((one) => one.cache.keeps_on_disk);

  async function ask(messages, session) {
    const body = { messages: [{ role: "system", content: SYSTEM }, ...messages], session_id: session, max_tokens: 24, temperature: 0 };
    const answer = await app.api.post("v1/chat/completions", body);
    const { prompt_tokens: all, prompt_tokens_details: details } = answer.usage;
    return { text: answer.choices[0].message.content ?? "", reused: details?.cached_tokens ?? 0, all };
  }

  async function run(step) {
    running = step.id;
    said.set(step.id, "…");
    changed();
    try {
      said.set(step.id, await step.run());
    } catch (error) {
      said.set(step.id, reasonOf(error));
    }
    running = null;
    changed();
  }

  const steps = [
    {
      id: "share",
      title: "Two chats, one system message",
      text: () => "Ada's chat evaluates the prompt; Bob's finds the first part of it there.",
      run: async () => {
        const first = await ask([ADA], "tour-ada");
        const second = await ask([BOB], "tour-bob");
        return `Ada: ${count(first.reused)} of ${count(first.all)} tokens reused. Bob: ${count(second.reused)} of ${count(second.all)}.`;
      },
    },
    {
      id: "branch",
      title: "An edit that branches",
      text: () => "The same chat goes on in two ways. Both are kept, and what they share is there once.",
      run: async () => {
        const reply = await ask([ADA], "tour-ada");
        const turn = { role: "assistant", content: reply.text };
        const one = await ask([ADA, turn, WHO], "tour-ada");
        const other = await ask([ADA, turn, { role: "user", content: "Where do I live?" }], "tour-ada");
        return `First way: ${count(one.reused)} of ${count(one.all)} tokens reused. Second: ${count(other.reused)} of ${count(other.all)}.`;
      },
    },
    {
      id: "restart",
      title: "A restart that finds everything",
      text: () =>
        keepsOnDisk()
          ? "Click here, stop the server with Ctrl-C, start it again, click again: the tokens come from disk."
          : "Stop the server with Ctrl-C, start it with --cache-disk 4GB, click here, stop it, start it again, click again: the tokens come from disk.",
      run: async () => {
        const reply = await ask([ADA, { role: "assistant", content: "Nice to meet you, Ada!" }, WHO], "tour-disk");
        return `${count(reply.reused)} of ${count(reply.all)} tokens reused.${keepsOnDisk() ? "" : " This server keeps nothing on disk: it was started without --cache-disk."}`;
      },
    },
  ];

  return {
    isWanted: (stats) => said.size > 0 || stats.totals.requests === 0,
    panel: () =>
      h(
        "section",
        { class: "panel first" },
        h("h2", {}, "See it share"),
        h("ul", {}, steps.map((step) =>
          h(
            "li",
            {},
            h("button", { type: "button", class: "primary", onclick: () => running || run(step), "aria-disabled": running ? "true" : null }, step.title),
            h("p", {}, step.text()),
            said.has(step.id) && h("p", { class: "said", role: "status" }, said.get(step.id)),
          ),
        )),
        h("p", { class: "hint" }, "Watch ", h("a", { href: "#/tree" }, "the tree"), " meanwhile, or point any client of OpenAI's API at ", h("code", {}, new URL("v1", document.baseURI).href), "."),
      ),
  };
}
