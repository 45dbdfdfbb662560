"""What `serve` says of itself when it is ready: one fact a line, each no wider than a terminal."""

import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from models.fast_blas import ADVICE
from models.precision import Precision
from models.short_names import size_text
from server.claims import Claim
from server.config import ServerConfig
from server.service import Service

SLOW_SECONDS = 0.5
"""A token that takes longer is worth a warning before anyone waits for an answer."""


@dataclass(frozen=True)
class Surroundings:
    """What a start found on the machine."""

    others: Sequence[Claim]
    """Servers that run already."""
    fast_blas: str | None
    """The library that multiplies matrices in place of MLX's own."""
    urls: Sequence[str]
    """Where the server is reached, from this machine first."""


def facts(service: Service, config: ServerConfig, around: Surroundings) -> Iterator[tuple[str, str]]:
    """Yields a label and a text for each fact; a label is empty where the line goes on with the one before."""
    model = service.asked_for
    yield "model", f"{model.id}, {count_text(service.num_parameters)} parameters"
    yield "weights", weights_text(service)
    if service.variants:
        yield "adapters", ", ".join(service.variants)
    if service.seconds_per_token is not None and sys.platform == "linux":
        yield "blas", around.fast_blas or f"MLX's own, slow with long prompts; {ADVICE}"
    yield "cache", _cache_text(service, config)
    yield "rest", _rest_text(service)
    for other in around.others:
        # A server tells its model and what it takes once it has loaded.
        told = f"{size_text(other.memory_bytes)} are claimed by {other.model}"
        yield "beside", f"{told if other.model else 'a server is starting'}, process {other.pid}"
    limit = "" if model.context_tokens < service.model_context_tokens else " (the model's limit)"
    yield "context", f"{model.context_tokens} tokens{limit}"
    if config.cache_disk_bytes is not None:
        per_day = config.cache_disk_write_bytes_per_day
        limit = f", at most {size_text(per_day)} written a day" if per_day is not None else ""
        yield "disk", f"{size_text(config.cache_disk_bytes)} in {config.cache_dir}{limit}"
        room_bytes = _room_bytes(service, config)
        if room_bytes is not None and room_bytes < config.cache_disk_bytes:
            yield "", f"of which the disk has room for {size_text(room_bytes)}"
    yield "slots", f"{config.slots} conversations at once, {config.max_waiting} more may wait"
    if config.insecure_no_key and not config.needs_key:
        yield "key", "none: anyone who reaches the address can use this server"
    yield "address", f"{around.urls[0]}/v1"
    for url in around.urls[1:]:
        yield "", f"{url}/v1 from other machines"
    if config.console:
        yield "console", f"{around.urls[0]}/"


def weights_text(service: Service) -> str:
    """Returns what the weights take in memory, and why that is not what they take on disk."""
    held = size_text(service.memory.weights_bytes)
    if service.precision is Precision.STORED:
        return held
    return f"{held}, as {service.precision.value}: fastest on this CPU ({size_text(service.stored_bytes)} on disk)"


def slowness(service: Service) -> str | None:
    """Returns a warning for a model that this processor is too slow for; None if it is not."""
    seconds = service.seconds_per_token
    if seconds is None or seconds < SLOW_SECONDS:
        return None
    cure = "a smaller model is faster, as is a Mac with Apple silicon"
    if service.precision is Precision.FLOAT32_SCALES:
        cure = f"with memory for float32 weights it would be faster; {cure}"
    return f"Expect about {seconds:.1f} s per token on this processor: {cure}."


def _cache_text(service: Service, config: ServerConfig) -> str:
    budget_bytes = service.memory.budget_bytes
    per_token = service.engine.stats().cache.bytes_per_token
    tokens = f", about {round_count(budget_bytes / per_token)} tokens" if per_token else ""
    source = " (--cache-memory)"
    if config.cache_memory_bytes is not None:
        source = ""
    elif service.memory.others_bytes:
        source = ", beside others (--cache-memory)"
    return f"{size_text(budget_bytes)}{tokens}{source}"


def _room_bytes(service: Service, config: ServerConfig) -> int | None:
    """Returns what the disk has free, and what of it is state already; None where it cannot be looked at."""
    try:
        free_bytes = shutil.disk_usage(Path(config.cache_dir).expanduser()).free
    except OSError:
        return None
    return free_bytes + service.engine.stats().cache.disk_bytes


def _rest_text(service: Service) -> str:
    memory = service.memory
    if memory.rest_bytes < 0:
        return f"none: over the machine's {size_text(memory.machine_bytes)} in all; lower --cache-memory"
    return f"{size_text(memory.rest_bytes)} of {size_text(memory.machine_bytes)} for everything else on this machine"


def example_call(url: str, model: str, needs_key: bool) -> str:
    """Returns a command for the shell that asks the server something."""
    key = "-H 'Authorization: Bearer YOUR_KEY' " if needs_key else ""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]}, ensure_ascii=False)
    return (
        f"curl {url}/v1/chat/completions \\\n  {key}-H 'Content-Type: application/json' \\\n  -d {shlex.quote(body)}"
    )


def count_text(number: int) -> str:
    """Returns a count as people read it, such as `1.7 million`."""
    for word, unit in (("billion", 10**9), ("million", 10**6)):
        if number >= unit:
            return f"{number / unit:.1f} {word}"
    return f"{number}"


def round_count(number: float) -> str:
    """Returns an estimate as people read it: two digits that mean something, such as `137 000` or `1.4 million`."""
    if number >= 10**6:
        return count_text(int(number))
    unit = 1000 if number >= 10_000 else 100 if number >= 1000 else 1
    return f"{int(number / unit) * unit:,}".replace(",", " ")
