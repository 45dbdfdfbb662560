"""openai-agents, by Chat Completions and by Responses, its default: a forced tool, and a typed answer."""

import asyncio
import os
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel


class Place(BaseModel):
    """A city."""

    city: Literal["Lisbon", "Oslo"]


asked = []


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    asked.append(city)
    return f"sunny in {city}"


async def main() -> None:
    """Runs all four."""
    set_tracing_disabled(True)
    openai = AsyncOpenAI(base_url=f"{os.environ['BASE_URL']}/v1", api_key="none")
    settings = ModelSettings(tool_choice="required", max_tokens=200)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model="demo", openai_client=openai)
        asked.clear()
        caller = Agent(name="caller", model=model, tools=[get_weather], model_settings=settings)
        assert (await Runner.run(caller, "What is the weather in Oslo?")).final_output, kind
        assert asked, kind
        typed = Agent(name="typed", model=model, output_type=Place, model_settings=ModelSettings(max_tokens=200))
        assert isinstance((await Runner.run(typed, "What is the weather in Oslo?")).final_output, Place), kind


asyncio.run(main())
