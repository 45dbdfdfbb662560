"""Options, arguments and forms of output that commands share. Imports only what is quick."""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
import typer.core
from rich.cells import cell_len
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from server.app.config import KEY_VARIABLE, ConfigError

MODEL_HELP = "'demo', a folder, a Hugging Face repository that was pulled, or a short name such as qwen3:0.6b."


@dataclass(frozen=True)
class _AsGiven:
    """Takes a text as it was typed; typer converts the rest, for which it imports pydantic, a tenth of a second."""

    descriptor: Any

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        is_one = param.nargs == 1 and not param.multiple
        if is_one and (value is None or (self.descriptor.annotation is str and isinstance(value, str))):
            return value
        return _build_runtime_param(self.descriptor).coerce(value, param=param, ctx=ctx)


_typer: Any = typer.core
_build_runtime_param = _typer.build_runtime_param
_typer.build_runtime_param = _AsGiven


def taking(
    command: Callable[..., None], options: Mapping[str, Any], own: Iterable[inspect.Parameter]
) -> Callable[..., None]:
    """Tells typer which `options` a command takes, before its own parameters; all by their names."""
    kind = inspect.Parameter.KEYWORD_ONLY
    first = [inspect.Parameter(name, kind, default=None, annotation=option) for name, option in options.items()]
    parameters = [*first, *(parameter.replace(kind=kind) for parameter in own)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def model_names() -> list[str]:
    """The names of this machine's models, for a shell's completion."""
    from models.names import installed

    return [name for model in installed() for name in (model.short_name, model.name) if name]


USUAL_MODEL: dict[str, Any] = {
    "metavar": "MODEL",
    "help": f"{MODEL_HELP} Default: the one that `serve` has.",
    "autocompletion": model_names,
}
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Force = Annotated[bool, typer.Option("--force", help="Do not ask, and replace what has the name.")]
_KEY_HELP = "The key of a server that asks for one."
Key = Annotated[str | None, typer.Option("--api-key", metavar="TEXT", envvar=KEY_VARIABLE, help=_KEY_HELP)]
_URL_HELP = "Address of a running server. Default: yours, or http://127.0.0.1:8080."
Url = Annotated[str | None, typer.Argument(metavar="URL", help=_URL_HELP)]
Address = Annotated[str | None, typer.Option("--url", metavar="URL", help=_URL_HELP)]
"""For a command with arguments of its own."""
OwnName = Annotated[str, typer.Argument(metavar="NAME", help="A name of your own, such as writer or writer:v2.")]
AnyModel = Annotated[
    str, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} Or a name of your own.", autocompletion=model_names)
]


def print_json(value: Any) -> None:
    """Prints what a program asked for."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def tell(record: Any, text: str, as_json: bool) -> None:
    """Prints a record for programs, or a text for people."""
    if as_json:
        print_json(record)
    else:
        typer.echo(text)


def plain_table(rows: Sequence[tuple[str, ...]]) -> str:
    """One line per row, however long; columns as wide as their longest cell."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


SHELLS = ("bash", "zsh", "fish")
COMPLETE_VARIABLE = "_MLX_SERVE_COMPLETE"


def completion(shell: Annotated[str, typer.Argument(autocompletion=lambda: [*SHELLS])]) -> None:
    """Prints typer's script for a shell; raises ConfigError."""
    if shell not in SHELLS:
        raise ConfigError(f"there is no completion for {shell!r}; there is one for {', '.join(SHELLS)}")
    typer.echo(get_completion_script(prog_name="mlx-serve", complete_var=COMPLETE_VARIABLE, shell=shell))
    if shell == "bash":
        # Else a colon, as in qwen3:8b, begins a word of its own.
        typer.echo("COMP_WORDBREAKS=${COMP_WORDBREAKS//:}")
