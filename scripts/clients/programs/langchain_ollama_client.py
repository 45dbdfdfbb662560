"""LangChain's `langchain-ollama`: a chat, a stream, thoughts, a tool over two turns, and structured output."""

import os
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from pydantic import BaseModel


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


class Weather(BaseModel):
    """A report of the weather."""

    city: Literal["Lisbon", "Oslo"]
    degrees: int


model = ChatOllama(base_url=os.environ["BASE_URL"], model="demo", temperature=0, num_predict=200)
assert model.invoke("My name is Anna.").text
assert "".join(chunk.text for chunk in model.stream("My name is Anna."))
thinking = ChatOllama(base_url=os.environ["BASE_URL"], model="demo", temperature=0, num_predict=200, reasoning=True)
assert thinking.invoke("My name is Anna.").additional_kwargs["reasoning_content"]

asked = HumanMessage("What is the weather in Oslo?")
with_tools = model.bind_tools([get_weather])
called = with_tools.invoke([asked])
[call] = called.tool_calls
assert call["name"] == "get_weather"
assert isinstance(call["args"]["city"], str)
result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
answer = with_tools.invoke([asked, called, result])
assert answer.text
assert answer.usage_metadata["input_tokens"] > called.usage_metadata["input_tokens"]

answer = model.with_structured_output(Weather, method="json_schema").invoke("What is the weather in Oslo?")
assert isinstance(answer, Weather)
