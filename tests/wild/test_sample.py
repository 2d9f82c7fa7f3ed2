"""A few cases of every suite; ``make wild`` runs them all."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.wild.rows import ROOT, versions_of
from tests.wild.suites import SUITES

pytestmark = pytest.mark.tier(2)


@pytest.mark.wild
@pytest.mark.parametrize("suite", SUITES)
def test_no_difference_that_is_not_listed(suite: str, tmp_path: Path) -> None:
    if "missing" in (versions := versions_of(SUITES[suite].packages)):
        pytest.skip(f"{versions}: make wild installs it")
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "tests.wild", suite, "--sample", "--jobs", "1"]
    ran = subprocess.run(
        [*command, "--rows", str(rows)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    assert rows.stat().st_size, "something ran"
