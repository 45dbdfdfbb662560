// The `openai` package of Node: a chat, a stream, a tool that must be called, a schema, and a cancel.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.BASE_URL}/v1`, apiKey: "none" });
const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
const common = { model: "demo", messages, max_tokens: 200 };

assert.ok((await client.chat.completions.create(common)).choices[0].message.content);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...common, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
assert.ok(streamed);

const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters: city } }];
const called = await client.chat.completions.create({ ...common, tools, tool_choice: "required" });
assert.ok("city" in JSON.parse(called.choices[0].message.tool_calls[0].function.arguments));

const schema = { ...city, properties: { city: { enum: ["Lisbon", "Oslo"] } }, additionalProperties: false };
const response_format = { type: "json_schema", json_schema: { name: "place", schema, strict: true } };
const bound = await client.chat.completions.create({ ...common, response_format });
assert.ok(["Lisbon", "Oslo"].includes(JSON.parse(bound.choices[0].message.content).city));

const stream = await client.chat.completions.create({ ...common, stream: true });
for await (const _ of stream) break;
stream.controller.abort();
