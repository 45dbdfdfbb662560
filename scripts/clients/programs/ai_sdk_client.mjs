// The Vercel AI SDK with its OpenAI-compatible provider: text, a stream, a tool that must be called, and an object.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "mlx-serve",
  baseURL: `${process.env.BASE_URL}/v1`,
  supportsStructuredOutputs: true,
});
const model = provider("demo");
const prompt = "What is the weather in Oslo?";

assert.ok((await generateText({ model, prompt })).text);
let streamed = "";
for await (const piece of streamText({ model, prompt }).textStream) streamed += piece;
assert.ok(streamed);

const asked = [];
const get_weather = tool({
  description: "Get the weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => (asked.push(city), `sunny in ${city}`),
});
await generateText({ model, prompt, tools: { get_weather }, toolChoice: "required" });
assert.equal(asked.length, 1);

const schema = z.object({ city: z.enum(["Lisbon", "Oslo"]) });
const { object } = await generateObject({ model, prompt, schema });
assert.ok(["Lisbon", "Oslo"].includes(object.city));
