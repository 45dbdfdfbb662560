"""A recorded chat completion, read as the server reads it."""

from collections.abc import Mapping, Sequence
from typing import Any

from models.errors import ModelError
from models.prompt.chat_template import ChatRenderer
from models.prompt.shapes import Message, ToolOrders, with_constant_headers
from server.api.bodies import parse_body, validated
from server.api.conversation import Conversation
from server.api.errors import ApiError, explain
from server.api.images import with_pictures
from server.api.openai.chat import IN_CHAT, ChatBody, ChatMessage, offered_tools, template_message
from server.diagnosis.account import EvaluatedTurn, Rendered
from server.diagnosis.prompt import part_of
from server.doctor.recorded import Reader, Recorded

PATH = "/v1/chat/completions"


class ModelReader(Reader):
    """Makes the tokens that a server of the model has.

    In idle time such a server evaluates replies as the template shows them.
    """

    characters_per_token = 1
    """A number of an array is a token."""

    def __init__(self, renderer: ChatRenderer, *, hygiene: bool = True) -> None:
        """`hygiene`: the server runs without `--no-prompt-hygiene`."""
        super().__init__()
        self._renderer = renderer
        self._orders = ToolOrders() if hygiene else None

    def read(self, request: Recorded) -> tuple[Rendered, EvaluatedTurn] | None:
        """As `Reader.read`; a refused request is noted in `refused`."""
        try:
            source = self._conversation(request.body, request.prompt.namespace)
            shown = source.render()
            said = template_message(validated(ChatMessage, request.reply)) if request.reply else None
            reply = [] if said is None else [source.whole(said)]
            answered, num_tokens = source.followed_by(reply).stable_prefix().tokens, len(shown.tokens)
        except (ApiError, ModelError) as error:
            self._refuse(request, explain(error, ""))
            return None
        parts = source.parts(request.prompt.model)
        reply_part = part_of(reply[0]) if reply else None
        turn = EvaluatedTurn(parts, reply_part, tokens=answered, num_prompt_tokens=num_tokens)
        return Rendered(parts, shown.tokens, shown.outline), turn

    def _conversation(self, fields: Mapping[str, Any], namespace: str) -> Conversation:
        body = parse_body(ChatBody, fields, IN_CHAT)
        messages: Sequence[Message] = list(map(template_message, body.messages))
        tools = offered_tools(fields)
        if not self._renderer.shows_pictures:
            messages = with_pictures(messages, None)
        if self._orders is not None:
            messages, tools = with_constant_headers(messages), self._orders.settle(namespace, tools)
        arguments = {**(body.chat_template_kwargs or {}), **body.thinking_wish().template_arguments()}
        return Conversation(self._renderer, messages, tools, arguments, namespace, continues=body.continues())

    def _refuse(self, request: Recorded, error: ApiError) -> None:
        told = {"path": PATH, "session_id": request.session_id, "status": error.status, "code": error.code.value}
        same = next((one for one in self.refused if one["message"] == error.message), None)
        if same is None:
            self.refused.append({**told, "message": error.message, "count": 1})
        else:
            same["count"] += 1
