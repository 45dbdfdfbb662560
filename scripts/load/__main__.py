"""Proves under load what the server promises: it answers right, stays up, and gives memory back.

    python -m scripts.load                    all of them
    python -m scripts.load fuzz --seed 7      one of them, with other random requests

Each starts a server of its own on loopback, is bounded in time, and ends by itself. The exit status is 1 where one
does not hold.
"""

import argparse
import time
from collections.abc import Callable, Mapping

from scripts.load import document, faults, fuzz, idle, ranks, slow_clients, streams

PROOFS: Mapping[str, Callable[[argparse.Namespace], bool]] = {
    "fuzz": fuzz.run,
    "streams": streams.run,
    "slow": slow_clients.run,
    "idle": idle.run,
    "document": document.run,
    "faults": faults.run,
    "ranks": ranks.run,
}


def main() -> int:
    """Runs what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(PROOFS)}; all by default")
    parser.add_argument("--seed", type=int, default=1, help="of the random requests")
    parser.add_argument("--requests", type=int, default=20_000, help="fuzz: how many")
    parser.add_argument("--first", type=int, default=0, help="fuzz: the number of the first one, to repeat one")
    parser.add_argument("--leak", type=int, default=0, help="fuzz: bytes lost with each request, which must be found")
    parser.add_argument(
        "--seconds", type=float, default=1500.0, help="fuzz, document, an eighth of faults: after which it is ended"
    )
    parser.add_argument("--files", type=int, help="slow: how many the server may open; 4096 and then 256 by default")
    parser.add_argument("--stream-seconds", type=float, default=120.0, help="streams, ranks: how long clients ask")
    parser.add_argument("--examples", type=int, default=20, help="document: for each operation")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(PROOFS))
    if unknown:
        parser.error(f"there is no proof {unknown[0]!r}; there are {', '.join(PROOFS)}")
    results = [_prove(name, args) for name in args.names or PROOFS]
    return 0 if all(results) else 1


def _prove(name: str, args: argparse.Namespace) -> bool:
    began = time.monotonic()
    holds = PROOFS[name](args)
    print(f"{name}: {'holds' if holds else 'FAILED'}, {time.monotonic() - began:.0f} s", flush=True)
    return holds


if __name__ == "__main__":
    raise SystemExit(main())
