"""An example of each command, as its `--help` and the manual show it. Pure."""

from collections.abc import Mapping, Sequence

EXAMPLES: Mapping[str, Sequence[str]] = {
    "": ("mlx-serve serve demo", "mlx-serve run demo"),
    "serve": ("mlx-serve serve qwen3:8b --cache-disk 20GB", "mlx-serve serve demo --port 0 --log-format json"),
    "run": ("mlx-serve run qwen3:4b", 'cat notes.txt | mlx-serve run demo "Summarise this."'),
    "config": ("mlx-serve config --port 9000", "mlx-serve config --template > ~/.config/mlx-serve/config.toml"),
    "list": ("mlx-serve list --json",),
    "show": ("mlx-serve show qwen3:8b", "mlx-serve show writer --modelfile > Modelfile"),
    "cp": ("mlx-serve cp qwen3:8b writer",),
    "tag": ("mlx-serve tag writer v1",),
    "rm": ("mlx-serve rm writer:v1", "mlx-serve rm mlx-community/Qwen3-4B-4bit"),
    "verify": ("mlx-serve verify qwen3:8b",),
    "create": ("mlx-serve create writer -f Modelfile",),
    "ps": ("mlx-serve ps --json",),
    "top": ("mlx-serve top", "mlx-serve top --once --json"),
    "stop": ("mlx-serve stop qwen3:8b",),
    "pull": ("mlx-serve pull qwen3:0.6b", "mlx-serve pull mlx-community/Qwen3-4B-4bit"),
    "doctor": ("mlx-serve doctor", "mlx-serve doctor --file requests.jsonl --speed 400"),
    "gateway-config": ("mlx-serve gateway-config --replica 10.0.0.1:8080 --replica 10.0.0.2:8080 > haproxy.cfg",),
    "completion": (
        "mlx-serve completion bash > ~/.local/share/bash-completion/completions/mlx-serve",
        "mlx-serve completion fish > ~/.config/fish/completions/mlx-serve.fish",
    ),
    "man": ("mlx-serve man > ~/.local/share/man/man1/mlx-serve.1",),
    "launch": ("mlx-serve launch claude", "mlx-serve launch codex --model qwen3:30b -- exec 'Explain this folder.'"),
    "service": ("mlx-serve service install",),
    "service install": ("mlx-serve service install",),
    "service status": ("mlx-serve service status --json",),
    "service logs": ("mlx-serve service logs --follow",),
    "service remove": ("mlx-serve service remove",),
    "cache": ("mlx-serve cache",),
    "cache tree": ("mlx-serve cache tree --depth 3",),
    "cache list": ("mlx-serve cache list --json",),
    "cache rm": ("mlx-serve cache rm --all",),
}
"""By the words behind `mlx-serve`."""


def epilog(command: str) -> str | None:
    r"""Returns what stands at the end of a command's help; None without an example. `\b` keeps its lines."""
    examples = EXAMPLES.get(command)
    if examples is None:
        return None
    heading = "Example:" if len(examples) == 1 else "Examples:"
    return "\b\n" + "\n".join([heading, *(f"  {example}" for example in examples)])
