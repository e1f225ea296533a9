"""The mirror through a million random commands: kills, refusals, budgets, drains, deadlines, pins.

Run as a script; the bounded form is in the test suite. Ends with an error at the first difference, naming the
seed that repeats it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from shaken import Shaken

COMMANDS_A_SEED = 20_000


def main() -> None:
    """Shake one pool after another until enough commands were sent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commands", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="the first; each further pool has the next one")
    options = parser.parse_args()
    commands, seed, start_s = 0, options.seed, time.monotonic()
    totals: dict[str, int] = {}
    while commands < options.commands:
        shaken = Shaken(seed)
        counters = shaken.placement.counters
        try:
            while counters.chunks < min(COMMANDS_A_SEED, options.commands - commands):
                shaken.shake()
            shaken.settle()
        except AssertionError as error:
            sys.exit(f"seed {seed}, command {counters.chunks}: {error or 'the mirror differs'}")
        commands, seed = commands + counters.chunks, seed + 1
        for name in ("refusals", "deaths", "cancelled", "expired", "evictions", "mirror_differences"):
            totals[name] = totals.get(name, 0) + getattr(counters, name)
        print(f"{commands:,} commands in {time.monotonic() - start_s:.0f} s: {totals}", flush=True)


if __name__ == "__main__":
    main()
