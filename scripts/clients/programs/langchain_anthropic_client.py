"""LangChain's Anthropic chat model: a text, a stream, a tool that must be called, and an object of a schema."""

import os
from typing import Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from pydantic import BaseModel

QUESTION = "What is the weather in Oslo?"


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


class Place(BaseModel):
    """A city."""

    city: Literal["Lisbon", "Oslo"]


model = ChatAnthropic(
    model_name="demo",
    base_url=os.environ["BASE_URL"],
    api_key="none",
    max_tokens_to_sample=200,
    timeout=None,
    stop=None,
)
answer = model.invoke(QUESTION)
assert answer.text and answer.usage_metadata is not None
assert "".join(chunk.text for chunk in model.stream(QUESTION))

called = model.bind_tools([get_weather], tool_choice="any").invoke(QUESTION)
assert [call["name"] for call in called.tool_calls][:1] == ["get_weather"]

place = model.with_structured_output(Place).invoke(QUESTION)
assert isinstance(place, Place)
