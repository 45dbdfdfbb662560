# mypy: disable-error-code="import-not-found,misc,no-any-return,untyped-decorator"
"""The demo models in PyTorch: qwen3, and qwen3_5 for `demo-hybrid`, with the parameter names of their files.

For training only; nothing else imports it. Hidden matrices are updated by Muon (orthogonalised momentum; Jordan et
al. 2024), embedding and norms by AdamW. What is exported is an exponential average of the weights.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.fx.experimental._config
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`x` with its last axis at unit mean square, scaled."""
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Causal self-attention with grouped keys, normed queries and keys, and rotary positions."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.head_dim = c["head_dim"]
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(c["hidden_size"], width, bias=False)
        self.k_proj = nn.Linear(c["hidden_size"], kv_width, bias=False)
        self.v_proj = nn.Linear(c["hidden_size"], kv_width, bias=False)
        self.o_proj = nn.Linear(width, c["hidden_size"], bias=False)
        self.q_norm = RMSNorm(self.head_dim, c["rms_norm_eps"])
        self.k_norm = RMSNorm(self.head_dim, c["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Shapes: `x` [batch, tokens, hidden], `cos` and `sin` [tokens, head_dim / 2]."""
        rows, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(rows, length, self.num_heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(rows, length, self.num_kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` with the halves of its last axis turned into each other by the angles of its position."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Feedforward(nn.Module):
    """Gated two-layer network."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape out as in."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and added to the stream."""

    def __init__(self, c: dict[str, Any], index: int) -> None:
        super().__init__()
        self.is_recurrent = (index + 1) % c.get("full_attention_interval", 1) != 0
        if self.is_recurrent:
            self.linear_attn = _gated_delta().GatedDeltaNet(c)
        else:
            is_gated = "full_attention_interval" in c
            self.self_attn = _gated_delta().GatedAttention(c) if is_gated else Attention(c)
        self.mlp = Feedforward(c)
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Same shape out as in."""
        mixer = self.linear_attn if self.is_recurrent else self.self_attn
        x = x + mixer(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def _gated_delta() -> Any:
    from scripts.demo import gated_delta

    return gated_delta


class Network(nn.Module):
    """The whole model; parameter names gain a prefix when exported."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, index) for index in range(c["num_hidden_layers"]))
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        half = int(c["head_dim"] * c.get("partial_rotary_factor", 1)) // 2
        self.frequencies = c["rope_theta"] ** (-torch.arange(half) / half)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(
                    parameter,
                    std=0.005 if any(part in name for part in ("o_proj", "out_proj", "down_proj")) else 0.03,
                )

    def forward(self, tokens: Tensor, where: Tensor, targets: Tensor) -> Tensor:
        """Mean loss over the flat positions `where`, whose next tokens are `targets`."""
        x = self._through_layers(tokens)
        chosen = self.norm(x.reshape(-1, x.shape[-1])[where])
        return F.cross_entropy(F.linear(chosen, self.embed_tokens.weight).float(), targets)

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [rows, tokens, vocabulary] after each token."""
        return F.linear(self.norm(self._through_layers(tokens)), self.embed_tokens.weight)

    def _through_layers(self, tokens: Tensor) -> Tensor:
        angles = torch.arange(tokens.shape[1])[:, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        x: Tensor = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


class Trainer:
    """Weights, optimizers and their average, in one process or in several alike (started by torchrun)."""

    def __init__(self, config: dict[str, Any], seed: int, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self.rank, self.num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if self.num_ranks > 1:
            dist.init_process_group("gloo")
        self.prefix = "model." if config["model_type"] == "qwen3" else "language_model.model."
        self.network = Network(config.get("text_config", config))
        torch.fx.experimental._config.use_duck_shape = False
        for layer in self.network.layers:
            if not layer.is_recurrent:
                layer.compile(dynamic=True)
        matrices = [p for n, p in self.network.named_parameters() if p.dim() == 2 and "embed" not in n]
        others = [p for n, p in self.network.named_parameters() if p.dim() != 2 or "embed" in n]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.97), weight_decay=0.0),
        ]
        self.average = {name: value.detach().clone() for name, value in self.network.state_dict().items()}
        self.num_steps = 0

    def step(self, batch: list[Any], rate: float) -> float:
        """One update on a batch of examples at the learning rate `rate`; returns the loss before it."""
        tokens, where, targets = tensors(batch)
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.network(tokens, where, targets)
        loss.backward()
        self._share_gradients()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._average()
        return float(loss.detach())

    def _share_gradients(self) -> None:
        if self.num_ranks == 1:
            return
        gradients = [p.grad for p in self.network.parameters() if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient) / self.num_ranks)

    def fewest(self, count: int) -> int:
        """The smallest `count` of all processes."""
        least = torch.tensor([count])
        if self.num_ranks > 1:
            dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def _average(self) -> None:
        self.num_steps += 1
        weight = max(0.01, 1 / self.num_steps)
        for name, value in self.network.state_dict().items():
            self.average[name].lerp_(value, weight)

    def save(self, path: Path, step: int, pool: int) -> None:
        """Writes everything needed to go on."""
        state = {
            "network": self.network.state_dict(), "average": self.average, "step": step, "pool": pool,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers], "num_steps": self.num_steps,
        }  # fmt: skip
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)

    def resume(self, path: Path) -> tuple[int, int]:
        """Loads what `save` wrote; returns the step and the pool."""
        state = torch.load(path)
        self.network.load_state_dict(state["network"])
        self.average, self.num_steps = state["average"], state["num_steps"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return state["step"], state["pool"]

    def begin_with(self, weights: Path) -> None:
        """Starts from exported weights; the average forgets them as it would forget any others."""
        loaded = {name.removeprefix(self.prefix): value for name, value in load_file(weights).items()}
        self.network.load_state_dict(loaded)
        self.average = {name: value.clone() for name, value in self.network.state_dict().items()}
        self.num_steps = 100

    def export(self, path: Path) -> None:
        """Writes the averaged weights as float32 safetensors."""
        weights = {self.prefix + name: _as_mlx(value) for name, value in self.average.items()}
        save_file(weights, path, metadata={"format": "mlx"})


def _as_mlx(value: Tensor) -> Tensor:
    """A weight in MLX's order of axes, in which the channels of a convolution come last."""
    return (value.transpose(1, 2) if value.dim() == 3 else value).contiguous()


def tensors(batch: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Padded tokens [rows, length], two rows at least; flat positions before each learned token; those tokens."""
    length = -(-max(len(example.tokens) for example in batch) // 64) * 64
    tokens = torch.zeros(max(2, len(batch)), length, dtype=torch.long)
    where, targets = [], []
    for row, example in enumerate(batch):
        tokens[row, : len(example.tokens)] = torch.tensor(example.tokens)
        spots = [spot for spot in range(1, len(example.tokens)) if example.learned[spot]]
        where += [row * length + spot - 1 for spot in spots]
        targets += [example.tokens[spot] for spot in spots]
    return tokens, torch.tensor(where), torch.tensor(targets)
