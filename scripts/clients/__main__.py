"""Tries client packages and coding agents against this server, and says of each how it went.

    python -m scripts.clients                  all of them
    python -m scripts.clients codex litellm    some
    python -m scripts.clients benchmarks       programs that measure or test servers

Everything is installed below --folder, from the registries that pip and npm are set to; coding agents need Node.
Packages talk to the built-in model, agents to a model whose words stand in a script (`agents.py`) and whose calls
have the format that --calls names. The exit status is 1 where one failed.
"""

import argparse
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

from models.output.call_formats import FORMATS, JSON, CallFormat, Tags
from scripts.clients import agents, long_tasks, packages, tool_search
from scripts.clients.scripted_model import make_model, make_seeing
from scripts.clients.scripted_server import ScriptedEngine, demo_server, scripted_server

Tried: TypeAlias = agents.Agent | tool_search.ToolSearcher | long_tasks.LongTask
CODING_AGENTS: list[Tried] = [*agents.AGENTS, *tool_search.SEARCHERS, *long_tasks.LONG_TASKS]
NAMES = [*(package.name for package in packages.PACKAGES), *(agent.name for agent in CODING_AGENTS)]
BENCHMARKS = [package.name for package in packages.BENCHMARKS]
GROUP = "benchmarks"
CALL_FORMATS = {
    form.name: form
    for form in FORMATS
    if form.open and (not form.body.kinds if isinstance(form.body, Tags) else form.body == JSON)
}
"""Those that a scripted model writes."""


def main() -> int:
    """Runs what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)}, by default all; or {GROUP}"
    )
    parser.add_argument("--folder", type=Path, default=Path(".cache/clients"), help="where clients are installed")
    parser.add_argument("--calls", choices=CALL_FORMATS, default="hermes", help="how the scripted model calls tools")
    args = parser.parse_args()
    known = [*NAMES, *BENCHMARKS, GROUP]
    unknown = sorted(set(args.names) - set(known))
    if unknown:
        parser.error(f"there is no client {unknown[0]!r}; there are {', '.join(known)}")
    wanted = [*args.names, *(BENCHMARKS if GROUP in args.names else [])] or NAMES
    folder: Path = args.folder.resolve()
    results = [*_try_packages(wanted, folder), *_try_agents(wanted, folder, CALL_FORMATS[args.calls])]
    return 0 if all(results) else 1


def _try_packages(wanted: list[str], folder: Path) -> Iterator[bool]:
    chosen = [package for package in (*packages.PACKAGES, *packages.BENCHMARKS) if package.name in wanted]
    alone = [package for package in chosen if package is not packages.LANGCHAIN]
    if alone:
        with demo_server() as url:
            for package in alone:
                yield _try(package.name, partial(_try_package, package, folder, url))
    if packages.LANGCHAIN in chosen:
        yield _try(packages.LANGCHAIN.name, partial(_try_langchain, folder))


def _try_package(package: packages.Package, folder: Path, url: str, model: str = "demo") -> str:
    packages.prove(package, package.install(folder), url, model)
    return "all it asked for was right"


def _try_langchain(folder: Path) -> str:
    model = make_model(folder / "model")
    with scripted_server(model) as (url, engine):
        engine.reply = packages.LANGCHAIN.reply
        return _try_package(packages.LANGCHAIN, folder, url, model.name)


def _try_agents(wanted: list[str], folder: Path, call_format: CallFormat) -> Iterator[bool]:
    chosen = [agent for agent in CODING_AGENTS if agent.name in wanted]
    if not chosen:
        return
    if shutil.which("npm") is None:
        print("coding agents: not tried, for there is no npm")
        return
    model = make_model(folder / "model", call_format)
    for sees in (False, True):
        if not (own := [agent for agent in chosen if getattr(agent, "sees", False) is sees]):
            continue
        served = make_seeing(model, folder / "seeing") if sees else model
        with scripted_server(served, call_format) as (url, engine):
            for agent in own:
                yield _try(agent.name, partial(_try_agent, agent, folder, url, served.name, engine))


def _try_agent(agent: Tried, folder: Path, url: str, model: str, engine: ScriptedEngine) -> str:
    program = agents.install(agent, folder)
    if isinstance(agent, tool_search.ToolSearcher):
        return tool_search.prove(agent, program, url, model, engine)
    if isinstance(agent, long_tasks.LongTask):
        return long_tasks.prove(agent, program, url, model, engine)
    return agents.prove(agent, program, url, model, engine)


def _try(name: str, proof: Callable[[], str]) -> bool:
    began = time.monotonic()
    try:
        said, is_good = proof(), True
    except (agents.AgentFailed, packages.PackageFailed) as error:
        said, is_good = str(error), False
    print(f"{name:17} {'ok' if is_good else 'FAILED'}  {time.monotonic() - began:4.0f} s  {said}", flush=True)
    return is_good


if __name__ == "__main__":
    raise SystemExit(main())
