"""Decoding with drafts against decoding without, on recorded answers.

Usage: python -m scripts.bench.speculate [--json FILE] [--seconds N] [--cpu] [--only NAME]…

Both sides are the engine's worker with a cache of its own, over the same model in one process, and take turns, so
that a busy machine slows both alike. What a row samples is replaced by the next token of an
answer made of files that are on any machine (`speculate_texts.py`): all arithmetic is done, but the rows say what a
model would that rewrites a file or calls a tool. Prefill is not timed, and a line ends when the first row does.

Lines of bound calls have drafts on both sides; ours binds each call to declared tools from its opener on, the other
binds none. Their tokens are those of `demo`.

The models have random weights, but `demo`: its own. What it answers in one conversation is recorded first, greedily;
a row then gives one answer after another. On a CPU a float32 model of 95 million parameters is bound
by memory, as larger ones are on a GPU; quantized to 4 bits it is bound by arithmetic there, and a token more costs as
much as the first.
"""

import argparse
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

# isort: split
import mlx.core as mx
import numpy as np
from mlx.nn.layers.quantized import quantize
from mlx_lm.models import llama, qwen3_5

from cache.history import History
from cache.layers.kinds import make_caches
from cache.prefix_cache import PrefixCache
from cache.types import LayerCache
from models.inference.abilities import MAX_FEED_TOKENS, Feeds
from models.inference.drafters import Drafter, drafter_of
from models.inference.embedding import Embedder
from models.inference.grammar import GrammarCompiler
from models.inference.row import DecodeRow
from models.inference.runner import DecodeStep, Runner
from models.inference.sampling import TokenIds
from models.inference.sampling_params import SamplingParams
from models.loader import LoadedModel, load
from models.output.call_formats import HERMES
from models.output.call_grammar import BoundTool, CallGrammar
from models.output.grammar import CallOpener, Grammar, GrammarKind, MaskWords, OutputGrammar, allows
from scripts.bench.common import ROOT, Report, Target, write_json
from scripts.bench.decode import Said, Spelled
from scripts.bench.speculate_texts import (
    QUESTIONS,
    Text,
    Vocabulary,
    agent,
    prose,
    reading,
    replacing,
    rewriting,
)
from server.engine.request import GenerationRequest
from server.engine.sequence import EngineState
from server.engine.speculation import Speculation
from server.engine.worker import Worker
from tests.support import tiny_models

CHUNK_TOKENS = 512
BLOCK_TOKENS = 24
"""Of a row, in one turn with drafts; the other side's turn takes as many seconds."""
MIN_BLOCKS = 4
MAX_OWN_TOKENS = 96
"""The longest answer of the demo model."""
PROBE_SECONDS = 300
"""Longer than on a busy machine: whether a model is proven is no matter of time here."""
VOCAB = 16_384
_DENSE = {
    "vocab_size": VOCAB,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "intermediate_size": 2304,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
}
_LLAMA = {
    **_DENSE,
    "model_type": "llama",
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rope_theta": 1e6,
}
_HYBRID_TEXT = {
    **_DENSE,
    "model_type": "qwen3_5_text",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "full_attention_interval": 4,
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [11, 11, 10],
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
}

# ------------------------------------------------------------------------------------------------------- the models


@dataclass(frozen=True)
class Subject:
    """A model, and how texts become its tokens."""

    model: Any
    vocab_size: int
    encode: Callable[[str], list[int]]
    drafter: Drafter | None = None
    ends: frozenset[int] = frozenset()
    """Tokens that end an answer; else only its length does."""


@cache
def demo() -> LoadedModel:
    """With its MTP module, if there is one."""
    return load(ROOT / "models" / "demo", "demo", max_float32_bytes=1 << 30, with_mtp=True)


@cache
def subject(name: str) -> Subject:
    """Makes or loads a model."""
    mx.random.seed(0)
    if name == "demo":
        loaded, encode = demo(), partial(demo().tokenizer.encode, add_special_tokens=False)
        return Subject(loaded.model, loaded.vocab_size, encode, drafter_of(loaded), loaded.eos_token_ids)
    if name == "tiny":
        return Subject(tiny_models.build("llama"), tiny_models.VOCAB, Vocabulary(tiny_models.VOCAB).encode)
    if name == "hybrid":
        text = {"model_type": "qwen3_5", "text_config": _HYBRID_TEXT}
        model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(text))
    else:
        model = llama.Model(llama.ModelArgs.from_dict(_LLAMA))
    if name == "4 bits":
        quantize(model, group_size=64, bits=4)
    mx.eval(model.parameters())
    return Subject(model, VOCAB, Vocabulary(VOCAB).encode)


