"""``python -m fuzz``: fuzz a server; with status 1 if anything was found."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from fuzz import runner
from fuzz.runner import Plan
from fuzz.subject import PROFILES, Server
from fuzz.surfaces import SURFACES


def main() -> int:
    """Fuzz as the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m fuzz", description="Send inputs that are wrong, and look what becomes of it."
    )
    parser.add_argument("--inputs", type=int, default=0, help="stop after so many inputs")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so many minutes; 5 if nothing is said")
    parser.add_argument(
        "--surfaces", default=",".join(SURFACES), help=f"which, with commas between: {', '.join(SURFACES)}"
    )
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(10**6), help="equal seeds make equal inputs"
    )
    parser.add_argument(
        "--profile", default="plain", help=f"flags of the server: {', '.join(PROFILES)}; or all, in turns"
    )
    parser.add_argument("--tls", action="store_true", help="go through TLS")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="where findings are written")
    said = parser.parse_args()
    names = [name for name in said.surfaces.split(",") if name]
    if unknown := set(names) - set(SURFACES):
        parser.error(f"no such surface: {', '.join(sorted(unknown))}")
    profiles = tuple(PROFILES) if said.profile == "all" else tuple(said.profile.split(","))
    if unknown := set(profiles) - set(PROFILES):
        parser.error(f"no such profile: {', '.join(sorted(unknown))}")
    seconds = 60 * (said.minutes or (0.0 if said.inputs else 5.0))
    plan = Plan(said.seed, names, said.inputs, seconds, profiles, said.findings)
    print(f"Seed {said.seed}.", flush=True)
    run = runner.go(
        lambda profile, patience: Server(profile, tls=said.tls, patience=patience),
        plan,
        lambda text: print(text, flush=True),
    )
    print(run.tally.table(run.seconds))
    for finding in run.findings.values():
        print(finding)
    print(f"{len(run.findings)} findings with seed {said.seed}.")
    return 1 if run.findings else 0


if __name__ == "__main__":
    sys.exit(main())
