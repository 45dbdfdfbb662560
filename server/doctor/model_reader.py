"""A recorded chat completion, read as the server reads it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from models.errors import ModelError
from models.prompt.chat_template import ChatRenderer
from models.prompt.shapes import Message
from server.api.bodies import parse_body, validated
from server.api.conversation import Conversation
from server.api.errors import ApiError, explain
from server.api.healing import healing_of
from server.api.images import ImageOpener, with_pictures
from server.api.openai.chat import IN_CHAT, ChatBody, ChatMessage, offered_tools, template_message
from server.app.config import ServerConfig
from server.diagnosis.account import EvaluatedTurn, Rendered
from server.diagnosis.prompt import Prompt, part_of
from server.doctor.recorded import Reader, Recorded

PATH = "/v1/chat/completions"


class _Named(NamedTuple):
    """A model by the name that a request has."""

    id: str
    can_forbid_calls: bool = True


class ModelReader(Reader):
    """Makes the tokens that a server of the model has.

    In idle time such a server evaluates replies as the template shows them.
    """

    characters_per_token = 1
    """A number of an array is a token."""

    def __init__(
        self, renderer: ChatRenderer, images: ImageOpener | None = None, config: ServerConfig | None = None
    ) -> None:
        """`images`: of a model that sees; `config`: what the server is started with."""
        super().__init__()
        self._renderer, self._images = renderer, images
        self._healing = healing_of(config or ServerConfig())

    def read(self, request: Recorded) -> tuple[Rendered, EvaluatedTurn] | None:
        """As `Reader.read`; a refused request is noted in `refused`."""
        try:
            source = self._conversation(request.body, request.prompt)
            shown = source.render()
            said = template_message(validated(ChatMessage, request.reply)) if request.reply else None
            reply = [] if said is None else [source.whole(said)]
            answered, num_tokens = source.followed_by(reply).stable_prefix().tokens, len(shown.tokens)
        except (ApiError, ModelError) as error:
            self._refuse(request, explain(error, ""))
            return None
        if self._healing is not None:
            of = source.namespace, request.session_id
            self._healing.calls.remember(*of, reply, source.declared_tools, is_kept=False)
        parts = source.parts(request.prompt.model)
        reply_part = part_of(reply[0]) if reply else None
        turn = EvaluatedTurn(parts, reply_part, tokens=answered, num_prompt_tokens=num_tokens)
        return Rendered(parts, shown.tokens, shown.outline, source.heals), turn

    def _conversation(self, fields: Mapping[str, Any], prompt: Prompt) -> Conversation:
        body = parse_body(ChatBody, fields, IN_CHAT)
        messages: Sequence[Message] = with_pictures(list(map(template_message, body.messages)), self._images)
        arguments = {**(body.chat_template_kwargs or {}), **body.thinking_wish().template_arguments()}
        shown = (messages, offered_tools(fields), arguments, prompt.namespace)
        asked = Conversation(self._renderer, *shown, continues=body.continues())
        return asked if self._healing is None else self._healing.healed(asked, _Named(prompt.model))

    def _refuse(self, request: Recorded, error: ApiError) -> None:
        refusal = {"path": PATH, "session_id": request.session_id, "status": error.status, "code": error.code.value}
        same = next((one for one in self.refused if one["message"] == error.message), None)
        if same is None:
            self.refused.append({**refusal, "message": error.message, "count": 1})
        else:
            same["count"] += 1
