"""What to do about each cause, by its place."""

from collections.abc import Mapping

from models.texts import size_text
from server.engine.diagnosis import Cause

TOOLS = "tools"
"""Stands for a role where the place is the tools."""

_ADVICE: Mapping[Cause, str] = {
    Cause.CLOCK: "Put the date or time into a message of its own just before the newest one and leave it there, or "
    "round it to the day.",
    Cause.COUNTER: "Put figures that change with each turn just before the newest message, or leave them out.",
    Cause.NONCE: "Send ids in a header or in `metadata` instead, or keep one for the whole conversation.",
    Cause.EARLY: "Put what differs from one conversation to the next behind all that they share.",
    Cause.REORDERED: "Write tools, keys and lists in one fixed order, for example sorted by name.",
    Cause.REFORMATTED: "Send the text with the spaces and line breaks that it had before.",
    Cause.ENCODED: "Send the text as it was, without escaping or converting its characters anew.",
    Cause.EDITED: "Send earlier messages exactly as they were; where a person edited them, there is nothing to mend.",
    Cause.ROLE: "Send each message in the role that it first had.",
    Cause.TOOLS: "Offer the same tools in the whole conversation, and say in the newest message which ones count.",
    Cause.TRIMMED: "Drop old messages seldom and many at once, so that most turns only add to the one before.",
    Cause.SUMMARISED: "Sum up seldom and much at once, so that most turns only add to the one before.",
    Cause.COMPACTED: "There is nothing to mend: the whole history was summed up at once.",
    Cause.REMOVED: "Leave old messages where they are, or drop many at once and seldom.",
    Cause.MERGED: "Send each message by itself as it was first sent; do not join it with its neighbours later.",
    Cause.INSERTED: "Add new messages at the end, not between those that were sent before.",
    Cause.REPLY: "Send replies back exactly as the server gave them.",
    Cause.REPLY_LEFT_OUT: "Send each reply back as a message of the assistant before the next question.",
    Cause.THOUGHTS: "Send replies back with what was thought in them; the model's template leaves out what it must.",
    Cause.CALL_IDS: "Keep the ids of tool calls as the server gave them, in the call and in its result.",
    Cause.TEMPLATE_ARGUMENTS: "Keep `chat_template_kwargs`, `enable_thinking` and `reasoning_effort` the same for a "
    "whole conversation.",
    Cause.NAMESPACE: "Send the same key and `cache_salt` in the whole conversation: others share nothing with it.",
    Cause.MODEL: "Keep one model for a whole conversation: what one evaluated is of no use to another.",
    Cause.SIDE_REQUEST: "Give titles, summaries and other conversations no `session_id`, or one of their own.",
    Cause.BRANCHED: "There is nothing to mend: the last message was asked again in other words.",
    Cause.NOTE: "Leave what you add to the newest message where it was first sent, or put it behind that message: "
    "all behind it is evaluated again once it has moved.",
    Cause.TEMPLATE: "There is nothing to mend: the model's template shows finished turns in another way.",
    Cause.COLD: "There is nothing to mend: nothing like it was asked before.",
    Cause.EVICTED: "Give the server {more}memory with --cache-memory: this was known once and had to go.",
    Cause.CLEARED: "Do not clear the cache within a conversation: it was known until then.",
    Cause.UNLOADED: "Give the server more memory, or --cache-disk: what a model held went when it was unloaded, and "
    "fewer than 256 tokens are not read back.",
    Cause.RESTARTED: "Start the server with --cache-disk, which keeps conversations: it has not seen this one since "
    "its start.",
    Cause.NOT_RESTORABLE: "Put `cache_control` on the last message, or part of one, that is the same: "
    "requests can then resume there.",
    Cause.DECLINED: "Leave out `cache_prompt: false`: it keeps the server from reusing anything.",
    Cause.LOGPROBS: "There is nothing to mend: how likely each token of a prompt is must be computed.",
}
_BY_PLACE: Mapping[tuple[Cause, str], str] = {
    (Cause.CLOCK, TOOLS): "Take the date or time out of the tools' descriptions, into the newest message.",
    (Cause.CLOCK, "user"): "Write the date or time into a message once, and send it so ever after.",
    (Cause.CLOCK, "assistant"): "Do not stamp replies anew with each turn: send them back as they were given.",
    (Cause.CLOCK, "tool"): "Send a tool's result with the time that it first had.",
    (Cause.COUNTER, TOOLS): "Take figures that change out of the tools' descriptions, into the newest message.",
    (Cause.COUNTER, "user"): "Write a figure into a message once, and send it so ever after.",
    (Cause.NONCE, TOOLS): "Take ids out of the tools; send them in a header or in `metadata` instead.",
    (Cause.NONCE, "user"): "Send ids in a header or in `metadata`, or each message with the id that it first had.",
    (Cause.REFORMATTED, TOOLS): "Write the tools' descriptions and schemas in one fixed format.",
    (Cause.REFORMATTED, "assistant"): "Send replies back with all their spaces and line breaks, neither stripped nor "
    "wrapped.",
    (Cause.ENCODED, "assistant"): "Send replies back in the characters that they were given in, not escaped or "
    "converted.",
    (Cause.REORDERED, "assistant"): "Send the arguments of a tool call as the text that the server gave, not written "
    "anew.",
    (
        Cause.EDITED,
        "system",
    ): "Keep one system prompt for the whole conversation; say what is new in the newest message.",
    (Cause.EDITED, TOOLS): "Keep names, descriptions and schemas of the tools the same for a whole conversation.",
    (Cause.EDITED, "tool"): "Send a tool's result as it was first sent, neither shortened nor formatted anew.",
}


def advice(cause: Cause, place: str | None, missing_bytes: int | None = None) -> str:
    """What to change; `place` is the role of the message, or `TOOLS`."""
    more = "more " if missing_bytes is None else f"about {size_text(missing_bytes)} more "
    return _BY_PLACE.get((cause, place or ""), _ADVICE[cause]).replace("{more}", more)