class TaughtRunner(Runner):
    """Does all that a runner does, but each row samples the next token of its answer."""

    def __init__(self, model: Subject, *, drafts: bool) -> None:
        self.answers: dict[bytes, list[int]] = {}
        """By the prompt's bytes."""
        self._end = min(model.ends, default=0)
        self._rows: dict[DecodeRow, tuple[list[int], int]] = {}
        self.num_calls = 0
        """Decode steps prepared."""
        super().__init__(
            model.model,
            vocab_size=model.vocab_size,
            drafter=model.drafter if drafts else None,
            max_probe_seconds=PROBE_SECONDS,
        )

    def make_row(
        self,
        caches: list[LayerCache],
        sampling: SamplingParams,
        next_token: int,
        *,
        prompt: TokenIds = (),
        generated: TokenIds = (),
        adapter: int = -1,
        shift: int = 0,
    ) -> DecodeRow:
        """Finds the row's answer by its prompt."""
        row = super().make_row(caches, sampling, next_token, prompt=prompt, generated=generated)
        self._rows[row] = self.answers[np.asarray(prompt, np.int32).tobytes()], len(generated)
        return row

    def sample(self, step: DecodeStep, masks: Sequence[MaskWords | None]) -> None:
        """Replaces what was sampled, which is computed all the same."""
        super().sample(step, masks)
        taught = list[int]()
        for row in step.rows:
            (answer, at), num_samples = self._rows[row], len(row.draft) + 1
            following = answer[at : at + num_samples]
            taught += following + [self._end] * (num_samples - len(following))
            if not step.is_long:
                self._rows[row] = answer, at + 1
        assert step.sampled is not None, "it has just been sampled"
        step.sampled = step.sampled * 0 + mx.array(taught, mx.uint32)
        self.num_calls += 1

    def settle(self, step: DecodeStep, accepted: Sequence[int]) -> list[int]:
        """Moves on in the answers."""
        kept = super().settle(step, accepted)
        for row, num_accepted in zip(step.rows, accepted, strict=True):
            answer, at = self._rows[row]
            self._rows[row] = answer, at + num_accepted + 1
        return kept


# -------------------------------------------------------------------------------------------------------- the sides


@dataclass(frozen=True)
class Recorded:
    """The tokens of a prompt, of its answer, and of a tool's result in it as calls quote it."""

    prompt: list[int]
    answer: list[int]
    quotable: list[int]


class Side:
    """An engine that answers prompts, with drafts or without."""

    def __init__(
        self,
        model: Subject,
        num_rows: int,
        clock: Callable[[], float],
        *,
        drafts: bool,
        grammar: OutputGrammar | None = None,
    ) -> None:
        self.runner, self._ends, self._clock = TaughtRunner(model, drafts=drafts), model.ends, clock
        self._grammar = grammar
        cache = PrefixCache(
            self.runner.make_caches, num_slots=num_rows, budget_bytes=1 << 50, chunk_tokens=CHUNK_TOKENS
        )
        sample = self.runner.make_caches()
        self.runner.prefill(sample, np.arange(8, dtype=np.int32))
        cache.layout.calibrate(sample)
        self.speculation = self._speculation(cache) if drafts else None
        self._worker = Worker(
            self.runner,
            EngineState(cache),
            Spelled,
            eos_token_ids=model.ends,
            chunk_tokens=CHUNK_TOKENS,
            expected_tokens=CHUNK_TOKENS,
            clock=clock,
            embedder=Embedder(None),
            speculation=self.speculation,
        )
        self._texts, self._said = list[Recorded](), list[Said]()
        self.seconds, self.num_tokens, self.num_calls = 0.0, 0, 0
        """Timed, as are the tokens of all rows."""

    def begin(self, texts: Sequence[Recorded]) -> None:
        """Begins answers, one a row, once earlier ones are over; takes no time."""
        while self._worker.has_work:
            self._worker.step()
        self._texts, self._said = list(texts), [Said() for _ in texts]
        for row, (text, said) in enumerate(zip(texts, self._said, strict=True)):
            prompt, quotable = np.array(text.prompt, np.int32), (np.array(text.quotable, np.int32),)
            self.runner.answers[prompt.tobytes()] = text.answer
            # Drafts run beyond an end that is said, not beyond the most tokens.
            max_tokens = len(text.answer) + (MAX_FEED_TOKENS if self._ends else 0)
            greedy = SamplingParams(temperature=0)
            self._worker.submit(
                GenerationRequest(
                    f"{row}", prompt, max_tokens, sampling=greedy, quotable=quotable, grammar=self._grammar
                ),
                said,
            )
        while not all(said.tokens for said in self._said):
            self._worker.step()

    def _speculation(self, cache: PrefixCache) -> Speculation | None:
        feeds = self.runner.abilities.feeds
        return None if feeds is None else Speculation(cache.history, feeds, feeds_again=cache.layout.has_recurrent)

    @property
    def _num_said(self) -> int:
        return sum(len(said.tokens) for said in self._said)

    @property
    def tokens_per_step(self) -> float:
        """Of a row."""
        return self.num_tokens / len(self._texts) / max(1, self.num_calls)

    @property
    def has_ended(self) -> bool:
        """Some row is at its end."""
        return any(len(said.tokens) >= len(text.answer) for said, text in zip(self._said, self._texts, strict=True))

    def decode(self, *, num_tokens: float = math.inf, seconds: float = math.inf) -> None:
        """Steps until all rows have said `num_tokens`, the side has taken `seconds`, or a row has ended."""
        while self.num_tokens < num_tokens and self.seconds < seconds and not self.has_ended:
            num_said, num_calls, began = self._num_said, self.runner.num_calls, self._clock()
            self._worker.step()
            self.seconds += self._clock() - began
            self.num_tokens += self._num_said - num_said
            self.num_calls += self.runner.num_calls - num_calls

    def check(self) -> None:
        """Raises SystemExit if a row has not said its answer."""
        for said, text in zip(self._said, self._texts, strict=True):
            if said.tokens != text.answer[: len(said.tokens)]:
                raise SystemExit("a row has said something else than its answer")


