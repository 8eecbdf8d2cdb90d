"""What ``import boostax`` adds to importing JAX, Flax and Optax.

Fresh interpreters take turns with and without boostax; the median of the ratios within a round
is reported::

    python benchmarks/import_time.py [ROUNDS]
"""

from __future__ import annotations

import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PLAIN = "import jax, flax, optax"
CODE = "import time\nt = time.process_time()\n{}\nprint(time.process_time() - t)"


def seconds(statement: str) -> float:
    """Return the CPU seconds that a fresh interpreter needs for ``statement``."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(statement)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return float(done.stdout.split()[-1])


def main(rounds: int = 7) -> None:
    """Time ``rounds`` rounds and print medians and the ratio with its range."""
    seconds(PLAIN + ", boostax")  # fills the file cache
    plain, ours = [], []
    for number in range(rounds):
        # The order alternates, so that a drift of the machine's speed favours neither.
        first, second = (plain, ours) if number % 2 == 0 else (ours, plain)
        for times in (first, second):
            times.append(seconds(PLAIN if times is plain else PLAIN + ", boostax"))
    ratios = [b / a for a, b in zip(plain, ours, strict=True)]
    print(f"jax, flax, optax:          {statistics.median(plain):.3f} s CPU")
    print(f"jax, flax, optax, boostax: {statistics.median(ours):.3f} s CPU")
    print(
        f"ratio: {statistics.median(ratios):.3f} "
        f"(from {min(ratios):.3f} to {max(ratios):.3f}, {rounds} rounds)"
    )


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:2]))
