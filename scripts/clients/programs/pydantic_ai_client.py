"""pydantic-ai: an agent whose answer is a type, by a tool and by a schema, and one that calls a tool."""

import os
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Place(BaseModel):
    """A city."""

    city: Literal["Lisbon", "Oslo"]


provider = OpenAIProvider(base_url=f"{os.environ['BASE_URL']}/v1", api_key="none")
model = OpenAIChatModel("demo", provider=provider)
assert Agent(model).run_sync("My name is Anna.").output
for output in (ToolOutput(Place), NativeOutput(Place)):
    place = Agent(model, output_type=output).run_sync("What is the weather in Oslo?").output
    assert isinstance(place, Place), output

asked = []
agent = Agent(model)


@agent.tool_plain
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    asked.append(city)
    return f"sunny in {city}"


assert agent.run_sync("What is the weather in Oslo?").output
assert asked, "the tool was not called"
