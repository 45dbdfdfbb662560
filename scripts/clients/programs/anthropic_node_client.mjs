// The `@anthropic-ai/sdk` package of Node: a message, a stream, a tool that must be called, a schema, and a count.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.BASE_URL, apiKey: "none" });
const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
const common = { model: "demo", messages, max_tokens: 200 };

assert.ok((await client.messages.create(common)).content[0].text);
assert.ok(await client.messages.stream(common).finalText());

const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ name: "get_weather", input_schema: city }];
const called = await client.messages.stream({ ...common, tools, tool_choice: { type: "any" } }).finalMessage();
assert.equal(called.stop_reason, "tool_use");
const use = called.content.find((block) => block.type === "tool_use");
assert.ok("city" in use.input);
const result = { type: "tool_result", tool_use_id: use.id, content: "sunny" };
const history = [...messages, { role: "assistant", content: called.content }, { role: "user", content: [result] }];
const second = await client.messages.create({ ...common, tools, messages: history });
assert.ok(second.usage.cache_read_input_tokens > 0);

const schema = { ...city, properties: { city: { enum: ["Lisbon", "Oslo"] } }, additionalProperties: false };
const bound = await client.messages.create({ ...common, output_config: { format: { type: "json_schema", schema } } });
assert.ok(["Lisbon", "Oslo"].includes(JSON.parse(bound.content[0].text).city));

assert.ok((await client.messages.countTokens({ model: "demo", messages })).input_tokens > 0);
for await (const model of client.models.list()) assert.equal(model.id, "demo");

const stream = client.messages.stream(common);
for await (const _ of stream) break;
stream.abort();
