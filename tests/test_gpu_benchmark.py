"""`benchmarks/gpu.py` on a machine without a GPU: it runs to its end, and times nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
FOLDER = Path(__file__).parents[1] / "benchmarks"
PROGRAM = """
import sys, gpu
gpu.SMALL = (3,)
gpu.TOLERANCES = {"float32": 1e-4}
sys.argv = ["gpu.py", "--json", sys.argv[1] + "/found.json", "--png", sys.argv[1] + "/found.png"]
gpu.main()
"""


@pytest.mark.skipif(not FOLDER.exists(), reason="the benchmarks are not installed")
def test_the_script_marks_every_time_as_not_measured(tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    rows = found["rows"]
    assert {(r["what"], r["contender"]) for r in rows if r["contender"] != "gradsolve"} == {
        (what, name) for what in ("forward", "gradient") for name in ("stock", "pallas")
    }
    assert all(r[key] == "not measured" for r in rows for key in ("milliseconds", "first_seconds", "peak_share"))
    assert all(r["difference"] < 1e-3 and r["error"] < 1e-2 for r in rows if r["contender"] == "pallas")
    assert "no GPU" in done.stdout and "no GPU" in found["not run"][0]
    assert (tmp_path / "found.png").stat().st_size > 1000
