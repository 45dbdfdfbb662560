"""Tasks of up to ten steps, each a start of the agent: plan, edit, media, sub-agents, compaction, other sessions.

What the model says to each request stands in the step; agent, server and engine are real. No request may be refused.
"""

import json
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from scripts.clients.agents import (
    CONTEXT_TOKENS,
    PDF,
    PNG,
    AgentFailed,
    ClaudeCode,
    Codex,
    OpenCode,
    run_agent,
)
from scripts.clients.scripted_model import TOOL_RESULT
from scripts.clients.scripted_server import Reply, ScriptedEngine

DONE = Reply("That is done.")
SUMMARY = Reply(
    "<summary>\nThe greeting in greeting.py was changed to goodbye, as asked. Nothing is left.\n</summary>"
)
WORDS = ("hello", "goodbye", "welcome", "farewell")
"""What greeting.py says, one after the other."""


@dataclass(frozen=True)
class Step:
    """One start of the agent, and what its model says, request by request."""

    said: str
    replies: Sequence[Reply]
    flags: Sequence[str] = ()
    sub_agents: Mapping[str, Sequence[Reply]] = field(default_factory=dict)
    """By a word of the sub-agent's task: its replies by the number of results in its prompt."""

    def script(self) -> Callable[[str], Reply]:
        """What answers the requests of this step; those for titles offer no tools."""
        left = iter(self.replies)

        def reply(prompt: str) -> Reply:
            asked = prompt.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
            for word, replies in self.sub_agents.items():
                if word in asked:
                    return replies[min(prompt.count(f"{TOOL_RESULT}\n"), len(replies) - 1)]
            return next(left, DONE) if "<tools>" in prompt else Reply("A small edit")

        return reply


class LongTask(ABC):
    """How one agent does its steps."""

    name: str
    package: str
    """Its package on npm."""
    program: str
    files: Mapping[str, bytes] = MappingProxyType({"greeting.py": b'print("hello")\n'})
    num_breaks = 0
    """As of `Agent`."""

    @abstractmethod
    def steps(self, work: Path) -> Sequence[Step]:
        """Returns the steps in a folder."""

    @abstractmethod
    def arguments(self, url: str, model: str, step: Step) -> Sequence[str]:
        """Returns the command line of a step."""

    def environment(self, url: str, model: str) -> Mapping[str, str]:
        """Returns the variables that point it at the server."""
        return {}

    def prepare(self, home: Path, url: str, model: str) -> None:  # noqa: B027 - most need nothing
        """Writes what points it at the server into its home."""


class LongClaude(LongTask):
    """Claude Code: plan mode, an edit, a PNG and a PDF, sub-agents, `/compact`, sessions resumed and new."""

    name, package, program, num_breaks = "claude-long", ClaudeCode.package, ClaudeCode.program, 7
    files = MappingProxyType({**LongTask.files, "picture.png": PNG, "paper.pdf": PDF})

    def steps(self, work: Path) -> Sequence[Step]:
        """Ten of them, the ninth in a session of its own."""
        file, first, second = str(work / "greeting.py"), str(uuid.UUID(int=1)), str(uuid.UUID(int=2))
        read = Reply("I read the file.", "Read", {"file_path": file})

        def edit(index: int) -> Reply:
            change = {"file_path": file, "old_string": WORDS[index], "new_string": WORDS[index + 1]}
            return Reply("I change it.", "Edit", change)

        def ask(word: str) -> Reply:
            task = {
                "description": "Reads a file",
                "prompt": f"{word}: say what greeting.py prints.",
                "subagent_type": "general-purpose",
            }
            return Reply("I ask an agent.", "Agent", {**task, "run_in_background": False})

        media = [Reply("", "Read", {"file_path": str(work / name)}) for name in ("picture.png", "paper.pdf")]
        found = (read, Reply("It prints a greeting, in one line."))
        on = ["--continue"]
        return [
            Step(
                "Plan how to change the greeting in greeting.py from hello to goodbye.",
                [read, Reply("The plan: one edit.")],
                ["--permission-mode", "plan", "--session-id", first],
            ),
            Step("Do as planned.", [edit(0), DONE], on),
            Step("Look at picture.png and paper.pdf.", [*media, DONE], on),
            Step("Have an agent read the file.", [ask("Searcher"), DONE], on, {"Searcher:": found}),
            Step("Have another one check it.", [ask("Checker"), DONE], on, {"Checker:": found}),
            Step("Now say welcome.", [read, edit(1), DONE], on),
            Step("/compact", [SUMMARY], on),
            Step("Is it right now?", [read, DONE], on),
            Step("Say farewell in greeting.py.", [read, edit(2), DONE], ["--session-id", second]),
            Step("What is there now?", [read, DONE], ["--resume", first]),
        ]

    def arguments(self, url: str, model: str, step: Step) -> Sequence[str]:
        """Prints the answer; edits are accepted unless it plans."""
        mode = [] if "--permission-mode" in step.flags else ["--permission-mode", "acceptEdits"]
        return [*step.flags, *mode, "--output-format", "json", "--print", step.said]

    def environment(self, url: str, model: str) -> Mapping[str, str]:
        """As for its short task."""
        return ClaudeCode().environment(url, model)


