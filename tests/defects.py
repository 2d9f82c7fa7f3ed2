"""Plant defects in the sources, one at a time, and name the test that catches each.

`make defects` plants them all, in copies of the sources, and writes the table of
`docs/defects.md`. A defect that no test of `make test` catches fails the run.
"""

import argparse
import concurrent.futures
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests import tiers

ROOT = Path(__file__).parents[1]
_SECONDS = 1800
_LEFT = shutil.ignore_patterns(".git", ".venv*", ".*_cache", ".hypothesis", "build", "dist")


class Defect(NamedTuple):
    """Say what to break, and who is to notice.

    Attributes:
        name: What is broken then, in plain English.
        file: The source file.
        old: Text that the file holds once.
        new: What takes its place.
        tests: Files or tests under `tests/`, those of tiers 0 and 1 of which are run.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str

    def problem(self) -> str:
        """Say why it cannot be planted, empty if it can."""
        path = ROOT / self.file
        if not path.is_file():
            return f"{self.name}: there is no {self.file}"
        count = path.read_text("utf-8").count(self.old)
        if count != 1:
            return f"{self.name}: {self.file} holds {self.old!r} {count} times, and not once"
        lost = [test for test in self.tests.split() if not (ROOT / _path(test)).exists()]
        return f"{self.name}: there is no tests/{lost[0]}" if lost else ""


@dataclass(frozen=True, slots=True)
class Result:
    """Say what came of one defect."""

    defect: Defect
    test: str
    said: str
    seconds: float


DEFECTS: tuple[Defect, ...] = (
    Defect("0/0 and x/0 are mixed up",
        "anynan/_diagnosis/rules/domain.py", "if nan:", "if inf:", "test_causes.py"),
    Defect("a number over Inf counts as Inf over Inf",
        "anynan/_diagnosis/rules/domain.py", "math.isinf(upper) and math.isinf(lower)\n",
        "math.isinf(upper) or math.isinf(lower)\n", "test_causes.py"),
    Defect("an overflow of exp is told of small arguments",
        "anynan/_diagnosis/rules/overflow.py", "value <= top - 1e-3", "value >= top - 1e-3",
        "test_causes.py"),
    Defect("a sum counts as an overflow although its terms are small",
        "anynan/_diagnosis/rules/overflow.py", "return top * terms > limit",
        "return top * terms < limit", "test_causes.py"),
    Defect("the variance of two numbers counts as that of one",
        "anynan/_diagnosis/rules/overflow.py", "if count > correction:",
        "if count > correction + 1:", "test_causes.py"),
    Defect("Inf plus Inf counts as Inf minus Inf",
        "anynan/_diagnosis/rules/overflow.py", "(upper == lower) != flip",
        "(upper == lower) == flip", "test_causes.py"),
    Defect("a gradient that is not 0 counts as masked",
        "anynan/_diagnosis/rules/gradient.py", "zero = grad.value == 0", "zero = grad.value != 0",
        "test_causes.py torch_adapter/test_causes.py"),
    Defect("the loss scale is blamed though it is at its floor",
        "anynan/_diagnosis/rules/circumstance.py", "if s.scale is None or s.scale > 1 or",
        "if s.scale is None or s.scale < 1 or", "test_causes.py"),
    Defect("the last of several origins counts as the first",
        "anynan/_diagnosis/lineage.py", "return min(", "return max(", "test_lineage.py"),
    Defect("a NaN that the code writes passes as a mask",
        "anynan/_diagnosis/lineage.py",
        'record.name in PLACING and not _has(record.output, "nan")', "record.name in PLACING",
        "test_lineage.py"),
    Defect("a mask that reaches a gradient is not told",
        "anynan/_diagnosis/lineage.py", 'return sink.phase == "forward" and ', "return ",
        "test_lineage.py"),
    Defect("the first NaN that an Inf became is looked for before the Inf",
        "anynan/_diagnosis/lineage.py", "record.index > origin.index",
        "record.index < origin.index", "test_lineage.py"),
    Defect("a mask's -Inf that became +Inf is still a mask",
        "anynan/_diagnosis/lineage.py", "return bool(output.posinf) and not any(",
        "return bool(output.nan) and not any(", "test_lineage.py"),
    Defect("a second run that shows another kind of fault is believed",
        "anynan/_diagnosis/agreement.py", "    if row.kind != place.kind:\n",
        "    if False:\n", "test_agreement.py"),
    Defect("one bound of a layer's limits is enough to be good",
        "anynan/_readings/monitor.py", "(lo >= -limit) & (hi <= limit)",
        "(lo >= -limit) | (hi <= limit)", "test_monitor.py test_tracker.py"),
    Defect("patience= allows one bad step too few",
        "anynan/_steps/failures.py", "self.streak <= patience",
        "self.streak < patience", "test_tracker.py"),
    Defect("an event that comes again is not counted",
        "anynan/_steps/record.py", "times=first[0].times + 1", "times=first[0].times",
        "test_tracker.py"),
    Defect("a new fault after a repair is put down to the old one",
        "anynan/_steps/consequences.py", "        if self._repaired(step):\n",
        "        if False:\n", "torch_adapter/test_consequences.py"),
    Defect("steps are not counted on",
        "anynan/_steps/opened.py", "self._local.next = step.number + 1",
        "self._local.next = step.number", "test_tracker.py"),
    Defect("what is allowed moves to another row as one is put in",
        "anynan/_readings/step.py", "self.suspect = {order + (order >= at)",
        "self.suspect = {order + (order > at)", "test_monitor.py"),
    Defect("a spike of the gradient norm is missed",
        "anynan/_readings/norms.py", "norm > ratio * usual", "norm > ratio * total",
        "test_norms.py"),
    Defect("a NaN whose sign is negative is missed",
        "anynan/_arrays/probe.py",
        "if highest >= form.nan_from or lowest >= sign + form.nan_from:",
        "if highest >= form.nan_from:", "test_probe.py"),
    Defect("a NaN passes the quick check",
        "anynan/_arrays/probe.py", "if not dot(piece, piece) < math.inf:",
        "if dot(piece, piece) >= math.inf:", "test_probe.py test_recorder.py"),
    Defect("a NaN in one field hides behind the others",
        "anynan/_arrays/probe.py", "if one[0] != one[0] or other[0] != other[0]:",
        "if one[0] != one[0]:", "test_probe.py"),
    Defect("the index of the first bad element is of its piece",
        "anynan/_arrays/tally.py", "start += piece.size", "start += 0", "test_summarize.py"),
    Defect("what was written through a view is forgotten",
        "adapters/arrays/live.py", "value._node == CLEAN and not value._cell.writes",
        "value._node == CLEAN", "test_recorder.py"),
    Defect("a tracked array stays in an attribute of the user's object",
        "adapters/arrays/state.py", "            unwrap(value)\n", "            pass\n",
        "test_recorder_leaving.py test_recorder.py"),
    Defect("NumPy's random state is not restored after a second run",
        "adapters/arrays/reachable.py", "np.random.set_state(drawn)", "pass",
        "test_recorder_reached.py test_recorder_ends.py"),
    Defect("an array that the code reaches is not put back after a second run",
        "adapters/arrays/reachable.py", "                holder.set(x)\n", "                pass\n",
        "test_recorder_reached.py test_recorder_ends.py"),
    Defect("a view does not share what is known of its memory",
        "adapters/arrays/tape.py", "cell = found[0]._cell", "cell = Cell()",
        "test_recorder.py test_recorder_leaving.py"),
    Defect("NumPy's own warnings are lost in a tracked function",
        "adapters/arrays/errorlog.py", 'if wanted == "warn":', 'if wanted == "print":',
        "test_recorder.py"),
    Defect("the ends of a reading are mixed up in a file",
        "anynan/_apps/runfile/reading.py", 'numbers(said["low"]), numbers(said["high"])',
        'numbers(said["high"]), numbers(said["low"])', "test_jsonl.py"),
    Defect("a bad step whose turn has not come is not written",
        "anynan/_apps/runfile/writing.py", "if bad or (self._steps - 1)", "if (self._steps - 1)",
        "test_jsonl.py"),
    Defect("+Inf and -Inf are mixed up in a report",
        "anynan/_diagnosis/rules/evidence.py", '"inf": summary.posinf', '"inf": summary.neginf',
        "test_reporting.py"),
    Defect("a report's words are markup in a notebook",
        "anynan/_reports/report.py", "html.escape(line[start:])", "line[start:]",
        "test_reporting.py"),
    Defect("a bundle whose tensors were changed is believed",
        "anynan/_apps/bundle/bundle.py", 'hexdigest() != data["sha256"]', 'hexdigest() == ""',
        "test_bundle.py"),
    Defect("anynan run --fail does not fail",
        "anynan/_apps/run/command.py", "ending.harmed and fails and not status",
        "ending.harmed and fails and status", "test_run.py"),
    Defect("a file that cannot be read passes as fine",
        "anynan/_apps/scan/command.py", "UNREADABLE if file.unread else BAD if file.bad else FINE",
        "BAD if file.bad else FINE", "test_scan.py"),
    Defect("the operands of a subtraction are swapped",
        "adapters/torch/replay/operands.py", "            found.reverse()\n", "            pass\n",
        "torch_adapter/test_replay.py"),
    Defect("PyTorch's random state is not restored after a second run",
        "adapters/torch/call/randomstate.py", "torch.set_rng_state(self.cpu)", "pass",
        "torch_adapter/test_replay.py torch_adapter/test_vows.py"),
    Defect("a gradient is not restored after a second run",
        "adapters/torch/replay/kept.py", "            p.grad = grad\n", "            pass\n",
        "torch_adapter/test_vows.py torch_adapter/test_replay.py"),
    Defect("a gradient is not restored after a search for the first bad batch",
        "adapters/torch/update/snapshot.py", "                x.grad = grad\n",
        "                pass\n", "torch_adapter/test_loaders.py"),
    Defect("a hook is not removed",
        "adapters/torch/read/hooks.py", "        self._handle.remove()\n", "        pass\n",
        "torch_adapter/test_hooks.py torch_adapter/test_tracking.py"),
    Defect("PyTorch's hook on all optimizers stays behind",
        "adapters/torch/update/updates.py", "_handles.pop().remove()", "_handles.pop()",
        "torch_adapter/test_updates.py torch_adapter/test_vows.py"),
    Defect("a bad step updates the weights all the same",
        "adapters/torch/update/updates.py", "        if rows.skip or (", "        if False and (",
        "torch_adapter/test_updates.py torch_adapter/test_tracking.py"),
    Defect("NaN gradients pass where their norms are added up",
        "adapters/torch/update/gradients.py", "if sum(sizes) <= limit:",
        "if not sum(sizes) > limit:", "torch_adapter/test_updates.py"),
    Defect("an operand that is overwritten in place is told as it is afterwards",
        "adapters/torch/replay/operands.py", "id(x): x.detach().clone()", "id(x): x.detach()",
        "torch_adapter/test_replay.py torch_adapter/test_written.py"),
    Defect("an argument that a second run overwrites is not restored",
        "adapters/torch/replay/watcher.py", "x.untyped_storage().copy_(content)", "pass",
        "torch_adapter/test_replay.py torch_adapter/test_vows.py"),
    Defect("a row of a softmax that is partly masked counts as fully masked",
        "adapters/torch/replay/operands.py", "(x == -math.inf).all(dim)",
        "(x == -math.inf).any(dim)", "torch_adapter/test_replay.py"),
    Defect("NaN and +Inf are mixed up",
        "adapters/jax/read/probes.py", "jnp.where(part > top, 2.0, 3.0)",
        "jnp.where(part > top, 3.0, 2.0)", "jax_adapter/test_reading.py"),
    Defect("a sum of large numbers counts as an overflow",
        "adapters/jax/read/probes.py", "2.0**-48, 2.0**-944", "1.0, 1.0",
        "jax_adapter/test_reading.py"),
    Defect("an object's new state is not given back after a step",
        "adapters/jax/session/session.py", "            form.objects.update(states)\n",
        "            pass\n", "jax_adapter/test_state.py"),
    Defect("what is allowed drops an update",
        "anynan/_readings/monitor.py", '== "bad" and not excused', '== "bad"',
        "jax_adapter/test_actions.py"),
    Defect("a bad update is not dropped",
        "anynan/_readings/monitor.py", 'judged[1] == "bad"', 'judged[1] == "suspect"',
        "jax_adapter/test_actions.py"),
    Defect("an update from bad gradients goes through",
        "adapters/tensorflow/session/updates.py", "fine = self._fine(graph, checked, *given)",
        "fine = tf.constant(True)", "conformance/test_updates.py keras_adapter/test_monitor.py"),
    Defect("a gradient of -Inf counts as fine",
        "adapters/tensorflow/read/readings.py", " | tf.equal(low, -math.inf)", "",
        "tensorflow_adapter/test_readings.py"),
    Defect("readings of several dtypes are mixed up",
        "adapters/tensorflow/read/readings.py", "return tf.gather(tf.concat(joined, 0), order)",
        "return tf.concat(joined, 0)", "tensorflow_adapter/test_readings.py"),
    Defect("nothing is restored after a second run",
        "adapters/tensorflow/replay/reached.py", "            now.put_back()\n",
        "            pass\n", "tensorflow_adapter/test_left_behind.py"),
    Defect("the frameworks' classes stay changed after the tracker is removed",
        "adapters/tensorflow/session/session.py", "SEAMS.uninstall(self)", "pass",
        "tensorflow_adapter/test_left_behind.py"),
    Defect("a training goes on after a bad batch",
        "adapters/keras/monitor.py", "        self.model.stop_training = True\n", "        pass\n",
        "keras_adapter/test_monitor.py"),
    Defect("an operation counts as made by a later one",
        "adapters/tensorflow/replay/records.py", "found is None or found >= record.index",
        "found is None or found <= record.index", "tensorflow_adapter/test_causes.py"),
    Defect("a port that has NaN where its original has Inf agrees with it",
        "anynan/_apps/compare/distances.py",
        "if not np.array_equal(x[~fine], y[~fine], equal_nan=True):", "if not x[~fine].size:",
        "test_compare.py torch_adapter/test_compare.py"),
    Defect("negative infinities of a file count as positive",
        "anynan/_files/tally.py", "found.posinf += infinities - negative",
        "found.posinf += infinities", "test_scan.py"),
)  # fmt: skip


def planted(defect: Defect, *, every: bool = False) -> Result:
    """Plant a defect in a copy of the sources, and run the tests that are to catch it.

    Args:
        defect: What to plant.
        every: Run all of `make test`, and not the named tests alone.
    """
    began = time.monotonic()
    named = ["tests"] if every else [f"tests/{test}" for test in defect.tests.split()]
    shared = ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"] if every else []
    with _copied() as folder:
        path = Path(folder) / defect.file
        path.write_text(path.read_text("utf-8").replace(defect.old, defect.new), "utf-8")
        found, said = _failing(folder, ["-x", *shared, *named])
    return Result(defect, found[0] if found else "", said, time.monotonic() - began)


def _copied() -> "tempfile.TemporaryDirectory[str]":
    """Copy the checkout, without what was made in it; a copy goes however the run ends."""
    folder = tempfile.TemporaryDirectory(prefix="anynan-defects-")
    shutil.copytree(ROOT, folder.name, symlinks=True, ignore=_LEFT, dirs_exist_ok=True)
    return folder


def _failing(folder: str, words: Sequence[str]) -> tuple[list[str], str]:
    """Run tests in a copy; give those that fail, and the last lines of what was printed."""
    # Twice, so that the variable is no path that a file may rightly hold.
    own = {"PYTHONPATH": f"{folder}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--tiers", "0-1", *words]
    try:
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, **own}, capture_output=True, text=True,
            timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [], f"the tests did not end within {_SECONDS} s"
    if done.returncode != 1:
        return [], "\n".join((done.stdout + done.stderr).splitlines()[-8:])
    kept = Path(folder) / ".pytest_cache" / "v" / "cache" / "lastfailed"
    return sorted(json.loads(kept.read_text("utf-8"))), ""


def _fails_anyway(tests: list[str]) -> list[str]:
    """Give those of the tests that fail without a defect, too."""
    with _copied() as folder:
        found, said = _failing(folder, tests)
    return [*found, *filter(None, [said if "passed" not in said else ""])]


def _path(test: str) -> str:
    return "tests/" + test.partition("::")[0]


def table(results: Sequence[Result]) -> str:
    """Give what caught what as the table of a page."""
    lines = ["| where | defect | caught by |", "|---|---|---|"]
    for result in results:
        file, _, test = result.test.removeprefix("tests/").partition("::")
        name = test.partition("[")[0].replace("::", ".")
        where = result.defect.file.removeprefix("anynan/").removesuffix(".py")
        lines.append(f"| `{where}` | {result.defect.name} | `{file}`: `{name}` |")
    return "\n".join(lines)


def main() -> int:
    """Plant defects, and say which test caught each."""
    parser = argparse.ArgumentParser(prog="python -m tests.defects", description=main.__doc__)
    parser.add_argument("names", nargs="*", help="words of the names or files of those to plant")
    parser.add_argument("--all-tests", action="store_true", help="run all of `make test` for each")
    parser.add_argument("--jobs", type=int, default=2, help="how many at the same time (2)")
    parser.add_argument("--write", action="store_true", help="write the table into the docs")
    words = parser.parse_args()
    wrong = list(filter(None, (defect.problem() for defect in DEFECTS)))
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 2
    chosen = [
        defect
        for defect in DEFECTS
        if not words.names or any(word in f"{defect.name} {defect.file}" for word in words.names)
    ]
    began = time.monotonic()
    plant = functools.partial(planted, every=words.all_tests)
    results = []
    with concurrent.futures.ThreadPoolExecutor(words.jobs) as pool:
        for result in pool.map(plant, chosen):
            results.append(result)
            what = result.test or f"NOT CAUGHT\n{result.said}"
            print(f"{result.defect.name} ({result.seconds:.0f} s)\n    {what}", flush=True)
    anyway = _fails_anyway(sorted({result.test for result in results if result.test}))
    missed = [result.defect.name for result in results if not result.test]
    print(
        f"\n{len(results) - len(missed)} of {len(results)} caught, {time.monotonic() - began:.0f} s"
    )
    for test in anyway:
        print(f"fails without a defect, too: {test}")
    if missed or anyway:
        return 1
    if words.write and len(chosen) == len(DEFECTS):
        tiers.write("defects", table(results), "defects.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
