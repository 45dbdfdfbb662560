// One streamed answer, as a client of OpenAI's API gets it.

/** Streams the answer to `body` into `node`, calling `changed` after each piece. Throws what went wrong. */
export async function follow(api, body, node, signal, changed) {
  const begun = performance.now();
  const request = { ...body, stream: true, stream_options: { include_usage: true } };
  for await (const { data } of api.events("v1/chat/completions", { method: "POST", body: request, signal })) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message ?? "The answer failed.");
    if (take(node, chunk) && node.firstMs === undefined) node.firstMs = Math.round(performance.now() - begun);
    changed();
  }
}

/** Adds a chunk to a message; returns whether it held anything of the answer. */
function take(node, chunk) {
  const choice = chunk.choices?.[0];
  const delta = choice?.delta ?? {};
  if (chunk.usage) {
    const { prompt_tokens: prompt, completion_tokens: output, prompt_tokens_details: details } = chunk.usage;
    node.usage = { prompt, output, cached: details?.cached_tokens ?? 0 };
  }
  if (chunk.timings?.predicted_per_second) node.speed = chunk.timings.predicted_per_second;
  if (choice?.finish_reason) node.finish = choice.finish_reason;
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought) node.reasoning = (node.reasoning ?? "") + thought;
  if (delta.content) node.content += delta.content;
  for (const call of delta.tool_calls ?? []) {
    node.tool_calls ??= [];
    const known = (node.tool_calls[call.index ?? 0] ??= { id: "", name: "", arguments: "" });
    known.id = call.id ?? known.id;
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
  return Boolean(thought || delta.content || delta.tool_calls?.length);
}