class LongCodex(LongTask):
    """Codex: edits, a compaction of its own, sessions resumed and new."""

    name, package, program, num_breaks = "codex-long", Codex.package, Codex.program, 1
    files = MappingProxyType(
        {**LongTask.files, "log.txt": b"".join(b"line %d of the log says %d\n" % (n, n * 7) for n in range(600))}
    )

    def steps(self, work: Path) -> Sequence[Step]:
        """Ten of them; the long output of the fifth leads to the compaction."""

        def shell(command: str) -> Reply:
            return Reply("I run it.", "exec_command", {"cmd": command})

        def edit(index: int) -> Reply:
            return shell(f"sed -i s/{WORDS[index]}/{WORDS[index + 1]}/ {work / 'greeting.py'}")

        on = ["resume", "--last"]
        look = shell(f"cat {work / 'greeting.py'}")
        return [
            Step("Change the greeting in greeting.py from hello to goodbye.", [look, edit(0), DONE]),
            Step("Is it right?", [look, DONE], on),
            Step("Now say welcome.", [edit(1), DONE], on),
            Step("Count the lines of log.txt.", [shell(f"wc -l {work / 'log.txt'}"), DONE], on),
            Step("Read log.txt.", [shell(f"head -c 9000 {work / 'log.txt'}"), SUMMARY, DONE], on),
            Step("What was in it?", [DONE], on),
            Step("Is the greeting right?", [look, DONE], on),
            Step("Say farewell in greeting.py.", [look, edit(2), DONE]),
            Step("Is it right?", [look, DONE], on),
            Step("Thank you.", [DONE], on),
        ]

    def arguments(self, url: str, model: str, step: Step) -> Sequence[str]:
        """One step in the folder, which is a sandbox already."""
        given = list(Codex().arguments(url, model))
        limit = ["-c", "model_auto_compact_token_limit=13000"]
        return [*given[:-1], *limit, *step.flags, step.said]


class LongOpenCode(LongTask):
    """opencode: plan, edits, a sub-agent, a second session."""

    name, package, program, num_breaks = "opencode-long", OpenCode.package, OpenCode.program, 4

    def steps(self, work: Path) -> Sequence[Step]:
        """Six of them, the last in a session of its own."""
        file = str(work / "greeting.py")
        read = Reply("I read the file.", "read", {"filePath": file})

        def edit(index: int) -> Reply:
            change = {"filePath": file, "oldString": WORDS[index], "newString": WORDS[index + 1]}
            return Reply("I change it.", "edit", change)

        ask = {
            "description": "Reads a file",
            "prompt": "Searcher: what does greeting.py print?",
            "subagent_type": "general",
        }
        return [
            Step("Plan how to change the greeting in greeting.py.", [read, DONE], ["--agent", "plan"]),
            Step("Do as planned.", [edit(0), DONE], ["--continue", "--agent", "build"]),
            Step(
                "Have an agent read the file.",
                [Reply("I ask an agent.", "task", ask), DONE],
                ["--continue"],
                {"Searcher:": (read, DONE)},
            ),
            Step("Now say welcome.", [read, edit(1), DONE], ["--continue"]),
            Step("Is it right?", [read, DONE], ["--continue"]),
            Step("Say farewell in greeting.py.", [read, edit(2), DONE]),
        ]

    def arguments(self, url: str, model: str, step: Step) -> Sequence[str]:
        """One step, without questions."""
        return ["run", *step.flags, step.said]

    def environment(self, url: str, model: str) -> Mapping[str, str]:
        """As for its short task."""
        return OpenCode().environment(url, model)