# -------------------------------------------------------------------------------------------------------- the lines


@dataclass(frozen=True)
class Line:
    """Rows that decode together, and the least ratio that is wanted."""

    name: str
    model: str
    rounds: Callable[[Subject], list[list[Recorded]]]
    """Of answers, one a row; each round ends with its first answer."""
    target: float
    min_tokens_per_step: float | None = None
    is_bound: bool = False
    """Ours binds calls, and both sides draft."""


def _recorded(model: Subject, text: Text) -> Recorded:
    return Recorded(model.encode(text.prompt), model.encode(text.answer), model.encode(text.quotable))


_ARGUMENTS = {
    "edit": {"path": "string", "old_string": "string", "new_string": "string"},
    "read": {"path": "string", "offset": "integer", "limit": "integer"},
}


@cache
def bound_calls() -> OutputGrammar:
    """The grammar of calls in answers of `replacing` and `reading`, over the tokens of `demo`."""
    tokenizer: Any = demo().tokenizer
    compiler = GrammarCompiler(tokenizer._tokenizer.to_str, demo().eos_token_ids)
    tools = [
        BoundTool(
            name,
            {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in kinds.items()},
                "required": [*kinds],
                "additionalProperties": False,
            },
        )
        for name, kinds in _ARGUMENTS.items()
    ]
    rules = "\n".join(CallGrammar(HERMES, tools, compiler.spell).lazy())
    opener = CallOpener(re.compile("x()"), compiler.token_of("<tool_call>"))  # `Spelled` has one letter a token
    return OutputGrammar(compiler.compile(Grammar(GrammarKind.LARK, rules)), opener=opener)


def _checked(text: Recorded) -> Recorded:
    """Raises SystemExit if a call of the answer is not bound whole."""
    grammar, matcher = bound_calls(), None
    for token in text.answer:
        if matcher is not None:
            if not allows(matcher.mask(), token):
                raise SystemExit("a recorded call is not as its grammar has it")
            matcher.accept(token)
            matcher = None if matcher.is_complete else matcher
        elif grammar.opener is not None and token == grammar.opener.token:
            matcher = grammar.compiled.begin()
    return text


def _calling(make: Callable[[int], Text], num_rows: int) -> Callable[[Subject], list[list[Recorded]]]:
    def rounds(model: Subject) -> list[list[Recorded]]:
        texts = [_checked(_recorded(model, make(seed))) for seed in range(1, 4 * num_rows + 1)]
        return [texts[place : place + num_rows] for place in range(0, len(texts), num_rows)]

    return rounds


def _several(make: Callable[[int], Text], num_rows: int) -> Callable[[Subject], list[list[Recorded]]]:
    return lambda model: [[_recorded(model, make(seed)) for seed in range(1, num_rows + 1)]]


def _mixed(model: Subject) -> list[list[Recorded]]:
    lengths = (110, 90, 60, 40, 30, 20, 15, 10)
    return [[_recorded(model, agent(seed, num_lines=lines)) for seed, lines in enumerate(lengths, 1)]]


