"""`POST /v1/systemone`, TypeSafe's, and `POST /v1/decisions`, OpenAI's: two forms of one exchange.

One request asks several questions about one state. The state is evaluated once and stays in the cache; the questions
are rows beside each other, and no text is generated.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from models.errors import InvalidParameter
from models.prompt.shapes import Message
from server.api.answer import Answer, Exchange, Question
from server.api.bodies import BodyModel, Rules, media_of, parse_body, part_text, refused
from server.api.call import generate
from server.api.decisions.prompts import Prompts, scoring
from server.api.decisions.questions import NO, YES, Asked, Content, Judged, QuestionKind, judged, text_of
from server.api.dialect import ApiContext, Dialect, Endpoint, Operation, with_and_without_v1
from server.api.errors import ApiError, Code, path_of, wrong
from server.api.generation import CacheSalt
from server.api.images import MAX_NEW_IMAGES, MediaPlace, image_part
from server.api.params import GenerationParams, Incoming
from server.api.wire import Payload, json_text
from server.engine.request import Finished, Priority

MAX_QUESTIONS = 64
_ANSWERS = dict[Literal["model", "answers", "usage"], Any]
_IN_BOTH: Rules = refused("""
    nothing is generated: stream=false tools=[] n=1
    the state is evaluated once for all questions, and kept: cache_prompt=true
""")


class _DecisionBody(BodyModel):
    model: str | None = None
    cache_salt: CacheSalt | None = None
    priority: Literal["interactive", "background"] | None = None
    store: bool | None = None


Write: TypeAlias = Callable[[str, Finished, list[Judged]], Payload]
"""Writes the answers of a model, by its id."""


class DecisionExchange(Exchange):
    """Writes the answers to all questions."""

    def __init__(self, question: Question, asked: Sequence[Asked], write: Write) -> None:
        super().__init__(question)
        self._asked, self._write = asked, write

    async def body(self, answer: Answer) -> Payload:
        """The answer's body."""
        _, finished = await answer.read()
        return self._write(self.model.id, finished, list(map(judged, self._asked, finished.option_logprobs)))


def _exchange(
    incoming: Incoming, body: _DecisionBody, asked: Sequence[Asked], prompts: Prompts, write: Write
) -> DecisionExchange:
    if not 1 <= len(asked) <= MAX_QUESTIONS:
        raise wrong("questions", f"there are {len(asked)} questions; from 1 to {MAX_QUESTIONS} are taken")
    if not any("image" in part or part["text"].strip() for part in prompts.state):
        raise wrong(prompts.param, "it is empty", Code.EMPTY_PROMPT)
    priority = Priority.BACKGROUND if body.priority == "background" else Priority.INTERACTIVE
    params = GenerationParams(priority=priority, is_volatile=body.store is False, prompt_param=prompts.param)
    return DecisionExchange(scoring(incoming, prompts, asked, params), asked, write)


def _text(text: str) -> Message:
    return {"type": "text", "text": text}


# ---------------------------------------------------------------------------------------------------- System One


class _SystemOneQuestion(BodyModel):
    instructions: Content | None = None


class NoulBody(_SystemOneQuestion):
    """A question with yes or no for an answer."""

    type: Literal["noul"]
    criteria: dict[Literal["true", "false"], Content | None] | str | None = None
    """What counts as yes, and as no."""

    def asked(self, name: str) -> Asked:
        """The question in no API's words."""
        known = self.criteria if isinstance(self.criteria, dict) else {"true": self.criteria}
        criteria = {YES: text_of(known.get("true")), NO: text_of(known.get("false"))}
        return Asked(name, QuestionKind.NOUL, text_of(self.instructions), criteria)


class ChoiceBody(_SystemOneQuestion):
    """A question with one of some labels for an answer."""

    type: Literal["choice"]
    criteria: dict[str, Content | None]
    """Labels, and when each applies."""

    def asked(self, name: str) -> Asked:
        """The question in no API's words."""
        criteria = {label: text_of(one) for label, one in self.criteria.items()}
        return Asked(name, QuestionKind.CHOICE, text_of(self.instructions), criteria)


class ScoreBody(_SystemOneQuestion):
    """A question with one of some ordered levels for an answer."""

    type: Literal["score"]
    criteria: list[Content]
    """The levels, the lowest first."""

    def asked(self, name: str) -> Asked:
        """The question in no API's words."""
        criteria = {str(level): text_of(one) for level, one in enumerate(self.criteria)}
        return Asked(name, QuestionKind.SCORE, text_of(self.instructions), criteria)


class AssetBody(BodyModel):
    """An image, shown where its name stands in the state."""

    data_base64: str


class SystemOneBody(_DecisionBody):
    """Body of `POST /v1/systemone`."""

    state: Content
    instructions: str | None = None
    """Said before the state, as the system's message."""
    questions: dict[str, Annotated[NoulBody | ChoiceBody | ScoreBody, Field(discriminator="type")]]
    assets: dict[Annotated[str, Field(min_length=1)], AssetBody] | None = Field(None, max_length=MAX_NEW_IMAGES)


