"""Which models fit a Mac beside an agent's prompt, by the arithmetic of `pull` and of a server's start.

Usage: python -m scripts.fits [--memory-gb 16] [--tokens 25000]

State is what a token's keys and values take in half precision: layers × heads × head dimension, of the models' own
`config.json`. Nothing is loaded or fetched.
"""

import argparse

from models.names import SHORT_NAMES
from models.texts import grouped, size_text
from server.app.memory_budget import (
    Machine,
    choose_most_bytes,
    comfortable_weights_bytes,
    largest_weights_bytes,
)
from server.cli.bench import markdown_table

RECOMMENDED_SHARE = 2 / 3
"""What Metal recommends to use of a Mac with up to 32 GB, and of no Mac less."""
SHAPES = {
    "llama3.2:3b": (28, 8, 128),
    "qwen2.5-coder:3b": (36, 2, 128),
    "qwen3:4b": (36, 8, 128),
    "qwen2.5-coder:7b": (28, 4, 128),
    "llama3.1:8b": (32, 8, 128),
    "qwen3:8b": (36, 8, 128),
    "qwen2.5-coder:14b": (48, 8, 128),
    "qwen3:14b": (40, 8, 128),
    "qwen3-coder:30b": (48, 4, 128),
}
"""Layers, heads of keys, and their dimension, of models whose layers all have attention."""


def machine_of(memory_gb: int) -> Machine:
    """A Mac with so much memory."""
    memory_bytes = memory_gb << 30
    return Machine(memory_bytes, int(memory_bytes * RECOMMENDED_SHARE))


def table(memory_gb: int, tokens: int) -> str:
    """A table of models: weights, what is left for conversations, and how many agents' prompts that holds."""
    machine, rows = machine_of(memory_gb), list[tuple[str, ...]]()
    for name, (layers, heads, dimension) in SHAPES.items():
        weights_bytes, token_bytes = SHORT_NAMES[name].num_bytes, layers * heads * dimension * 2 * 2
        if weights_bytes > largest_weights_bytes(machine):
            rows.append((f"`{name}`", size_text(weights_bytes), "refused", "", ""))
            continue
        fits = "yes" if weights_bytes <= comfortable_weights_bytes(machine) else "where named with its size"
        state_bytes = max(0, choose_most_bytes(machine, weights_bytes, machine.memory_bytes, ()))
        num_tokens = state_bytes // token_bytes // 1000 * 1000
        state = f"{size_text(state_bytes)}: {grouped(num_tokens)} tokens"
        rows.append((f"`{name}`", size_text(weights_bytes), fits, state, str(num_tokens // tokens)))
    heading = (
        "model",
        "weights",
        "`pull` takes it",
        "left for conversations",
        f"prompts of {grouped(tokens)} tokens",
    )
    return "\n".join(markdown_table(heading, rows))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory-gb", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=25_000)
    options = parser.parse_args()
    print(table(options.memory_gb, options.tokens))


if __name__ == "__main__":
    main()