def _own(num_rows: int) -> Callable[[Subject], list[list[Recorded]]]:
    return lambda _: [own_answers()[i : i + num_rows] for i in range(0, len(QUESTIONS), num_rows)]


@cache
def own_answers() -> list[Recorded]:
    """What `demo` says, greedily, to each question in turn, after all earlier questions and answers."""
    answers, messages = list[Recorded](), list[dict[str, str]]()
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        prompt: list[int] = demo().tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        answer = _greedy(demo(), prompt)
        answers.append(Recorded(prompt, answer, []))
        messages.append({"role": "assistant", "content": demo().tokenizer.decode(answer)})
    return answers


def _greedy(loaded: LoadedModel, prompt: list[int]) -> list[int]:
    """An answer without its end."""
    model: Any = loaded.model
    caches, answer, fed = make_caches(loaded.model), list[int](), prompt
    while len(answer) < MAX_OWN_TOKENS:
        fed = [cast(int, mx.argmax(model(mx.array([fed]), cache=caches)[0, -1]).item())]
        if fed[0] in loaded.eos_token_ids:
            break
        answer += fed
    return answer


LINES = (
    Line("a whole file", "llama", _several(rewriting, 1), 3.0, min_tokens_per_step=9.0),
    Line("replacing", "llama", _several(replacing, 1), 1.0),
    Line("reading", "llama", _several(reading, 1), 1.0),
    Line("agent", "llama", _several(agent, 1), 1.6),
    Line("2 x agent", "llama", _several(agent, 2), 1.4),
    Line("4 x agent", "llama", _several(agent, 4), 1.25),
    Line("8 x agent, mixed lengths", "llama", _mixed, 1.0),
    Line("prose", "llama", _several(prose, 1), 0.97),
    Line("4 x prose", "llama", _several(prose, 4), 0.97),
    Line("hybrid, agent", "hybrid", _several(agent, 1), 1.25),
    Line("hybrid, 2 x agent", "hybrid", _several(agent, 2), 1.2),
    Line("hybrid, 4 x agent", "hybrid", _several(agent, 4), 1.05),
    Line("hybrid, prose", "hybrid", _several(prose, 1), 0.97),
    Line("demo, agent", "demo", _several(agent, 1), 1.3),
    Line("demo, 4 x agent", "demo", _several(agent, 4), 0.98),
    Line("demo, prose", "demo", _several(prose, 1), 0.97),
    Line("demo, own answers", "demo", _own(1), 0.97),
    Line("demo, 4 x own answers", "demo", _own(4), 0.98),
    Line("4 bits, agent", "4 bits", _several(agent, 1), 0.98),
    Line("demo, bound edits", "demo", _calling(replacing, 1), 0.97, is_bound=True),
    Line("demo, 4 x bound edits", "demo", _calling(replacing, 4), 0.97, is_bound=True),
    Line("demo, bound reads", "demo", _calling(reading, 1), 0.97, is_bound=True),
    Line("tiny, 16 x agent", "tiny", _several(agent, 16), 0.98),
    Line("tiny, 32 x agent", "tiny", _several(agent, 32), 0.98),
)


def measure(line: Line, seconds: float, clock: Callable[[], float]) -> tuple[Side, Side]:
    """Has both sides decode in turns, the one with drafts first, until a row ends or time is over."""
    model = subject(line.model)
    rounds = line.rounds(model)
    num_rows = len(rounds[0])
    ours = Side(model, num_rows, clock, drafts=True, grammar=bound_calls() if line.is_bound else None)
    plain = Side(model, num_rows, clock, drafts=line.is_bound)
    block, number = BLOCK_TOKENS * num_rows, 0

    def is_over() -> bool:
        return number >= MIN_BLOCKS and ours.seconds + plain.seconds >= seconds

    for texts in rounds:
        if is_over():
            break
        for side in (ours, plain):
            side.begin(texts)
        while not ours.has_ended and not is_over():
            number += 1
            ours.decode(num_tokens=number * block)
            plain.decode(seconds=ours.seconds)
        for side in (ours, plain):
            side.check()
    return ours, plain