@generate("s1-", may_stream=False)
def answer_questions(context: ApiContext, incoming: Incoming) -> Exchange:
    """Answers typed questions about a state with probabilities."""
    body = parse_body(SystemOneBody, incoming.fields, _IN_BOTH)
    asked = [one.asked(path_of("questions", name)) for name, one in body.questions.items()]
    state = _state_parts(text_of(body.state), body.assets or {})

    def write(model_id: str, finished: Finished, answers: list[Judged]) -> Payload:
        named = dict(zip(body.questions, map(_system_one_answer, answers, body.questions.values()), strict=True))
        num_cached = finished.timings.cache_tokens
        usage = {"input_tokens": finished.prompt_tokens, "output_tokens": 0, "cached_tokens": num_cached}
        return {"model": model_id, "answers": named, "usage": usage}

    model, system = context.pool.find(body.model), body.instructions or ""
    return _exchange(
        incoming, body, asked, Prompts(model, state, "state", incoming.namespace(body.cache_salt), system), write
    )


def _state_parts(state: str, assets: Mapping[str, AssetBody]) -> list[Message]:
    """The state's text, with images in place of their names; first and last are texts."""
    if not assets:
        return [_text(state)]
    names = "|".join(map(re.escape, sorted(assets, key=len, reverse=True)))
    pieces = re.split(f"({names})", state)
    if unnamed := assets.keys() - set(pieces[1::2]):
        raise wrong(path_of("assets", min(unnamed)), "the state does not name it")

    def image(name: str) -> Message:
        return image_part({"image": assets[name].data_base64}, MediaPlace("assets", name, None, "data_base64"))

    return [image(piece) if place % 2 else _text(piece) for place, piece in enumerate(pieces)]


def _system_one_answer(answer: Judged, body: NoulBody | ChoiceBody | ScoreBody) -> Payload:
    named = dict(zip(answer.asked.criteria, answer.probabilities, strict=True))
    if isinstance(body, NoulBody):
        return {"type": body.type, "noul": named[YES]}
    shown: dict[str, Any] = {"type": body.type, "probabilities": named, "confidence": answer.confidence}
    if isinstance(body, ScoreBody):
        return {**shown, "score": answer.expected, "legend": dict(zip(named, body.criteria, strict=True))}
    return {**shown, "choice": [*named][answer.best]}


_STEP = re.compile(r'\[("(?:[^"\\]|\\.)*")\]|\[(\d+)\]|([^.\[\]]+)')
"""A step of a path: quoted, a number, or a word."""


class SystemOne(Dialect):
    """TypeSafe's conventions, which are FastAPI's."""

    error_type = dict[Literal["detail"], str | list[dict[Literal["loc", "msg", "type"], Any]]]
    own_paths = ("/v1/systemone", "/systemone")

    def answer_headers(self, request_id: str) -> Mapping[str, str]:
        """Headers for every answer."""
        return {"x-typesafe-request-id": request_id}

    def error_body(self, error: ApiError) -> Payload:
        """An error's JSON object: a list of problems for a body that is wrong."""
        if error.status != 400:
            return {"detail": error.message}
        loc: list[int | str] = ["body"]
        for quoted, number, word in _STEP.findall(error.param or ""):
            loc.append(json.loads(quoted) if quoted else int(number) if number else word)
        msg = error.message.removeprefix(f"{error.param}: ")
        return {"detail": [{"loc": loc, "msg": msg, "type": error.code.value}]}

    def error_status(self, error: ApiError) -> int:
        """The HTTP status of an error."""
        return 422 if error.status == 400 else error.status


_ASKED = Endpoint("/systemone", answer_questions, Operation(SystemOneBody, _ANSWERS))
SYSTEM_ONE = SystemOne(with_and_without_v1([_ASKED]))

# -------------------------------------------------------------------------------------------------------- OpenAI's


def _in_words(part: Any) -> str | None:
    if isinstance(part, dict) and part.get("type") == "input_json" and isinstance(part.get("data"), dict | list):
        return text_of(part["data"])
    return part_text(part)


def _joined(value: Any) -> str:
    """The text of instructions, which may be parts; raises PydanticCustomError."""
    texts = [value] if isinstance(value, str) else list(map(_in_words, value)) if isinstance(value, list) else [None]
    if None in texts:
        raise PydanticCustomError("instructions_type", "Input should be a text or a list of texts and JSON")
    return "\n".join(filter(None, texts))


class _DecisionQuestion(BodyModel):
    name: str | None = None
    instructions: Annotated[str, BeforeValidator(_joined, json_schema_input_type=str | list[dict[str, Any]])]


