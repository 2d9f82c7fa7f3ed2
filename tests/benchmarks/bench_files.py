"""Time ``anynan scan`` beside reading the same bytes, and a browser as it opens the largest page.

The file lies in the page cache. What it is compared with is read into one buffer, again and again;
the scan runs in a process of its own, so that its memory is its own. Run it with nothing else on
the machine: ``make bench``.
"""

import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from anynan._apps.scan.scan import scan
from tests.benchmarks.timing import machine, options, publish, ratios, rows, seconds

BYTES, TENSORS = 1 << 30, 64
BLOCK = 1 << 20
DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
MEMORY = """
import resource, sys
from anynan._cli.commands import main
status = main(["scan", sys.argv[1]])
print(status, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, file=sys.stderr)
"""
OPEN = """<script>addEventListener("load", () => requestAnimationFrame(() => {
  document.title = Math.round(performance.now());
}));</script></head>"""


def weights(path: Path, name: str, nbytes: int) -> None:
    each = nbytes // TENSORS
    block = np.random.default_rng(0).standard_normal(BLOCK // 4, dtype=np.float32)
    if name == "BF16":
        held = (block.view(np.uint32) >> 16).astype("<u2").tobytes()
    else:
        held = block.astype(DTYPES[name]).tobytes()
    width = np.dtype(DTYPES[name]).itemsize
    header = {
        f"layers.{i}.weight": {
            "dtype": name, "shape": [each // width], "data_offsets": [i * each, (i + 1) * each],
        }
        for i in range(TENSORS)
    }  # fmt: skip
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in range(TENSORS):
            file.write((held * (-(-each // len(held))))[:each])


def read(path: Path) -> None:
    """Read a file through one buffer, as ``cat`` does."""
    buffer = memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def memory(path: Path) -> int:
    """Return the most MiB that a scan in a process of its own held."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, check=True
    )
    status, held = done.stderr.split()[-2:]
    assert status == "0"
    return int(held)


def scanned(rounds: int) -> str:
    lines = [["goal", "", "", ">= 0.80", "< 300"]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        for name in DTYPES:
            weights(path, name, BYTES)
            found = ratios(
                {"read": lambda: read(path), "scan": lambda: list(scan([str(path)]))},
                "read", rounds, warm=1,
            )  # fmt: skip
            took = found["scan"]
            lines.append([name, "1.00", f"{took:.2f}", f"{1 / took:.2f}", str(memory(path))])
    return rows(["1 GiB of", "reading", "`scan`", "speed, of reading's", "memory, MiB"], *lines)


def opened() -> str:
    """Measure the page of 10,000 layers and 1,000 steps; return a line."""
    from tests.test_page import synthetic

    random = np.random.default_rng(0)
    run = synthetic(1000, 10_000, lambda _, i: 2.0 ** random.normal(0, 2, len(i)))
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        made = seconds(run.to_html, path)
        size = os.path.getsize(path) / 1e6
        said = f"{size:.2f} MB, written in {made:.1f} s"
        if chromium is None:
            return f"{said}; there is no Chromium here"
        path.write_text(path.read_text(encoding="utf-8").replace("</head>", OPEN, 1), "utf-8")
        done = subprocess.run(
            [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
             f"--user-data-dir={folder}/profile", path.as_uri()],
            capture_output=True, encoding="utf-8", check=True,
        )  # fmt: skip
        told = done.stdout.partition("<title>")[2].partition("</title>")[0]
        opened = float(told) if told.isdigit() else math.nan
        return f"{said}, drawn {opened / 1000:.1f} s after Chromium was given it"


def main() -> None:
    chosen = options(__doc__, rounds=7)
    when = f"{machine('four threads at most', f'NumPy {np.__version__}')}"
    text = f"{when}; medians of {chosen.rounds} interleaved rounds.\n\n{scanned(chosen.rounds)}\n"
    publish("scan", text, chosen.write)
    publish("page", f"{machine()}: {opened()}.\n", chosen.write)


if __name__ == "__main__":
    main()
