"""Trains the MTP module of `demo`, which predicts a token more, on what the model itself would say.

    LD_PRELOAD=libopenblas.so.0 OPENBLAS_NUM_THREADS=1 python -m scripts.demo.mtp --out models/demo/mtp.safetensors
    python -m scripts.demo.mtp --eval

The module is that of `models/mtp.py`, so MLX is enough. It learns the model's distribution behind each token that the
assistant writes in training dialogues of `scripts/demo/world.py`, and further ahead from its own hidden states in
place of the model's, since a draft's later tokens have no others. One seed and one number of steps are one history up
to rounding. Weights are stored in 8 bits. `--eval` tells how many drafted tokens are right on the prompts of
`scripts/demo/grading.py`, none of which was trained on.
"""

import argparse
import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.nn.layers.quantized import quantize
from mlx.nn.losses import cross_entropy
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_flatten
from numpy.typing import NDArray
from tokenizers import Tokenizer

from models.inference.drafters import MtpDrafter
from models.loader import load
from models.mlx_lm_import import load_model
from models.mtp import MtpModule, language_model
from models.weights import MTP_FILE
from scripts.demo.grading import PROBES, probe
from scripts.demo.train import Example, Plan, batches, padded

DEPTH = 2
"""Tokens ahead that are learned."""
MAX_TOKENS = 1024
NUM_POOLS = 3
MAX_ANSWER = 200
STAGE = 1000
"""Of the model's training, whose dialogues are learned from."""


class Batch(NamedTuple):
    """Dialogues, with what the model thinks of them."""

    tokens: mx.array
    """`[num_rows, num_tokens]`."""
    hidden: mx.array
    """Behind the last norm, `[num_rows, num_tokens, width]`."""
    places: list[mx.array]
    """For each depth, flat positions of tokens whose successors are learned."""


class Trainer:
    """A module on a model that stays as it is."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.text = language_model(load_model(folder)[0])
        self.text.freeze()
        mx.random.seed(plan.seed)
        self.module = MtpModule(self.text)
        rates = [optim.linear_schedule(peak, 0.0, plan.steps) for peak in (plan.peak_rate, plan.peak_rate / 4)]
        self._optimizer = optim.MultiOptimizer(
            [optim.Muon(rates[0], weight_decay=0.0), optim.AdamW(rates[1], betas=[0.9, 0.97], weight_decay=0.0)],
            [lambda _, weight: weight.ndim == 2],
        )
        self._gradients = value_and_grad(self.module, self._loss)

    def batch(self, examples: list[Example]) -> Batch:
        """Evaluates the model on dialogues."""
        tokens, learned = _arrays(examples)
        hidden = self.text.model(mx.array(tokens))
        mx.eval(hidden)
        return Batch(mx.array(tokens), hidden, list(_places(learned)))

    def step(self, batch: Batch) -> float:
        """One update; returns the loss before it, of a token at one depth."""
        wanted = [mx.softmax(self._logits(batch.hidden, places), axis=-1) for places in batch.places]
        loss, gradients = self._gradients(batch, wanted)
        gradients, _ = cast(Any, optim).clip_grad_norm(gradients, 1.0)
        self._optimizer.update(self.module, gradients)
        mx.eval(cast(Any, self.module).parameters(), self._optimizer.state, loss)
        return float(loss) / DEPTH

    def _loss(self, batch: Batch, wanted: list[mx.array]) -> mx.array:
        embedded, hidden, losses = self.text.model.embed_tokens(batch.tokens), batch.hidden, []
        for places, distributions in zip(batch.places, wanted, strict=True):
            before = mx.concatenate([mx.zeros_like(hidden[:, :1]), hidden[:, :-1]], axis=1)
            hidden = self.module(embedded, before)
            losses.append(cross_entropy(self._logits(hidden, places), distributions, reduction="mean"))
        return mx.stack(losses).sum()

    def _logits(self, hidden: mx.array, places: mx.array) -> mx.array:
        chosen = hidden.reshape(-1, hidden.shape[-1])[places]
        return cast(mx.array, self.text.model.embed_tokens.as_linear(chosen))

    def save(self, path: Path) -> None:
        """Writes the module in 8 bits, under the names of Qwen's checkpoints."""
        quantize(self.module, group_size=64, bits=8)
        mx.save_safetensors(str(path), checkpoint_names(self.module), metadata={"format": "mlx"})


