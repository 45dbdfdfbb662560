"""Figures of a replay, and where the tokens went that were evaluated again."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cache.trie import NodeMatch, PrefixTrie
from cache.types import TokenArray
from scripts.replay.drive import Outcome, Request, Sample
from server.cli.bench import markdown_table

TOKENS_PER_SECOND = 1_200.0
HALVING_TOKENS = 65_536
"""Prefill is half as fast at this depth."""
DISK_BYTES_PER_SECOND = 4e9

Figures = dict[str, Any]


def prefill_seconds(start: int, stop: int) -> float:
    """Returns estimated seconds to evaluate the tokens `[start, stop)`: the cost per token grows with its depth."""
    return ((stop - start) + (stop**2 - start**2) / (2 * HALVING_TOKENS)) / TOKENS_PER_SECOND


def seconds_to_first_token(sample: Sample) -> float:
    """Returns estimated seconds from arrival to first token on a machine that has nothing else to do."""
    return sample.disk_bytes / DISK_BYTES_PER_SECOND + prefill_seconds(sample.hit_tokens, sample.num_prompt)


def figures_of(outcome: Outcome) -> Figures:
    """Returns a contestant's figures by name. Hit rate and times are those of conversations, not of one-shots."""
    samples = [sample for sample in outcome.samples if not sample.is_one_shot]
    seconds = [seconds_to_first_token(sample) for sample in samples]
    policy = [1e3 * sample.policy_seconds for sample in samples]
    record = [1e3 * sample.record_seconds for sample in samples]
    written = outcome.disk_written_bytes
    return {
        "hit_rate": _hit_rate(samples),
        "hit_rate_all": _hit_rate(outcome.samples),
        "requests": len(samples),
        "one_shots": len(outcome.samples) - len(samples),
        "prompt_tokens": sum(sample.num_prompt for sample in samples),
        "reevaluated_tokens": sum(sample.num_prompt - sample.hit_tokens for sample in samples),
        "zero_hit_extensions": sum(sample.is_extension and not sample.hit_tokens for sample in samples),
        **{f"ttft_p{p}_seconds": _percentile(seconds, p) for p in (50, 95, 99)},
        "snapshots": outcome.num_snapshots,
        "snapshots_captured": outcome.num_captured,
        "live_bytes": outcome.live_bytes,
        "memory_bytes": outcome.memory_bytes,
        "disk_bytes": outcome.disk_bytes,
        "evictions": outcome.num_evictions,
        "disk_written_bytes": written,
        "disk_written_bytes_per_1000_requests": written * 1000 / len(outcome.samples) if outcome.samples else 0.0,
        "policy_ms_median": _percentile(policy, 50),
        "policy_ms_p99": _percentile(policy, 99),
        "record_ms_median": _percentile(record, 50),
        **outcome.notes,
    }


def _hit_rate(samples: Sequence[Sample]) -> float:
    num_prompt = sum(sample.num_prompt for sample in samples)
    return sum(sample.hit_tokens for sample in samples) / num_prompt if num_prompt else math.nan


def _percentile(values: Sequence[float], percent: int) -> float:
    return float(np.percentile(values, percent)) if values else math.nan


# ----------------------------------------------------------------------------------------------------- the table

_COLUMNS = (
    "cache",
    "hit rate",
    "evaluated again",
    "TTFT p50 s",
    "p95",
    "p99",
    "snapshots",
    "live GB",
    "memory GB",
    "disk GB",
    "evictions",
    "SSD writes GB",
    "policy ms",
    "p99",
)


def table(rows: Mapping[str, Figures]) -> str:
    """Returns the figures of all contestants as a Markdown table."""
    return "\n".join(markdown_table(_COLUMNS, [[name, *_cells(figures)] for name, figures in rows.items()]))


def _cells(figures: Figures) -> list[str]:
    return [
        f"{figures['hit_rate']:.4f}",
        f"{figures['reevaluated_tokens'] / 1e6:.2f} M",
        *(f"{figures[f'ttft_p{p}_seconds']:.1f}" for p in (50, 95, 99)),
        f"{figures['snapshots']}",
        *(f"{figures[name] / 1e9:.1f}" for name in ("live_bytes", "memory_bytes", "disk_bytes")),
        f"{figures['evictions']}",
        f"{figures['disk_written_bytes'] / 1e9:.1f}",
        f"{figures['policy_ms_median']:.2f}",
        f"{figures['policy_ms_p99']:.2f}",
    ]


# --------------------------------------------------------------------------------------------------------- losses


class Oracle:
    """Remembers every token that was ever evaluated, so that new text can be told from forgotten text."""

    def __init__(self) -> None:
        self._trie = PrefixTrie()
        self.known: dict[str, int] = {}
        """By request: how many leading prompt tokens had been evaluated before it."""

    def see(self, request: Request) -> None:
        """Looks a request up, then remembers it."""
        match: NodeMatch = self._trie.match(request.prompt[:-1])
        self.known[request.name] = match.length
        whole: TokenArray = np.concatenate([request.prompt, request.output[:-1]])
        self._trie.extend(self._trie.root, whole)


def losses(samples: Sequence[Sample], unlimited: Sequence[Sample], known: Mapping[str, int]) -> Figures:
    """Returns the prompt tokens that were evaluated, by cause and by kind of request.

    * `new`: never evaluated before;
    * `no_restore_point`: known, but not even unlimited memory had a restore point there;
    * `snapshot_evicted`: the tokens were still known, a restore point that unlimited memory has was not;
    * `span_evicted`: the tokens themselves were gone.
    """
    by_kind: dict[str, Counter[str]] = {}
    for sample, ideal in zip(samples, unlimited, strict=True):
        if not sample.is_one_shot:
            kind = "extension" if sample.is_extension else "other"
            by_kind.setdefault(kind, Counter()).update(_causes(sample, ideal, known[sample.request_name]))
    return {kind: dict(counts) for kind, counts in by_kind.items()}


def _causes(sample: Sample, ideal: Sample, known: int) -> dict[str, int]:
    reachable = max(ideal.hit_tokens, sample.hit_tokens)
    present = min(max(sample.match_tokens, sample.hit_tokens), reachable)
    return {
        "requests": 1,
        "new": sample.num_prompt - known,
        "no_restore_point": known - reachable,
        "span_evicted": reachable - present,
        "snapshot_evicted": present - sample.hit_tokens,
    }


def loss_table(by_kind: Mapping[str, Mapping[str, int]], num_prompt: int) -> str:
    """Returns the losses as a Markdown table, in thousandths of all prompt tokens."""
    causes = ("new", "no_restore_point", "snapshot_evicted", "span_evicted")
    rows = [
        [kind, str(counts["requests"]), *(f"{1e3 * counts[cause] / num_prompt:.2f}" for cause in causes)]
        for kind, counts in sorted(by_kind.items())
    ]
    return "\n".join(markdown_table(["‰ of prompt tokens", "requests", *(c.replace("_", " ") for c in causes)], rows))
