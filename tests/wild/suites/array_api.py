"""The public array-api-tests, plain and over ``anynan.arrays.namespace`` in a tracked function.

NumPy's at each level, those of array-api-strict at the default level and at one other.

They are on no package index: ``ARRAY_API_TESTS`` names a checkout, with its submodule.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.wild.rows import LEVELS, ROOT, YES, Row, wanted

SUITE = "array_api"
LIBRARIES = ("numpy", "array_api_strict")
EXAMPLES = "5"
NAMES = (
    *("array_object", "constants", "creation_functions", "data_type_functions", "fft"),
    *("has_names", "indexing_functions", "inspection_functions", "linalg"),
    *("manipulation_functions", "operators_and_elementwise_functions", "searching_functions"),
    *("set_functions", "signatures", "sorting_functions", "special_cases"),
    *("statistical_functions", "utility_functions"),
)
SAMPLE = ["numpy constants"]


def cases() -> list[str]:
    return [f"{library} {name}" for library in LIBRARIES for name in NAMES]


def outcomes(checkout: Path, library: str, name: str, level: str) -> dict[str, str]:
    """Run a file of tests in a process of its own; give what became of each."""
    imported = f"import {library} as xp"
    wrapped = f"import anynan; {imported}; xp = anynan.arrays.namespace(xp)" if level else imported
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", f"array_api_tests/test_{name}.py", "-q"]
        command += ["-p", "tests.wild.array_api_plugin", "-p", "no:cacheprovider"]
        command += ["--max-examples", EXAMPLES, "--derandomize", "--hypothesis-seed=0"]
        command += [f"--junitxml={report}"]
        environment = {
            **os.environ,
            "ARRAY_API_TESTS_MODULE": f"exec('{wrapped}')",
            "ARRAY_API_TESTS_VERSION": "2024.12",
            "ANYNAN_WILD_LEVEL": level,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        ran = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, check=False
        )
        if not report.exists():
            raise RuntimeError((ran.stdout + ran.stderr)[-1000:])
        tests = ET.parse(report).iter("testcase")
        found = {}
        for test in tests:
            tags = [child.tag for child in test if child.tag in ("failure", "error", "skipped")]
            found[test.get("name", "")] = tags[0] if tags else "passed"
        return found


def run(case: str) -> Iterator[Row]:
    checkout = os.environ.get("ARRAY_API_TESTS")
    if not checkout:
        yield Row(SUITE, case, skipped="ARRAY_API_TESTS names no checkout of array-api-tests")
        return
    library, name = case.split()
    plain = outcomes(Path(checkout), library, name, "")
    # The two levels that record every call differ in what they tell, so one of them will do.
    recorded = "layer" if wanted(library, "operation", name) else "operation"
    for level in LEVELS:
        if library != "numpy" and level not in ("step", recorded):
            continue
        row = Row(SUITE, case, level)
        tracked = outcomes(Path(checkout), library, name, level)
        worse = [
            test
            for test in sorted(plain)
            if plain[test] == "passed" and tracked.get(test, "missing") != "passed"
        ]
        row.identical = YES
        if worse:
            row.identical = f"no: {len(worse)} of {len(plain)} fail: {', '.join(worse[:12])}"
        yield row
