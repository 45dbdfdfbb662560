# mypy: disable-error-code="import-not-found,misc,no-any-return,untyped-decorator"
"""The layers of `demo-hybrid` in PyTorch: a gated delta net, and attention with an output gate, as in qwen3_5.

The gated delta rule (Yang et al. 2024) is evaluated in chunks, whose parts are matrix products: within a chunk the
rule is a triangular system, between chunks a state goes on. `tests/scripts/test_demo_torch.py` compares it with
mlx-lm's rule, token by token, where PyTorch is installed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.demo.torch import RMSNorm, rotate

CHUNK = 64


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Returns the outputs [rows, heads, tokens, value_dim] of the rule from an empty state.

    Shapes: `q` and `k` [rows, heads, tokens, key_dim], `v` [rows, heads, tokens, value_dim], `log_decay` and `beta`
    [rows, heads, tokens]. The number of tokens is a multiple of `CHUNK`.
    """
    q, k, v = (_chunked(x) for x in (q, k, v))
    log_decay, beta = _chunked(log_decay), _chunked(beta)
    total = log_decay.cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    k_beta, v_beta = k * beta[..., None], v * beta[..., None]
    system = (k_beta @ k.transpose(-1, -2) * decay).tril(-1) + torch.eye(CHUNK)
    wanted = torch.cat((v_beta, k_beta * total[..., None].exp()), -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    value, carried = solved.split((v.shape[-1], k.shape[-1]), -1)
    within = q @ k.transpose(-1, -2) * decay
    q_before = q * total[..., None].exp()
    last = total[..., -1:]
    k_after = k * (last - total)[..., None].exp()
    state = torch.zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for chunk in range(q.shape[2]):
        new = value[:, :, chunk] - carried[:, :, chunk] @ state
        outputs.append(q_before[:, :, chunk] @ state + within[:, :, chunk] @ new)
        state = state * last[:, :, chunk, :, None].exp() + k_after[:, :, chunk].transpose(-1, -2) @ new
    return torch.stack(outputs, 2).flatten(2, 3)


def _chunked(x: Tensor) -> Tensor:
    """`x` with its third axis, the tokens, as [chunks, CHUNK]."""
    return x.unflatten(2, (-1, CHUNK)).float()


class GatedDeltaNet(nn.Module):
    """Recurrent mixing: a short convolution, then the gated delta rule, normed and gated."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.num_k_heads, self.num_v_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        self.k_dim, self.v_dim = c["linear_key_head_dim"], c["linear_value_head_dim"]
        self.keys, self.values = self.num_k_heads * self.k_dim, self.num_v_heads * self.v_dim
        self.kernel = c["linear_conv_kernel_dim"]
        hidden, mixed = c["hidden_size"], 2 * self.keys + self.values
        self.in_proj_qkv = nn.Linear(hidden, mixed, bias=False)
        self.in_proj_z = nn.Linear(hidden, self.values, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.num_v_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.num_v_heads, bias=False)
        self.conv1d = nn.Conv1d(mixed, mixed, self.kernel, groups=mixed, bias=False)
        self.A_log = nn.Parameter(torch.linspace(0.02, 2.0, self.num_v_heads).log())
        self.dt_bias = nn.Parameter(torch.full((self.num_v_heads,), -2.0))
        self.norm = RMSNorm(self.v_dim, c["rms_norm_eps"])
        self.out_proj = nn.Linear(self.values, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Same shape out as in: [rows, tokens, hidden]; positions are not used."""
        rows, length, _ = x.shape
        shifted = F.pad(self.in_proj_qkv(x).transpose(1, 2), (self.kernel - 1, 0))
        mixed = F.silu(self.conv1d(shifted)).transpose(1, 2)
        q, k, v = mixed.split((self.keys, self.keys, self.values), -1)
        q, k = (F.normalize(self._heads(part, self.num_k_heads), dim=-1, eps=1e-6) for part in (q, k))
        repeats = self.num_v_heads // self.num_k_heads
        q, k = q.repeat_interleave(repeats, 1) * self.k_dim**-0.5, k.repeat_interleave(repeats, 1)
        log_decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        beta = self.in_proj_b(x).float().sigmoid()
        with torch.autocast("cpu", enabled=False):
            values = self._heads(v, self.num_v_heads)
            out = gated_delta_rule(q, k, values, log_decay.transpose(1, 2), beta.transpose(1, 2))
        gate = self.in_proj_z(x).view(rows, length, self.num_v_heads, self.v_dim).float()
        gated = F.silu(gate) * self.norm(out.transpose(1, 2))
        mixed_out: Tensor = self.out_proj(gated.reshape(rows, length, -1))
        return mixed_out

    @staticmethod
    def _heads(x: Tensor, num_heads: int) -> Tensor:
        return x.unflatten(-1, (num_heads, -1)).transpose(1, 2).float()


class GatedAttention(nn.Module):
    """Causal attention with grouped, normed heads, positions in a part of each, and a gate on what comes out."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.head_dim = c["head_dim"]
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(c["hidden_size"], 2 * width, bias=False)
        self.k_proj = nn.Linear(c["hidden_size"], kv_width, bias=False)
        self.v_proj = nn.Linear(c["hidden_size"], kv_width, bias=False)
        self.o_proj = nn.Linear(width, c["hidden_size"], bias=False)
        self.q_norm = RMSNorm(self.head_dim, c["rms_norm_eps"])
        self.k_norm = RMSNorm(self.head_dim, c["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Shapes: `x` [rows, tokens, hidden], `cos` and `sin` [tokens, half of the rotated part of a head]."""
        rows, length, _ = x.shape
        q, gate = self.q_proj(x).view(rows, length, self.num_heads, -1).chunk(2, -1)
        k = self.k_proj(x).view(rows, length, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).view(rows, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        q, k = self._rotate_part(q, cos, sin).to(v.dtype), self._rotate_part(k, cos, sin).to(v.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        out: Tensor = self.o_proj(mixed.reshape(rows, length, -1) * gate.reshape(rows, length, -1).sigmoid())
        return out

    @staticmethod
    def _rotate_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, still = x.split((2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]), -1)
        return torch.cat((rotate(turned, cos, sin), still), -1)