def checkpoint_names(module: MtpModule) -> dict[str, mx.array]:
    """A module's tensors as a checkpoint names them."""
    theirs = {"embedding_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "projection": "fc"}
    theirs |= {"layer": "layers.0", "norm": "norm"}
    found = dict[str, mx.array]()
    for name, weight in cast(list[tuple[str, mx.array]], tree_flatten(cast(Any, module).parameters())):
        part, _, rest = name.partition(".")
        found[f"mtp.{theirs[part]}.{rest}"] = weight
    return found


def _arrays(examples: list[Example]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Token ids and whether each is learned, `[num_rows, num_tokens]`."""
    shape = len(examples), padded(max(len(example.tokens) for example in examples))
    tokens, learned = np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
    for row, example in enumerate(examples):
        tokens[row, : len(example.tokens)] = example.tokens
        learned[row, : len(example.tokens)] = example.learned
    return tokens, learned


def _places(learned: NDArray[np.bool_]) -> Iterator[mx.array]:
    """At depth d the last d tokens and the next one are the assistant's."""
    chosen = np.zeros_like(learned)
    chosen[:, :-1] = learned[:, :-1] & learned[:, 1:]
    for _ in range(DEPTH):
        yield mx.array(np.flatnonzero(chosen))
        chosen[:, 1:] &= learned[:, :-1]
        chosen[:, 0] = False


def read_batches(trainer: Trainer, plan: Plan, tokenizer: Any) -> list[Batch]:
    """The training dialogues, evaluated once."""
    pools = (batches(plan, tokenizer, f"mtp/{pool}", STAGE) for pool in range(NUM_POOLS))
    short = (
        [one for one in batch if len(one.tokens) <= MAX_TOKENS] for batch in itertools.chain.from_iterable(pools)
    )
    return [trainer.batch(examples) for examples in short if examples]


def train(args: argparse.Namespace) -> None:
    """Trains a module, and writes it."""
    plan = Plan(args.seed, args.steps, args.steps, args.batch_tokens, args.rate, minutes=1e6)
    trainer = Trainer(args.model, plan)
    known = read_batches(trainer, plan, Tokenizer.from_file(str(args.model / "tokenizer.json")))
    rng, began, losses = random.Random(plan.seed), time.process_time(), list[float]()
    while len(losses) < plan.steps:
        losses.append(trainer.step(rng.choice(known)))
        if len(losses) % 25 == 0:
            seconds = time.process_time() - began
            print(
                f"step {len(losses)} loss {np.mean(losses[-25:]):.4f}, {seconds:.0f} s of the processor", flush=True
            )
    trainer.save(args.out)


def evaluate(folder: Path, num_prompts: int) -> None:
    """Prints, for each skill and place in a draft, the share of tokens that are right, of those behind right ones."""
    loaded = load(folder, "demo", max_float32_bytes=1 << 30, with_mtp=True)
    assert loaded.mtp is not None, f"{folder} has no MTP module"
    model, totals = MtpDrafter(loaded.model, loaded.mtp), np.zeros((2, DEPTH))
    print(f"{'':30}" + "".join(f"{place:8}" for place in range(1, DEPTH + 1)))
    for skill in PROBES:
        counts = np.zeros((2, DEPTH))
        for number in range(num_prompts):
            dialogue = probe(skill, number)
            prompt = loaded.tokenizer.apply_chat_template(
                dialogue.messages[:-1], tools=dialogue.tools or None, add_generation_prompt=True, return_dict=False
            )
            counts += _count(model, prompt, loaded.eos_token_ids)
        print(f"{skill:30}" + "".join(f"{share:8.1%}" for share in counts[1] / counts[0]))
        totals += counts
    print(f"{'all':30}" + "".join(f"{share:8.1%}" for share in totals[1] / totals[0]))


def _count(model: MtpDrafter, prompt: list[int], ends: frozenset[int]) -> NDArray[np.float64]:
    """How many tokens were tried and right at each place of the drafts of one answer, `[2, DEPTH]`."""
    caches, output, drafts = model.make_cache(), list[int](), list[list[int]]()
    found = model.evaluate(mx.array([prompt]), caches, [len(prompt)], [None])
    while len(output) < MAX_ANSWER and not ends & set(output):
        output += cast(list[int], mx.argmax(found.logits[-1:], axis=-1).tolist())
        drafted = model.draft(caches, output[-1:], found.behind[-1:], DEPTH)
        drafts.append(cast(list[int], drafted.tolist()))
        found = model.evaluate(mx.array([output[-1:]]), caches, [1], [found.behind[-1:]])
    counts = np.zeros((2, DEPTH))
    for stop, draft in enumerate(drafts, 1):
        for place, (token, said) in enumerate(zip(draft, output[stop:], strict=False)):
            counts[:, place] += 1, token == said
            if token != said:
                break
    return counts


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/demo"))
    parser.add_argument("--out", type=Path, default=Path(".cache") / MTP_FILE)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--rate", type=float, default=0.015, help="of matrices, at first; falls to zero")
    parser.add_argument("--eval", action="store_true", help="tell how often drafts are right instead")
    parser.add_argument("--num-prompts", type=int, default=10, help="prompts per skill with --eval")
    return parser.parse_args()


def main() -> None:
    """Trains, or measures with --eval."""
    args = parse_args()
    if args.eval:
        evaluate(args.model, args.num_prompts)
    else:
        train(args)


if __name__ == "__main__":
    main()
