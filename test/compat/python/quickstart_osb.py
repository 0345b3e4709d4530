"""Runs the blocks of the Quick Start of `osb`'s README, one after the other in
one home directory. What stands in angle brackets there is the reader's to fill
in: the key, and the id of the sandbox that was made last.

Usage: quickstart_osb.py DIRECTORY
"""

import os
import re
import subprocess
import sys
from pathlib import Path

home = Path("/tmp/home-of-osb")  # the test's, as all of /tmp is while this runs
home.mkdir()
path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
sandbox = "none-was-made"
for block in sorted(Path(sys.argv[1]).iterdir()):
    text = block.read_text(encoding="utf-8").replace("<your-api-key>", "your-api-key").replace("<sandbox-id>", sandbox)
    assert "<" not in text, text
    done = subprocess.run(
        ["bash", "-euc", text],
        env={"HOME": str(home), "PATH": path, "NO_COLOR": "1", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(f"{block.name}:\n{done.stdout}", flush=True)
    assert done.returncode == 0, f"{block.name} ended with {done.returncode}"
    if made := re.search(r'"id": "(\w+)"', done.stdout):
        sandbox = made[1]
print("ran", sys.argv[1])
