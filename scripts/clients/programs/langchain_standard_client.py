"""LangChain's standard tests of chat models: its packages for three APIs, each with all that the server has."""

import os
from typing import ClassVar

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL, MODEL = os.environ["BASE_URL"], os.environ["MODEL"]


class TestOpenAi(ChatModelIntegrationTests):
    """ChatOpenAI, by Chat Completions."""

    chat_model_class = ChatOpenAI
    chat_model_params: ClassVar = {"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL, "stream_usage": True}
    supports_json_mode = True
    model_override_value = MODEL


class TestAnthropic(ChatModelIntegrationTests):
    """ChatAnthropic, by Messages."""

    chat_model_class = ChatAnthropic
    chat_model_params: ClassVar = {"base_url": URL, "api_key": "none", "model": MODEL, "max_tokens": 200}
    model_override_value = MODEL


class TestOllama(ChatModelIntegrationTests):
    """ChatOllama, by Ollama's API."""

    chat_model_class = ChatOllama
    chat_model_params: ClassVar = {"base_url": URL, "model": MODEL}
    supports_json_mode = True
    has_tool_choice = False
    """Ollama's API has no `tool_choice`."""
    model_override_value = MODEL


if __name__ == "__main__":
    options = ["-q", "--tb=short", "-c", os.devnull, "-p", "no:cacheprovider", "--asyncio-mode=auto"]
    # The clients keep connections, which belong to one event loop.
    options += ["-o", "asyncio_default_fixture_loop_scope=session", "-o", "asyncio_default_test_loop_scope=session"]
    raise SystemExit(pytest.main([__file__, *options]))
