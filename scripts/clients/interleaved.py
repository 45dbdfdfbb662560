"""Coding agents at once on five architectures: the tokens that each turn evaluates beyond its new text.

    python -m scripts.clients.interleaved                  all agents
    python -m scripts.clients.interleaved codex opencode   some

Each agent does its task once; NAME is also one of a task of ten steps (`long_tasks.py`). What the agents sent then
goes again, interleaved, to a tiny model of each architecture with random weights. It gives the replies that the
agents had, in the tokens that a trained model would choose. The exit status is 1 if a turn evaluates over 64 tokens
beyond its new text, but for those that docs/clients.md names.
"""

import argparse
import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import httpx
import numpy as np

from models.output.grammar import Grammar, MaskWords
from scripts.clients import agents, long_tasks
from scripts.clients.scripted_model import make_like, make_model
from scripts.clients.scripted_server import Reply, Sent, scripted_server, tokenizer_of
from tests.support import tiny_models

ARCHITECTURES = ("llama", "llama_swa", "qwen3_5", "mamba2", "gpt_oss")
MAX_TOKENS = 64
PAUSE_SECONDS = 1.0
Tried: TypeAlias = agents.Agent | long_tasks.LongTask
_ID = re.compile(r'(?<=")(call|toolu|fc|msg|resp|rs)_(\w{8,})(?=")')
_OWN_HEADERS = {"host", "content-length", "accept-encoding", "connection", "transfer-encoding"}


@dataclass
class Recording:
    """What an agent sent, and the reply to each prompt."""

    agent: Tried
    sent: list[Sent]
    replies: dict[str, Reply]


class Spelling:
    """Binds a reply to the tokens that its tokenizer makes of it."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = tokenizer_of(model)
        self._end = json.loads((model / "tokenizer_config.json").read_text())["eos_token"]

    def compile(self, grammar: Grammar) -> "_Tokens":
        """Takes a choice of one text."""
        (text,) = json.loads(grammar.text)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return _Tokens([*ids, self._tokenizer.token_to_id(self._end)], self._tokenizer.get_vocab_size())


@dataclass
class _Tokens:
    """A grammar of one output, and its matcher."""

    tokens: list[int]
    vocab_size: int
    position: int = 0

    def begin(self) -> "_Tokens":
        return replace(self)

    copy = begin

    @property
    def is_complete(self) -> bool:
        return self.position == len(self.tokens)

    def accept(self, token: int) -> None:
        self.position += 1

    def accept_text(self, text: str) -> None:
        raise NotImplementedError

    def mask(self) -> MaskWords:
        bits = np.zeros(-(-self.vocab_size // 32) * 32, np.uint8)
        bits[self.tokens[min(self.position, len(self.tokens) - 1)]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    mask_without_end = mask

    def forced(self) -> list[int]:
        return []


def main() -> int:
    """Records the agents, then tries each architecture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known: list[Tried] = [*(agent for agent in agents.AGENTS if not agent.sees), *long_tasks.LONG_TASKS]
    parser.add_argument("names", nargs="*", choices=[*(agent.name for agent in known), []], metavar="NAME")
    parser.add_argument("--folder", type=Path, default=Path(".cache/clients"), help="where clients are installed")
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    base = make_model(folder / "model")
    chosen = [agent for agent in known if not args.names or agent.name in args.names]
    recordings = [_record(agent, base, folder) for agent in chosen]
    results = [_try(name, base, folder, recordings) for name in ARCHITECTURES]
    return 0 if all(results) else 1


def _record(agent: Tried, model: Path, folder: Path) -> Recording:
    program = agents.install(agent, folder)
    with scripted_server(model, binder=Spelling(model)) as (url, engine):
        if isinstance(agent, long_tasks.LongTask):
            long_tasks.prove(agent, program, url, model.name, engine)
        else:
            agents.prove(agent, program, url, model.name, engine)
        replies = {engine.decode(one.prompt.tolist()): one.said for one in engine.answered() if one.said}
        return Recording(agent, engine.sent, replies)


def _try(architecture: str, base: Path, folder: Path, recordings: Sequence[Recording]) -> bool:
    model = make_like(base, tiny_models.CONFIGS[architecture], folder / architecture / base.name)
    replies = {prompt: reply for recording in recordings for prompt, reply in recording.replies.items()}
    is_good = True
    with scripted_server(model, binder=Spelling(base)) as (url, engine):
        engine.reply = replies.__getitem__
        asyncio.run(_send_all(url, recordings))
        for recording in recordings:
            own = [one for one in engine.answered() if engine.decode(one.prompt.tolist()) in recording.replies]
            counts, agent = list(engine.again(own)), recording.agent
            breaks = [count for count in counts if count > MAX_TOKENS]
            is_good &= len(own) >= len(recording.replies) and len(breaks) <= agent.num_breaks
            small = sum(counts) - sum(breaks), max((count for count in counts if count <= MAX_TOKENS), default=0)
            print(f"{architecture:10} {agent.name:13} {len(own)} turns, {small[0]} tokens, most {small[1]}; {breaks}")
        return is_good and not engine.refusals


async def _send_all(url: str, recordings: Sequence[Recording]) -> None:
    await asyncio.gather(*(_send(url, recording.sent) for recording in recordings))


async def _send(url: str, requests: Sequence[Sent]) -> None:
    """Sends an agent's requests, with the ids that this server gave in the place of those in the recording."""
    ids: dict[str, str] = {}
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        for sent in requests:
            body = _ID.sub(lambda match: f"{match[1]}_{ids.get(match[2], match[2])}", sent.body)
            headers = [(name, value) for name, value in sent.headers if name not in _OWN_HEADERS]
            answer = await client.post(sent.path, content=body, headers=headers)
            ids.update(zip(_ids(sent.answer), _ids(answer.text), strict=True))
            await asyncio.sleep(PAUSE_SECONDS)


def _ids(answer: str) -> list[str]:
    return list(dict.fromkeys(match[2] for match in _ID.finditer(answer)))


if __name__ == "__main__":
    raise SystemExit(main())
