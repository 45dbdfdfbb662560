// The `ollama` package of Node: lists, a chat, a stream, a tool over two turns, a schema, and a cancel.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const client = new Ollama({ host: process.env.BASE_URL });
const [{ name: model }] = (await client.list()).models;
assert.ok((await client.show({ model })).capabilities.includes("tools"));
assert.equal((await client.ps()).models[0].name, model);
const options = { num_predict: 200, temperature: 0 };
const asked = { role: "user", content: "What is the weather in Oslo?" };

assert.ok((await client.chat({ model, messages: [asked], options })).message.content);
let streamed = "";
for await (const part of await client.chat({ model, messages: [asked], options, stream: true })) {
  streamed += part.message.content;
}
assert.ok(streamed);
const first = await client.generate({ model, prompt: "My name is Anna.", options });
assert.ok((await client.generate({ model, prompt: "And yours?", context: first.context, options })).response);

const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters: city } }];
const { message } = await client.chat({ model, messages: [asked], tools, options });
assert.equal(typeof message.tool_calls[0].function.arguments.city, "string");
const result = { role: "tool", tool_name: "get_weather", content: "sunny" };
assert.ok((await client.chat({ model, messages: [asked, message, result], tools, options })).message.content);

const format = { ...city, properties: { city: { enum: ["Lisbon", "Oslo"] } } };
const bound = await client.chat({ model, messages: [asked], format, options });
assert.ok(["Lisbon", "Oslo"].includes(JSON.parse(bound.message.content).city));
await assert.rejects(client.embed({ model, input: "x" }), /Ollama's embeddings/);

const stream = await client.generate({ model, prompt: "Tell me a story.", stream: true });
for await (const _ of stream) break;
stream.abort();