class ShellTask(LongTask):
    """An agent that edits by shell commands, is continued, and begins a second session."""

    shell: str
    """The name of its tool."""
    goes_on: Sequence[str] = ("--continue",)

    def run(self, command: str) -> Reply:
        """Returns the call of its tool."""
        return Reply("I run it.", self.shell, {"command": command})

    def steps(self, work: Path) -> Sequence[Step]:
        """Six of them, the last two in a session of their own."""
        file = work / "greeting.py"
        look = self.run(f"cat {file}")

        def edit(index: int) -> Reply:
            return self.run(f"sed -i s/{WORDS[index]}/{WORDS[index + 1]}/ {file}")

        return [
            Step("Change the greeting in greeting.py from hello to goodbye.", [look, edit(0), DONE]),
            Step("Is it right?", [look, DONE], self.goes_on),
            Step("Now say welcome.", [look, edit(1), DONE], self.goes_on),
            Step("Thank you.", [DONE], self.goes_on),
            Step("Say farewell in greeting.py.", [look, edit(2), DONE]),
            Step("Is it right?", [look, DONE], self.goes_on),
        ]


class LongKimi(ShellTask):
    """Kimi Code, which runs in its automatic mode."""

    name, package, program, shell = "kimi", "@moonshot-ai/kimi-code", "kimi", "Bash"

    def arguments(self, url: str, model: str, step: Step) -> Sequence[str]:
        """Prints the answer."""
        return [*step.flags, "--prompt", step.said]

    def prepare(self, home: Path, url: str, model: str) -> None:
        """A provider of its own."""
        place = home / ".kimi-code" / "config.toml"
        place.parent.mkdir()
        place.write_text(
            f'''default_model = "ours"
[providers.mlx]
type = "openai"
base_url = "{url}/v1"
api_key = "none"
[models.ours]
provider = "mlx"
model = "{model}"
max_context_size = {CONTEXT_TOKENS}
'''
        )


class LongPi(ShellTask):
    """Pi."""

    name, package, program, shell = "pi", "@mariozechner/pi-coding-agent", "pi", "bash"

    def arguments(self, url: str, model: str, step: Step) -> Sequence[str]:
        """Prints the answer."""
        return ["--provider", "mlx", "--model", model, "--offline", *step.flags, "--print", step.said]

    def prepare(self, home: Path, url: str, model: str) -> None:
        """A provider of its own."""
        place = home / ".pi" / "agent" / "models.json"
        place.parent.mkdir(parents=True)
        known = {"id": model, "contextWindow": CONTEXT_TOKENS, "maxTokens": 4000}
        provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "none", "models": [known]}
        place.write_text(json.dumps({"providers": {"mlx": provider}}))


LONG_TASKS: Sequence[LongTask] = (
    LongClaude(),
    LongCodex(),
    LongOpenCode(),
    LongKimi(),
    LongPi(),
)


def prove(task: LongTask, program: Path, url: str, model: str, engine: ScriptedEngine) -> str:
    """Has the agent do its steps and returns lines of figures; raises AgentFailed."""
    engine.begin(())
    figures = [""]
    with tempfile.TemporaryDirectory(prefix="mlx-serve-client-") as name:
        home, work = Path(name) / "home", Path(name) / "work"
        home.mkdir()
        work.mkdir()
        for file_name, content in task.files.items():
            (work / file_name).write_bytes(content)
        task.prepare(home, url, model)
        for step in task.steps(work):
            engine.reply, start = step.script(), len(engine.answered())
            said = run_agent(program, task.arguments(url, model, step), task.environment(url, model), home, work)
            asked = engine.answered()
            own = list(engine.again(asked))[start:]
            lengths = [len(exchange.prompt) for exchange in asked[start:]]
            figures.append(f"{step.said}: prompts of {lengths} tokens, of which again {own}")
            if engine.refusals or not any(one.said_all(step.replies[-1]) for one in asked[start:]):
                raise AgentFailed("\n".join([*figures, *engine.refusals, said]))
    engine.reply = None
    return "\n    ".join(figures)
