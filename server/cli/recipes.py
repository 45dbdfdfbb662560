"""How coding agents are pointed at a server, and what it saved. Pure.

Nothing is written into an agent's own configuration.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from models.texts import grouped
from server.app.log_events import percent_text, seconds_text

NO_KEY = "none"
"""For agents that require a key, if the server requires none."""
CODEX_KEY = "MLX_LAUNCH_KEY"
"""Codex takes the key from this variable."""
COMPACT_FROM_TOKENS = 100_000
"""With less context Claude Code ignores `CLAUDE_CODE_AUTO_COMPACT_WINDOW`."""
LONGEST_ANSWER_TOKENS = 32_000

Variables = Mapping[str, str | None]
"""None removes the shell's variable."""


@dataclass(frozen=True)
class Served:
    """A model as a server names it."""

    url: str
    model: str
    context_tokens: int = 0
    """0 if unknown."""
    key: str = ""
    """Empty where the server needs none."""


@dataclass(frozen=True)
class Recipe:
    """One agent."""

    title: str
    program: str
    advice: str
    variables: Callable[[Served], Variables]
    arguments: Callable[[Served], Sequence[str]] = lambda target: ()


def _claude_variables(target: Served) -> Variables:
    sizes = {f"ANTHROPIC_DEFAULT_{size}_MODEL": target.model for size in ("HAIKU", "SONNET", "OPUS")}
    window = target.context_tokens if target.context_tokens >= COMPACT_FROM_TOKENS else 0
    return {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key or NO_KEY,
        # A key of Anthropic's is not for this server.
        "ANTHROPIC_API_KEY": None,
        "ANTHROPIC_MODEL": target.model,
        **sizes,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **({"CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(window)} if window else {}),
    }


def _codex_arguments(target: Served) -> Sequence[str]:
    provider = {"name": "mlx-serve", "base_url": f"{target.url}/v1", "wire_api": "responses"}
    if target.key:
        provider["env_key"] = CODEX_KEY
    # The texts of JSON are texts of TOML.
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in provider.items())
    settings = [
        f"model_providers.mlx={{{table}}}",
        'model_provider="mlx"',
        f"model={json.dumps(target.model)}",
        *([f"model_context_window={target.context_tokens}"] if target.context_tokens else []),
    ]
    return [part for setting in settings for part in ("-c", setting)]


def _codex_variables(target: Served) -> Variables:
    return {CODEX_KEY: target.key} if target.key else {}


def _opencode_variables(target: Served) -> Variables:
    context = target.context_tokens
    limit = {"limit": {"context": context, "output": min(LONGEST_ANSWER_TOKENS, context // 4)}} if context else {}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlx-serve",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key or NO_KEY},
        "models": {target.model: limit},
    }
    model = f"mlx/{target.model}"
    config = {"provider": {"mlx": provider}, "model": model, "small_model": model}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


RECIPES: Mapping[str, Recipe] = {
    "claude": Recipe("Claude Code", "claude", "npm install -g @anthropic-ai/claude-code", _claude_variables),
    "codex": Recipe("Codex", "codex", "npm install -g @openai/codex", _codex_variables, _codex_arguments),
    "opencode": Recipe("opencode", "opencode", "npm install -g opencode-ai", _opencode_variables),
    "aider": Recipe(
        "aider",
        "aider",
        "uv tool install aider-chat",
        lambda target: {"OPENAI_API_BASE": f"{target.url}/v1", "OPENAI_API_KEY": target.key or NO_KEY},
        # aider warns about a model without a known price, and asks whether to open a page about it.
        lambda target: ["--model", f"openai/{target.model}", "--no-show-model-warnings"],
    ),
}


def environment_of(recipe: Recipe, target: Served, environment: Mapping[str, str]) -> dict[str, str]:
    """The agent's environment, given the shell's."""
    merged = {**environment, **recipe.variables(target)}
    return {name: value for name, value in merged.items() if value is not None}


def command_of(recipe: Recipe, target: Served, rest: Sequence[str]) -> list[str]:
    """The command line; a person adds `rest`."""
    return [recipe.program, *recipe.arguments(target), *rest]


def as_shell(recipe: Recipe, target: Served, rest: Sequence[str]) -> str:
    """A shell line that starts the agent in the same way."""
    variables = recipe.variables(target)
    unset = [f"-u {name}" for name, value in variables.items() if value is None]
    told = [f"{name}={shlex.quote(value)}" for name, value in variables.items() if value is not None]
    start = ["env", *unset, *told] if told or unset else []
    return " ".join([*start, shlex.join(command_of(recipe, target, rest))])


def savings_between(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """One line on what was reused between two `totals` of `/v1/stats`."""
    cached, evaluated, seconds = (
        max(after.get(name, 0) - before.get(name, 0), 0)
        for name in ("cached_tokens", "evaluated_tokens", "saved_seconds")
    )
    total = int(cached + evaluated)
    if not total:
        return "Nothing was asked of the server."
    saved = f", which saved about {seconds_text(seconds)}" if seconds >= 1 else ""
    told = (
        f"{grouped(int(cached))} of {grouped(total)} prompt tokens ({percent_text(int(cached), total)}) were reused"
    )
    return f"{told}{saved}; {grouped(int(evaluated))} were evaluated."
