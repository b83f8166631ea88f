"""An unchanged Diffrax script, switched between backends by an environment variable.

    python plain_lorenz.py 256
    GRADSOLVE_BACKEND=llvm python -m gradsolve_backend run plain_lorenz.py 256

`plain_lorenz.py` names nothing of GradSolve. Here it runs by itself, and through `python -m gradsolve_backend run` with
each backend; the processes take turns.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from common import BLUE, GREY, Options, difference, numbers, options, panels, save, times

SCRIPT = Path(__file__).with_name("plain_lorenz.py")
THROUGH = ("-m", "gradsolve_backend", "run")
BACKENDS = ("stock", "xla", "llvm")
ALONE = "by itself"


def run(backend: str, lanes: int) -> dict[str, Any]:
    """What the script printed: value, slope, and seconds of its first call and of later ones."""
    environment = {name: value for name, value in os.environ.items() if name != "GRADSOLVE_BACKEND"}
    through: tuple[str, ...] = ()
    if backend != ALONE:
        environment["GRADSOLVE_BACKEND"], through = backend, THROUGH
    command = [sys.executable, *through, str(SCRIPT), str(lanes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}, backend {backend}:\n{done.stderr}")
    return json.loads(done.stdout)


def draw(seconds: dict[str, tuple[float, float]], lanes: int, chosen: Options) -> None:
    """Bars of the first call and of later calls."""
    figure, axes = panels(2, f"One unchanged script: gradient of {lanes} Lorenz solves")
    for i, (panel, scale, unit, title) in enumerate(
        zip(axes, (1.0, 1e3), ("s", "ms"), ("first call, with compilation", "each later call"), strict=True)
    ):
        values = [scale * pair[i] for pair in seconds.values()]
        bars = panel.barh(list(seconds), values, color=[GREY, GREY, BLUE, BLUE])
        panel.bar_label(bars, fmt=f"%.3g {unit}", padding=4)
        panel.invert_yaxis()
        panel.set(xlabel=f"time, {unit}", title=title, xlim=(0, 1.2 * max(values)))
    axes[0].set_ylabel("GRADSOLVE_BACKEND")
    save(figure, chosen.out)


def main() -> None:
    """Run the script with all backends in turn, print, draw."""
    chosen = options(__doc__)
    lanes, rounds = (16, 1) if chosen.short else (256, 2)
    names = (ALONE, *BACKENDS)
    taken = [{name: run(name, lanes) for name in names} for _ in range(rounds)]
    seconds = {
        name: tuple(statistics.median(found[name][key] for found in taken) for key in ("first", "median"))
        for name in names
    }
    print(f"\n{f'gradient of {lanes} solves, by itself and with':44}{'by itself':>12}{'switched':>12}{'ratio':>8}")
    for name in BACKENDS:
        times(f"{name}: first call, s", seconds[ALONE][0], seconds[name][0])
        times(f"{name}: later calls, ms", 1e3 * seconds[ALONE][1], 1e3 * seconds[name][1])
    alone = taken[0][ALONE]
    numbers(ALONE, [(f"value with {name}", taken[0][name]["value"], alone["value"]) for name in BACKENDS])
    gaps = [difference(np.array(taken[0][name]["slope"]), np.array(alone["slope"])) for name in BACKENDS]
    names = [f"difference of the gradient with {name}" for name in BACKENDS]
    numbers("allowed", zip(names, gaps, [1e-8] * len(BACKENDS), strict=True))
    draw(seconds, lanes, chosen)


if __name__ == "__main__":
    main()
