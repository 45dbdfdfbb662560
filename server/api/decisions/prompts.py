"""The prompts of questions about one state: the model's own template, the state first, the question last.

All prompts of a request begin with the same tokens, up to the end of the state. The template is applied once for all
questions, or once for each question where the template changes the question's text, or where the tokenizer makes one
token of the end of the state and the beginning of the question.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cache.types import common_prefix_length
from models.prompt.chat_template import RenderedPrompt
from models.prompt.shapes import Message
from server.api.answer import Question
from server.api.conversation import Conversation, ThinkingWish, can_continue
from server.api.decisions.questions import Asked
from server.api.errors import ContextExceeded, wrong
from server.api.params import GenerationParams, Incoming, Limit, question_of
from server.engine.request import ScoredQuestion, TokenArray
from server.pool.served import ServedModel

MAX_OPTION_TOKENS = 128
MAX_ALL_TOKENS = 100_000
"""Most tokens of all options of a request."""
_SEAM = "\n\n"
"""Before each question."""


@dataclass(frozen=True, eq=False)
class Prompts:
    """Renders the questions about one state for one model."""

    model: ServedModel
    state: Sequence[Message]
    """The parts of the user's message before the question."""
    param: str
    """The state's field, for errors."""
    namespace: str
    system: str = ""

    def rendered(self, asked: Asked) -> RenderedPrompt:
        """The prompt of one question; raises ApiError and the renderer's errors."""
        *parts, last = self.state
        user = {"role": "user", "content": [*parts, {**last, "text": f"{last['text']}{_SEAM}{asked.text}"}]}
        system = [{"role": "system", "content": [{"type": "text", "text": self.system}]}] if self.system else []
        arguments = ThinkingWish(is_enabled=False).template_arguments()
        conversation = Conversation(self.model.renderer, [*system, user], (), arguments, self.namespace)
        prompt = conversation.prepared_for(self.model).render()
        thinking = self.model.thinking(prompt.text)
        if not can_continue(self.model) or (thinking is not None and thinking.is_open):
            why = f"{self.model.id} thinks before each answer, and its template does not close the thought"
            raise wrong("model", f"{why}: options cannot be scored in place of its answer")
        return prompt

    def all_tokens(self, asked: Sequence[Asked]) -> tuple[RenderedPrompt, list[TokenArray]]:
        """The prompt up to the end of the state, and the tokens of all prompts."""
        first = self.rendered(asked[0])
        tail = self._tail(first, asked[0])
        if tail is not None:
            num_shared = len(first.tokens) - len(self._tokens_of(asked[0], tail))
            head = first.tokens[:num_shared]
            tokens = [np.append(head, np.array(self._tokens_of(one, tail), np.int32)) for one in asked]
        else:
            tokens = [first.tokens, *(self.rendered(one).tokens for one in asked[1:])]
            other = self.rendered(replace(asked[0], instructions="a"))
            num_shared = min(common_prefix_length(first.tokens, one) for one in [other.tokens, *tokens[1:]])
        return replace(first, tokens=first.tokens[:num_shared], restore_points=(), text=""), tokens

    def _tail(self, prompt: RenderedPrompt, asked: Asked) -> str | None:
        """The text after the question, if the prompt's tokens end with those of question and this text."""
        head, found, tail = prompt.text.rpartition(_SEAM + asked.text)
        own = self._tokens_of(asked, tail)
        is_apart = bool(head and found) and prompt.tokens[len(prompt.tokens) - len(own) :].tolist() == own
        return tail if is_apart else None

    def _tokens_of(self, asked: Asked, tail: str) -> list[int]:
        """The tokens of a question and what follows it, as they are after the seam's last line."""
        tokenize = self.model.renderer.tokenize
        seam, whole = tokenize(_SEAM), tokenize(_SEAM + asked.text + tail)
        return whole[len(seam) :] if whole[: len(seam)] == seam else whole


def options_of(model: ServedModel, asked: Sequence[Asked]) -> list[tuple[tuple[int, ...], ...]]:
    """The tokens of each question's options; raises InvalidParameter."""
    known, total = dict[str, tuple[int, ...]](), 0
    options = list[tuple[tuple[int, ...], ...]]()
    for one in asked:
        for option in one.criteria:
            if option not in known:
                known[option] = tuple(model.renderer.tokenize(option, parse_special=False))
            total += len(known[option])
            if not 1 <= len(known[option]) <= MAX_OPTION_TOKENS:
                raise one.wrong(f"the option {option[:40]!r} has not from 1 to {MAX_OPTION_TOKENS} tokens")
        tokens = tuple(known[option] for option in one.criteria)
        if len(set(tokens)) < len(tokens):
            raise one.wrong("two options are the same text for the model")
        options.append(tokens)
    if total > MAX_ALL_TOKENS:
        raise asked[-1].wrong(f"all options of a request may have {MAX_ALL_TOKENS} tokens, and have {total}")
    return options


def scoring(incoming: Incoming, prompts: Prompts, asked: Sequence[Asked], params: GenerationParams) -> Question:
    """The engine's request for the options of all questions; raises ApiError and InvalidParameter."""
    model = prompts.model
    head, tokens = prompts.all_tokens(asked)
    options = options_of(model, asked)
    for one, prompt, texts in zip(asked, tokens, options, strict=True):
        if (longest := len(prompt) + max(map(len, texts))) > model.context_tokens:
            field = prompts.param if len(head.tokens) >= model.context_tokens else one.name
            raise ContextExceeded(longest, model.context_tokens - 1, field)
    params = replace(params, limit=Limit(0), speculates=False)
    question = question_of(incoming, model, head, params, prompts.namespace)
    questions = tuple(map(ScoredQuestion, tokens, options))
    return replace(question, request=replace(question.request, questions=questions, session_id=None))
