"""No kernel touches memory beyond its buffers, nor writes to its inputs."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform == "win32", reason="the pages are protected by mprotect")
def test_kernels_stay_within_their_buffers():
    script = Path(__file__).with_name("guarded.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("within bounds\n")
