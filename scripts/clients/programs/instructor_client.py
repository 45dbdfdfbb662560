"""instructor: a typed answer by a tool, by JSON and by a JSON schema."""

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Place(BaseModel):
    """A city."""

    city: Literal["Lisbon", "Oslo"]


openai = OpenAI(base_url=f"{os.environ['BASE_URL']}/v1", api_key="none")
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai, mode=mode)
    place = client.chat.completions.create(
        model="demo",
        response_model=Place,
        max_retries=0,
        max_tokens=200,
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
    )
    assert isinstance(place, Place), mode