def add_to(report: Report, line: Line, ours: Side, plain: Side) -> None:
    """Adds a line to the table."""
    speeds = [side.num_tokens / side.seconds for side in (plain, ours)]
    stats = ours.speculation.stats if ours.speculation is not None else None
    drafted, accepted = (sum(counts.values()) for counts in (stats.drafted, stats.accepted)) if stats else (0, 0)
    ratio, abilities = speeds[1] / speeds[0], ours.runner.abilities
    cells = [f"{ratio:.2f}", f"{ours.tokens_per_step:.2f}", f"{drafted}", f"{accepted}", f"{ours.num_tokens}"]
    report.rows.append([line.name, *(f"{speed:.1f}" for speed in speeds), *cells])
    report.figures[line.name] = {
        "plain_tokens_per_second": speeds[0],
        "tokens_per_second": speeds[1],
        "ratio": ratio,
        "tokens_per_step": ours.tokens_per_step,
        "drafted": drafted,
        "accepted": accepted,
        "num_tokens": ours.num_tokens,
        "step_seconds": {} if abilities.feeds is None else dict(abilities.feeds.step_seconds),
        "feeds_together": abilities.feeds_together,
        "rows_form": abilities.rows_form,
    }
    report.add_verdict(line.name, ratio, Target(line.target, is_ceiling=False))
    if line.min_tokens_per_step is not None:
        target = Target(line.min_tokens_per_step, is_ceiling=False)
        report.add_verdict(f"{line.name}, tokens per step", ours.tokens_per_step, target)


PLANNED = (("copying", rewriting, 1), ("copying", rewriting, 8), ("agent", agent, 1), ("agent", agent, 8))
MAX_PLANNING = 40.0
"""Microseconds."""


def planning_microseconds(make: Callable[[int], Text], num_rows: int) -> float:
    """Of this process on the CPU, per row and step: planner, history and all that is pushed, without a model."""
    encode = Vocabulary(VOCAB).encode
    speculation = Speculation(History(), Feeds({1: 0.01, 32: 0.015}, together=True))
    texts = [encode(make(seed).answer) for seed in range(1, num_rows + 1)]
    prompts = [np.array(encode(make(seed).prompt), np.int32) for seed in range(1, num_rows + 1)]
    rows = [speculation.begin(GenerationRequest("", prompt, 1), 0) for prompt in prompts]
    at, is_plain, num_steps, begun = [0] * num_rows, False, 0, time.process_time()
    while all(place < len(text) for place, text in zip(at, texts, strict=True)):
        drafts: list[list[int]] = [[] for _ in rows]
        if not is_plain or speculation.may_draft(rows):
            drafts = speculation.plan(rows, [MAX_FEED_TOKENS] * num_rows, lambda _: [], [1] * num_rows)
        accepted, is_plain = list[int](), not any(drafts)
        for index, (row, draft, text) in enumerate(zip(rows, drafts, texts, strict=True)):
            said = text[at[index] : at[index] + len(draft) + 1]
            accepted.append([*map(int.__eq__, draft, said), False].index(False))
            for token in said[: accepted[-1] + 1]:
                row.push(token)
            at[index] += accepted[-1] + 1
        if is_plain:
            speculation.observe_plain(num_rows, 0.01, 0.0)
        else:
            drafted = [len(draft) for draft in drafts]
            speculation.learn(rows, [1 + number for number in drafted], drafted, accepted, 0.01)
        num_steps += 1
    return (time.process_time() - begun) / num_steps / num_rows * 1e6


def main() -> None:
    """Prints the table; writes it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--seconds", type=float, default=30, help="decoding time of a line (default: 30)")
    parser.add_argument(
        "--cpu", action="store_true", help="count seconds of this process on the CPU, not on the clock"
    )
    names = [*(line.name for line in LINES), "planner"]
    parser.add_argument("--only", choices=names, action="append", help="these lines alone")
    options = parser.parse_args()
    clock = time.process_time if options.cpu else time.monotonic
    columns = ["rows", "tokens/s without", "with drafts", "ratio", "tokens per step", "drafted", "accepted", "tokens"]
    report = Report("Decoding with drafts, recorded answers", columns)
    for line in LINES:
        if options.only is None or line.name in options.only:
            print(f"{line.name} …", file=sys.stderr, flush=True)
            add_to(report, line, *measure(line, options.seconds, clock))
            print("    " + "  ".join(report.rows[-1]), file=sys.stderr, flush=True)
    for name, make, num_rows in PLANNED if options.only is None or "planner" in options.only else ():
        microseconds = min(planning_microseconds(make, num_rows) for _ in range(3))
        report.add_verdict(f"planner, {num_rows} x {name}, µs per row and step", microseconds, Target(MAX_PLANNING))
    print(report.text())
    if options.json is not None:
        write_json(options.json, " ".join(["python -m scripts.bench.speculate", *sys.argv[1:]]), [report])


if __name__ == "__main__":
    main()