class PredicateQuestion(_DecisionQuestion):
    """Whether a statement is true."""

    type: Literal["predicate"]

    def asked(self, name: str) -> Asked:
        """The question in no API's words."""
        return Asked(name, QuestionKind.NOUL, self.instructions, {YES: "", NO: ""})


class DecisionChoice(BodyModel):
    """An option, and when it applies."""

    value: str | bool
    description: str | None = None


class ChoiceQuestion(_DecisionQuestion):
    """Which option fits."""

    type: Literal["choice"]
    choices: list[DecisionChoice]

    def asked(self, name: str) -> Asked:
        """The question in no API's words."""
        labels = [one.value if isinstance(one.value, str) else json_text(one.value) for one in self.choices]
        if len(set(labels)) < len(labels):
            raise InvalidParameter(f"{name}.choices", f"{name}.choices: two options are the same text for the model")
        criteria = {label: one.description or "" for label, one in zip(labels, self.choices, strict=True)}
        return Asked(name, QuestionKind.CHOICE, self.instructions, criteria)


class DecisionLevel(BodyModel):
    """A level of a scale."""

    label: str
    description: str | None = None


class ScoreQuestion(_DecisionQuestion):
    """Which of some ordered levels fits."""

    type: Literal["score"]
    levels: list[DecisionLevel]

    def asked(self, name: str) -> Asked:
        """The question in no API's words."""
        texts = (": ".join(filter(None, [one.label, one.description])) for one in self.levels)
        return Asked(
            name, QuestionKind.SCORE, self.instructions, {str(level): one for level, one in enumerate(texts)}
        )


class DecisionsBody(_DecisionBody):
    """Body of `POST /v1/decisions`."""

    input: str | list[dict[str, Any]]
    questions: list[Annotated[PredicateQuestion | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")]]


@generate("dec-", may_stream=False)
def decide(context: ApiContext, incoming: Incoming) -> Exchange:
    """Answers typed questions about an input with probabilities."""
    body = parse_body(DecisionsBody, incoming.fields, _IN_BOTH)
    asked = [one.asked(f"questions[{place}]") for place, one in enumerate(body.questions)]

    def write(model_id: str, finished: Finished, answers: list[Judged]) -> Payload:
        answered = list(map(_decision_answer, answers, body.questions))
        return {"model": model_id, "answers": answered, "usage": _usage(finished)}

    prompts = Prompts(
        context.pool.find(body.model), _input_parts(body.input), "input", incoming.namespace(body.cache_salt)
    )
    return _exchange(incoming, body, asked, prompts, write)


def _usage(finished: Finished) -> Payload:
    count, timings = finished.prompt_tokens, finished.timings
    of_input = {"cached_tokens": timings.cache_tokens, "cache_write_tokens": timings.evaluated_tokens}
    usage = {"input_tokens": count, "input_tokens_details": of_input, "output_tokens": 0, "total_tokens": count}
    return {**usage, "output_tokens_details": {"reasoning_tokens": 0}}


def _input_parts(given: str | list[dict[str, Any]]) -> list[Message]:
    """The input's texts and images, the last a text; of several items, each after its role or type."""
    if isinstance(given, str):
        return [_text(given)]
    parts = list[Message]()
    for index, item in enumerate(given):
        field = next((name for name in ("content", "output") if name in item), "")
        content = item[field] if field else text_of(item)
        shown = list(enumerate(content)) if isinstance(content, list) else [(None, content)]
        parts += [_text(f"{item.get('role') or item.get('type')}:")] if len(given) > 1 else []
        parts += [_input_part(part, MediaPlace("input", index, number, field)) for number, part in shown]
    return parts if parts and "image" not in parts[-1] else [*parts, _text("")]


def _input_part(part: Any, place: MediaPlace) -> Message:
    if media_of(part) == "image":
        return image_part(part, place)
    words = part if place.number is None and isinstance(part, str) else _in_words(part)
    if words is None:
        raise wrong(path_of(*place.steps), "it is no text, JSON or image")
    return _text(words)


def _decision_answer(answer: Judged, body: PredicateQuestion | ChoiceQuestion | ScoreQuestion) -> Payload:
    told: dict[str, Any] = {"type": body.type, "name": body.name}
    chances = answer.probabilities
    if isinstance(body, PredicateQuestion):
        return {**told, "probability": chances[[*answer.asked.criteria].index(YES)]}
    if isinstance(body, ChoiceQuestion):
        told["choice"] = body.choices[answer.best].value
        values: list[dict[str, Any]] = [{"value": one.value} for one in body.choices]
    else:
        told["score"] = answer.expected
        values = [{"value": level, "label": one.label} for level, one in enumerate(body.levels)]
    options = [{**one, "probability": chance} for one, chance in zip(values, chances, strict=True)]
    return {**told, "probabilities": options, "confidence": answer.confidence}


DECISIONS = Dialect(with_and_without_v1([Endpoint("/decisions", decide, Operation(DecisionsBody, _ANSWERS))]))
