"""How `brim.maximize` does on real programs: failed attempts, and how near to the largest size.

Each program under three limits, six plain calls each. A row for each case that is

- worse: the first call fails more often than halving and once more, or ends lower than halving;
- late: an attempt fails in the third call or later;
- short: the sixth call is more than 3 % and more than one item below what fits;
- promise: the search has not kept one of the promises that hold whatever the program does;
- exhausted: what the program keeps has grown until nothing fits, and only the first call is judged.

Then the totals, by which two versions of brim can be compared: only public names are used.

    ./dev bench programs [-- --only NAME,NAME] [--json FILE] [--seed N] [--turns N]
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
import warnings
from pathlib import Path

from harness import progress
from programs import MULTIPLIERS, PROGRAMS, Case, prepare, run_guarded, seed_of
from results import Table


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names of programs, or parts of them")
    parser.add_argument("--multipliers", default=",".join(map(str, MULTIPLIERS)))
    parser.add_argument("--seed", type=int, default=71)
    parser.add_argument("--turns", type=int, default=1, help="each turn has other random numbers")
    parser.add_argument("--json", type=Path, help="write all cases here")
    parser.add_argument("--against", type=Path, help="name cases judged otherwise in that JSON")
    parser.add_argument("--all", action="store_true", help="rows of good cases, too")
    parser.add_argument("--list", action="store_true", help="print the names only")
    return parser.parse_args()


def verdict(case: Case) -> str:
    if case.error:
        return "broken"
    names = ("worse", "late", "short", "exhausted")
    found = [name for name in names if getattr(case, name)]
    return " ".join(found + ["promise"] * bool(case.broken_promises()))


def row(case: Case) -> str:
    where = f"{case.name} x{case.multiplier:g}"
    if case.error:
        return f"{where:<46} broken  {case.error}"
    halving = f"halving {case.halving} after {case.halving_failures}"
    found = f"{case.sizes} failed {case.failures}"
    line = f"{where:<46} {verdict(case):<12} {found}, best {case.best} of {case.upper}, {halving}"
    return "; ".join([line, *case.broken_promises()[:1]])


def totals(cases: list[Case]) -> dict[str, float]:
    judged = [case for case in cases if not case.error]
    fits = [case for case in judged if case.best]
    shares = {
        f"median share of best in call {k}": [case.sizes[k - 1] / case.best for case in fits]
        for k in (1, 2, 6)
    }
    return {
        "cases": len(judged),
        "worse": sum(case.worse for case in judged),
        "late": sum(case.late for case in judged),
        "short": sum(case.short for case in judged),
        "second call there": sum(case.near(1) for case in judged),
        "breaking a promise": sum(bool(case.broken_promises()) for case in judged),
        "exhausted": sum(case.exhausted for case in judged),
        "broken": len(cases) - len(judged),
        "failed attempts": sum(sum(case.failures) for case in judged),
        "of them after the first call": sum(sum(case.failures[1:]) for case in judged),
        "after the second": sum(sum(case.failures[2:]) for case in judged),
        "first calls of halving": sum(case.halving_failures for case in judged),
        **{name: round(statistics.median(s), 3) for name, s in shares.items() if s},
    }


def compare(cases: list[Case], file: Path) -> None:
    """Cases that another run judged otherwise."""
    old = {
        (c["name"], c["multiplier"], c["seed"]): c for c in json.loads(file.read_text())["cases"]
    }
    for case in cases:
        before = old.get((case.name, case.multiplier, case.seed))
        if before and not case.error and not before["error"] and before["verdict"] != verdict(case):
            print(f"{row(case)}; before: {before['verdict'] or 'good'} {before['sizes']}")


def main() -> None:
    options = arguments()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    only = [part for part in options.only.split(",") if part]
    names = [n for n in PROGRAMS if not only or n in only or any(p in n for p in only)]
    if options.list:
        print("\n".join(names))
        return
    begin = time.perf_counter()
    prepare(names)
    cases: list[Case] = []
    skipped = 0
    for turn in range(options.turns):
        for multiplier in map(float, options.multipliers.split(",")):
            for name in names:
                seed = seed_of(name, multiplier, options.seed + turn)
                case = run_guarded(name, multiplier, seed)
                if case is None:
                    skipped += 1
                    progress(f"{name} x{multiplier:g}: not even one item fits by halving")
                    continue
                cases.append(case)
                if case.error or verdict(case) or options.all or only:
                    print(row(case), flush=True)
    steady = [case for case in cases if not case.varying]
    varying = [case for case in cases if case.varying]
    table = Table(f"{len(names)} programs", ("total", "steady need", "varying need"))
    of_varying = totals(varying)
    for name, value in totals(steady).items():
        table.row(name, f"{value:g}", f"{of_varying[name]:g}" if name in of_varying else "")
    if options.against:
        print(f"Judged otherwise than in {options.against.name}:")
        compare(cases, options.against)
    progress(f"{skipped} cases left out, {time.perf_counter() - begin:.0f} s")
    if options.json:
        content = {
            "totals": totals(steady),
            "varying": totals(varying),
            "cases": [{**case.as_dict(), "verdict": verdict(case)} for case in cases],
        }
        options.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
