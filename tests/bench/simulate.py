"""Placement against the rules of other routers, on simulated replicas: one table, JSON and a picture.

Run as a script; it needs neither Ray nor a model nor a GPU. Every row is one workload under one memory limit.
Of each policy: hit rate in per cent of what one cache without limit would reach, makespan over the bound that
no schedule can beat, and the busiest replica's time over the mean. Ours runs offline (the whole job is known)
and as a stream of which the router sees 64 or 4,096 waiting requests; the others choose one by one.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from commanded import TOKEN_BYTES, UNLIMITED, Outcome, Pool
from drawing import draw
from rivals import POLICIES, push
from workloads import WORKLOADS, Workload

OURS = {"ours, offline": None, "ours, 4,096": 4096, "ours, 64": 64}
GOALS = {"ours, offline": 99.0, "ours, 4,096": 95.0, "ours, 64": 97.0}


def outcome(workload: Workload, policy: str, *, pressure: bool, replicas: int, clients: int) -> Outcome:
    """One run of one policy, ours or another's."""
    if policy in OURS:
        budget = workload.budget_tokens * TOKEN_BYTES if pressure else UNLIMITED
        return Pool(workload, replicas, budget, lookahead=OURS[policy], clients=clients).run()
    return push(workload, replicas, workload.budget_tokens if pressure else UNLIMITED, POLICIES[policy])


def compare(names: list[str], policies: list[str], replicas: int, clients: int) -> list[dict[str, object]]:
    """Every policy on every workload, with and without memory pressure."""
    found: list[dict[str, object]] = []
    for name in names:
        workload = WORKLOADS[name]()
        for pressure in (True, False):
            print(
                f"\n{name}: {len(workload):,} requests, ideal hit {100 * workload.ideal_hit:.1f} %, "
                f"{workload.budget_tokens:,} tokens a replica" + ("" if pressure else " (no limit)")
            )
            for policy in policies:
                got = outcome(workload, policy, pressure=pressure, replicas=replicas, clients=clients)
                print(
                    f"  {policy:16} hit {got.hit_share:6.2f} % of ideal, makespan / bound "
                    f"{got.slowdown:6.3f}, imbalance {got.imbalance:5.3f}, {got.counters}",
                    flush=True,
                )
                found.append(
                    {
                        "workload": name,
                        "pressure": pressure,
                        "policy": policy,
                        "hit_share": got.hit_share,
                        "slowdown": got.slowdown,
                        "imbalance": got.imbalance,
                        **asdict(got),
                    }
                )
    return found


def table(found: list[dict[str, object]], policies: list[str]) -> str:
    """A line a workload and memory limit, a column a policy: hit rate in % of ideal / makespan over bound."""
    lines = [" " * 30 + "".join(f"{policy:>16}" for policy in policies)]
    for name, pressure in dict.fromkeys((str(row["workload"]), row["pressure"]) for row in found):
        rows = [row for row in found if (row["workload"], row["pressure"]) == (name, pressure)]
        cells = [f"{row['hit_share']:.1f} / {row['slowdown']:.2f}" for row in rows]
        lines.append(
            f"{name + (', pressure' if pressure else ', fits'):30}" + "".join(f"{c:>16}" for c in cells)
        )
    return "\n".join(lines)


def main() -> None:
    """Parse the arguments, compare, write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), help="names; all by default")
    parser.add_argument("--policies", nargs="*", default=[*POLICIES, *OURS], help="names; all by default")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--clients", type=int, default=1, help="how many share the requests of a stream")
    parser.add_argument("--json", type=Path, help="where to write every figure")
    parser.add_argument("--picture", type=Path, help="where to draw hit rates and makespans as SVG")
    options = parser.parse_args()
    for kind, known in (("workloads", WORKLOADS), ("policies", {**POLICIES, **OURS})):
        unknown = [name for name in getattr(options, kind) if name not in known]
        if unknown:
            parser.error(f"unknown {kind} {unknown}: known are {', '.join(known)}")
    found = compare(options.workloads, options.policies, options.replicas, options.clients)
    print("\n" + table(found, options.policies))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    if options.picture:
        options.picture.write_text(draw(found, options.policies))


if __name__ == "__main__":
    main()
