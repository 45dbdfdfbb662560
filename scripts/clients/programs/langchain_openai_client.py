"""LangChain's `langchain-openai`: a chat, a stream, a tool that must be called, and structured output."""

import os
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


class Weather(BaseModel):
    """A report of the weather."""

    city: Literal["Lisbon", "Oslo"]
    degrees: int


model = ChatOpenAI(base_url=f"{os.environ['BASE_URL']}/v1", api_key="none", model="demo", max_tokens=200)
assert model.invoke("My name is Anna.").text
assert "".join(chunk.text for chunk in model.stream("My name is Anna."))
call = model.bind_tools([get_weather], tool_choice="any").invoke("What is the weather in Oslo?").tool_calls[0]
assert call["name"] == "get_weather"
assert isinstance(call["args"]["city"], str)
for method in ("json_schema", "function_calling"):
    answer = model.with_structured_output(Weather, method=method).invoke("What is the weather in Oslo?")
    assert isinstance(answer, Weather), method
