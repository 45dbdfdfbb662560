"""The part of a conversation's prompt that its next prompt will begin with, and evaluating it ahead of time.

Many templates show a finished turn differently from the prompt that asked for it: they drop what the model thought,
or write a tool call in another form. Clients drop thoughts too. `next_turn_requests` makes the requests that evaluate
the differences while the engine is idle, so that the next turn evaluates its new message only.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from cache.snapshots import RestorePointKind
from cache.types import common_prefix_length
from models.prompt.chat_template import Message, RenderedPrompt
from server.engine.request import GenerationRequest, Priority

MIN_TOKENS_AHEAD = 16
"""With fewer tokens to evaluate ahead, the next turn evaluates them itself."""

_THOUGHT = "reasoning_content"
_ROLES_ANSWERED = ("user", "tool")
"""Roles after whose message the assistant speaks."""
_NEXT_MESSAGE: Message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
_BEFORE_USER = (RestorePointKind.USER_START, RestorePointKind.SYSTEM_END)

Render: TypeAlias = Callable[[Sequence[Message]], RenderedPrompt]


def stable_prefix(render: Render, messages: Sequence[Message]) -> RenderedPrompt:
    """Returns the part of a conversation's prompt that stays the same whatever follows its last message."""
    if messages[-1]["role"] in _ROLES_ANSWERED:
        return cut_at_last_point(render(messages), (RestorePointKind.PROMPT_END,))
    # The restore point before a user's message is where prompts with different messages of the user begin to differ.
    prefix = cut_at_last_point(render([*messages, _NEXT_MESSAGE]), _BEFORE_USER)
    outline = prefix.outline
    own = slice(0, len(messages))
    return replace(prefix, outline=replace(outline, starts=outline.starts[own], roles=outline.roles[own]))


def cut_at_last_point(prompt: RenderedPrompt, kinds: tuple[RestorePointKind, ...]) -> RenderedPrompt:
    """Returns a prompt up to its last restore point of these kinds; all of it if there is none."""
    stop = max((point.offset for point in prompt.restore_points if point.kind in kinds), default=len(prompt.tokens))
    return replace(
        prompt,
        tokens=prompt.tokens[:stop],
        restore_points=tuple(point for point in prompt.restore_points if point.offset <= stop),
    )


def sent_back(reply: Sequence[Message]) -> list[Sequence[Message]]:
    """Returns a reply as clients send it back: as it was given, and without what was thought."""
    without = [{name: value for name, value in message.items() if name != _THOUGHT} for message in reply]
    return [reply] if without == list(reply) else [reply, without]


def next_turn_requests(
    request: GenerationRequest, reply_ids: Sequence[int], prefixes: Sequence[RenderedPrompt]
) -> list[GenerationRequest]:
    """Returns the requests that evaluate what `prefixes` show otherwise than `request` and its reply, each once."""
    made = [next_turn_request(request, reply_ids, prefix) for prefix in prefixes]
    distinct = {one.tokens.tobytes(): one for one in made if one is not None}
    return list(distinct.values())


def next_turn_request(
    request: GenerationRequest, reply_ids: Sequence[int], prefix: RenderedPrompt
) -> GenerationRequest | None:
    """Returns the request that evaluates `prefix` after `request` was answered with `reply_ids`.

    None where the next turn has nothing to evaluate again, or fewer than `MIN_TOKENS_AHEAD` tokens.
    """
    evaluated = np.concatenate([request.tokens, np.array(reply_ids, np.int32)])
    num_common = common_prefix_length(evaluated, prefix.tokens)
    if num_common == len(evaluated) or len(prefix.tokens) - num_common < MIN_TOKENS_AHEAD:
        return None
    return replace(
        request,
        request_id=f"{request.request_id}-next",
        tokens=prefix.tokens,
        max_tokens=0,
        stop=(),
        priority=Priority.BACKGROUND,
        restore_points=prefix.restore_points,
        outline=prefix.outline,
        is_idle_work=True,
    )
