"""Trains, exports and grades the `demo` model.

Training needs PyTorch, which the project itself does not: make a second environment for it,

    python3 -m venv .cache/torch && .cache/torch/bin/pip install torch numpy safetensors tokenizers
    export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=8589934592
    .cache/torch/bin/torchrun --nproc-per-node 2 -m scripts.demo.train --out .cache/demo

(without the two settings glibc maps fresh pages for each large product, and training takes three times as long),
while grading uses MLX alone: `.venv/bin/python -m scripts.demo.train --eval models/demo`.
The text comes from `scripts/demo/world.py`. One seed and one `--steps` are one history up to the rounding of the
machine's bfloat16 products. Only what the assistant writes, end marks included, is learned from. Batches hold
dialogues of like length padded to one length, so that no dialogue sees another.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "vocab_size": 1536,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}

HYBRID_TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 6,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 1536,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.5,
    "rope_theta": 100000.0,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [3, 3, 2],
        "rope_theta": 100000.0,
        "partial_rotary_factor": 0.5,
    },
    "tie_word_embeddings": True,
    "attention_bias": False,
}
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": HYBRID_TEXT,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
MODELS = {"demo": CONFIG, "demo-hybrid": HYBRID}


class Plan(NamedTuple):
    """How to train: counts are optimizer steps unless named otherwise."""

    seed: int
    steps: int
    decay_steps: int
    batch_tokens: int
    peak_rate: float
    minutes: float
    warmup_steps: int = 100

    def rate(self, step: int, share_of_time: float) -> float:
        """The learning rate of a step: linear warm-up, constant, then linear to zero.

        It falls over the last `decay_steps` or the second half of the `minutes`, whichever is lower.
        """
        left = min((self.steps - step) / max(1, self.decay_steps), 2 * (1 - share_of_time))
        return self.peak_rate * min(1.0, (step + 1) / self.warmup_steps, max(0.02, left))


class Example(NamedTuple):
    """One dialogue as token ids, and for each whether the model is to learn it."""

    tokens: list[int]
    learned: list[bool]


def draw_shape(rng: random.Random, step: int) -> tuple[int, bool]:
    """Number of exchanges and whether the system prompt is long; short ones first, very long ones late."""
    if step < 300:
        return rng.randrange(1, 4), False
    if step > 600 and rng.random() < 0.03:
        return rng.randrange(15, 45), rng.random() < 0.3
    return rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 10)), rng.random() < 0.06


def make_example(rng: random.Random, tokenizer: Any, step: int) -> Example:
    """A training dialogue of at most 2 560 tokens."""
    from scripts.demo.free_form import is_graded
    from scripts.demo.tokenizer import render
    from scripts.demo.world import training_dialogue

    num_turns, long_system = draw_shape(rng, step)
    dialogue = training_dialogue(rng, num_turns, long_system)
    while is_graded(dialogue):
        dialogue = training_dialogue(rng, num_turns, long_system)
    tokens: list[int] = []
    learned: list[bool] = []
    for text, is_learned in render(dialogue.messages, dialogue.tools):
        ids = tokenizer.encode(text).ids
        tokens += ids
        learned += [is_learned] * len(ids)
    return Example(tokens[:2560], learned[:2560])


def batches(plan: Plan, tokenizer: Any, pool: str, step: int) -> list[list[Example]]:
    """The batches of one pool of 512 dialogues: like lengths together, the shortest first."""
    rng = random.Random(f"{plan.seed}/{pool}")
    examples = sorted((make_example(rng, tokenizer, step) for _ in range(512)), key=lambda e: len(e.tokens))
    groups: list[list[Example]] = [[]]
    for example in examples:
        if (len(groups[-1]) + 1) * padded(len(example.tokens)) > plan.batch_tokens and groups[-1]:
            groups.append([])
        groups[-1].append(example)
    return groups


def padded(length: int) -> int:
    """`length` rounded up to a multiple of 64, to keep the shapes few."""
    return -(-length // 64) * 64


def train(args: argparse.Namespace) -> None:
    """Trains to the end of the plan, with a checkpoint and an export now and then."""
    from tokenizers import Tokenizer

    from scripts.demo.torch import Trainer

    plan = Plan(args.seed, args.steps, args.decay_steps, args.batch_tokens, args.rate, args.minutes)
    out = Path(args.out)
    tokenizer = Tokenizer.from_file(
        str(write_fixed_files(out / "model", plan.seed, MODELS[args.model]) / "tokenizer.json")
    )
    trainer = Trainer(MODELS[args.model], plan.seed, args.threads)
    step, pool = trainer.resume(out / "checkpoint.pt") if args.resume else (args.first_step, 0)
    if args.start is not None and not args.resume:
        trainer.begin_with(Path(args.start) / "model.safetensors")
    began, loss_sum, num_tokens, share = time.monotonic(), 0.0, 0, 0.0
    while step < plan.steps and share < 1:
        pool += 1
        groups = batches(plan, tokenizer, f"{pool}/{trainer.rank}", step)
        groups = groups[-trainer.fewest(len(groups)) :]
        # One order for all processes: at each step they work on dialogues of like length, and none waits long.
        random.Random(f"{plan.seed}/{pool}/order").shuffle(groups)
        for batch in groups:
            share = trainer.fewest(int((time.monotonic() - began) / plan.minutes / 60 * 1e6)) / 1e6
            loss_sum += trainer.step(batch, plan.rate(step, share))
            num_tokens += sum(len(example.tokens) for example in batch)
            step += 1
            is_last = step >= plan.steps or share >= 1
            if step % 25 == 0 and trainer.rank == 0:
                speed = trainer.num_ranks * num_tokens / (time.monotonic() - began)
                print(f"step {step} loss {loss_sum / 25:.4f} {speed:.0f} tokens/s", flush=True)
                loss_sum = 0.0
            if trainer.rank == 0 and (step % args.save_every == 0 or is_last):
                trainer.save(out / "checkpoint.pt", step, pool)
                trainer.export(out / "model" / "model.safetensors")
            if is_last:
                break


def write_fixed_files(folder: Path, seed: int, config: dict[str, Any]) -> Path:
    """Writes config, tokenizer and template into `folder` (an existing tokenizer is kept); returns the folder."""
    from scripts.demo.tokenizer import build_tokenizer, render, write_tokenizer
    from scripts.demo.world import training_dialogue

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": [1529, 1527], "pad_token_id": 1527, "do_sample": False}
    if not (folder / "tokenizer.json").exists():
        rng = random.Random(f"{seed}/tokenizer")
        dialogues = [training_dialogue(rng, rng.randrange(1, 10)) for _ in range(8000)]
        texts = ["".join(piece for piece, _ in render(d.messages, d.tools)) for d in dialogues]
        write_tokenizer(build_tokenizer(texts), folder)
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return folder


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", default=".cache/demo", help="folder for the checkpoint and the exported model")
    parser.add_argument("--model", choices=list(MODELS), default="demo")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--start", metavar="FOLDER", help="start from the weights of the model in FOLDER")
    parser.add_argument(
        "--first-step", type=int, default=0, help="number of the first step; later ones draw longer talks"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--decay-steps", type=int, default=1000, help="steps over which the rate falls to zero")
    parser.add_argument(
        "--minutes", type=float, default=1e6, help="end after so long, the rate falling over the last half"
    )
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--eval", metavar="FOLDER", help="grade the model in FOLDER instead (MLX only)")
    parser.add_argument("--num-prompts", type=int, default=200, help="prompts per skill with --eval")
    parser.add_argument("--show-failures", type=int, default=0, help="with --eval, print wrong answers")
    parser.add_argument("--write-card", action="store_true", help="with --eval, put the table into the model's card")
    return parser.parse_args()


def main() -> None:
    """Trains, or grades with --eval."""
    args = parse_args()
    if args.eval:
        from scripts.demo.grading import evaluate

        evaluate(Path(args.eval), args.num_prompts, args.show_failures, args.write_card)
    else:
        train(args)


if __name__ == "__main__":
    main()
