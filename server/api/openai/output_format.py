"""What OpenAI's endpoints, and those of other servers in its manner, bind an answer to, under whichever name."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from models.output.grammar import Grammar, GrammarKind
from models.texts import read_object
from server.api.errors import ApiError, Code
from server.api.structured_output import ANY_OBJECT, AnswerGrammar, choice_grammar, json_grammar
from server.api.typed_body import BodyModel


def _schema(value: Any) -> Any:
    """Some clients send a schema as its JSON text, an empty one for none."""
    if value in (None, ""):
        return None
    schema = read_object(value) if isinstance(value, str) else value
    if isinstance(schema, dict):
        return schema
    raise PydanticCustomError("schema_type", "Input should be a JSON schema, an object")


def _grammar_text(value: Any) -> Any:
    """An empty text, as forms of clients send it, stands for none."""
    return None if value == "" else value


def _ollama_format(value: Any) -> Any:
    return dict(ANY_OBJECT) if value == "json" else _schema(value)


def _required_schema(value: Any) -> Any:
    if not isinstance(value, dict):
        raise PydanticCustomError("schema_type", "Input should be a JSON schema, an object")
    return value


Schema = Annotated[dict[str, Any] | None, BeforeValidator(_schema)]
GrammarText = Annotated[str | None, BeforeValidator(_grammar_text)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class SchemaFormat(BodyModel):
    """`json_schema` of a `response_format`."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", populate_by_name=True)

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], BeforeValidator(_required_schema), Field(alias="schema")]
    strict: bool | None = None
    """True: a keyword of the schema that is not known is an error; else it binds nothing."""


class ResponseFormat(BodyModel):
    """`response_format`."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None
    schema_: Annotated[Schema, Field(alias="schema")] = None
    """With `json_object`: what the object looks like, as llama.cpp has it."""


class StructuredOutputs(BodyModel):
    """`structured_outputs`, as vLLM has it."""

    json_: Annotated[Schema, Field(alias="json")] = None
    regex: GrammarText = None
    choice: Choices | None = None
    grammar: GrammarText = None
    json_object: bool | None = None
    structural_tag: None = None


class BoundBody(BodyModel):
    """The fields that bind an answer. At most one of them may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: Schema = None
    guided_json: Schema = None
    format: Annotated[dict[str, Any] | None, BeforeValidator(_ollama_format)] = None
    """"json" for any object, or a schema."""
    guided_regex: GrammarText = None
    regex: GrammarText = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText = None
    grammar: GrammarText = None
    ebnf: GrammarText = None

    def answer_grammar(self) -> AnswerGrammar | None:
        """Returns what the answer is bound to; raises ApiError where several fields say it."""
        wanted = [*self._of_response_format(), *self._of_structured_outputs(), *self._of_plain_fields()]
        if len(wanted) > 1:
            first, second = wanted[0].param, wanted[1].param
            message = f"{second}: an answer is bound by one field only, and {first} is given too"
            raise ApiError(Code.INVALID_VALUE, message, second)
        return wanted[0] if wanted else None

    def _of_response_format(self) -> Iterator[AnswerGrammar]:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return
        if wanted.type == "json_object":
            yield AnswerGrammar("response_format", json_grammar(wanted.schema_ or ANY_OBJECT))
        elif wanted.json_schema is None:
            message = "response_format.json_schema: Field required with this type"
            raise ApiError(Code.MISSING_PARAMETER, message, "response_format.json_schema")
        else:
            schema = json_grammar(wanted.json_schema.schema_, is_strict=wanted.json_schema.strict is True)
            yield AnswerGrammar("response_format.json_schema.schema", schema)

    def _of_structured_outputs(self) -> Iterator[AnswerGrammar]:
        wanted = self.structured_outputs or StructuredOutputs()
        schema = dict(ANY_OBJECT) if wanted.json_object else wanted.json_
        yield from _read("structured_outputs", schema, wanted.regex, wanted.choice, wanted.grammar)

    def _of_plain_fields(self) -> Iterator[AnswerGrammar]:
        for name in ("json_schema", "guided_json", "format"):
            yield from _read(name, schema=getattr(self, name))
        for name in ("guided_regex", "regex"):
            yield from _read(name, regex=getattr(self, name))
        yield from _read("guided_choice", choice=self.guided_choice)
        for name in ("guided_grammar", "grammar", "ebnf"):
            yield from _read(name, grammar=getattr(self, name))


def _read(
    param: str,
    schema: Mapping[str, Any] | None = None,
    regex: str | None = None,
    choice: list[str] | None = None,
    grammar: str | None = None,
) -> Iterator[AnswerGrammar]:
    """Yields a grammar for each way of binding that is given."""
    if schema is not None:
        yield AnswerGrammar(param, json_grammar(schema))
    if regex is not None:
        yield AnswerGrammar(param, Grammar(GrammarKind.REGEX, regex))
    if choice is not None:
        yield AnswerGrammar(param, choice_grammar(choice))
    if grammar is not None:
        yield AnswerGrammar(param, Grammar(GrammarKind.GBNF_OR_LARK, grammar))
