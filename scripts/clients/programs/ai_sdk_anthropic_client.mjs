// The Vercel AI SDK with its Anthropic provider: text, a stream, a tool that must be called, and an object.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const provider = createAnthropic({ baseURL: `${process.env.BASE_URL}/v1`, apiKey: "none" });
const model = provider("demo");
const prompt = "What is the weather in Oslo?";
const maxOutputTokens = 200;

assert.ok((await generateText({ model, prompt, maxOutputTokens })).text);
let streamed = "";
for await (const piece of streamText({ model, prompt, maxOutputTokens }).textStream) streamed += piece;
assert.ok(streamed);

const asked = [];
const get_weather = tool({
  description: "Get the weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => (asked.push(city), `sunny in ${city}`),
});
await generateText({ model, prompt, maxOutputTokens, tools: { get_weather }, toolChoice: "required" });
assert.ok(asked.length > 0);

const schema = z.object({ city: z.enum(["Lisbon", "Oslo"]) });
const { object } = await generateObject({ model, prompt, maxOutputTokens, schema });
assert.ok(["Lisbon", "Oslo"].includes(object.city));
