"""Goes on from tokens: what `/api/generate` returned as `context`, with the next message behind it.

The tokens end with the model's reply, without what the template puts behind one. So the next message is rendered
behind a sample of a conversation, and the text behind the sample's reply is taken.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from cache.snapshots import RestorePoint, RestorePointKind
from models.prompt.chat_template import Message, RenderedPrompt
from server.api.context import ServedModel
from server.api.conversation import Conversation
from server.api.errors import ApiError, Code
from server.api.params import check_token_ids

_REPLY: Final = "zq-the-reply-before-qz"
_SAMPLE: Final[Sequence[Message]] = (
    {"role": "user", "content": [{"text": "a"}]},
    {"role": "assistant", "content": [{"text": _REPLY}]},
)


def follow_up(model: ServedModel, context: Sequence[int], asked: Conversation) -> RenderedPrompt:
    """Returns the prompt of the messages `asked` behind the tokens of `context`.

    Raises ApiError (400) for a number that is no token, and for a template that shows no earlier reply.
    """
    check_token_ids(context, model.vocab_size, "context")
    text = replace(asked, messages=[*_SAMPLE, *asked.messages]).render().text
    _, found, following = text.partition(_REPLY)
    if not found:
        message = "context: the model's chat template shows no earlier answers; send /api/chat the messages instead"
        raise ApiError(Code.UNSUPPORTED_PARAMETER, message, "context")
    tokens = np.array([*context, *model.renderer.tokenize(following)], dtype=np.int32)
    end = RestorePoint(len(tokens), RestorePointKind.PROMPT_END)
    return RenderedPrompt(tokens, (end,), model.token_texts.text(context) + following)
