"""``anynan run``: the program, and what it starts, run as ever, and what is in them is watched."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anynan
from anynan._apps.run.messages import ENDED_BEFORE, NOTHING_RAN, NOTHING_WATCHED
from anynan._apps.run.processes import program_in
from anynan._everywhere import Found
from tests.processes import frames_of_ours, python, ran
from tests.tiers import first

NOTHING, BEFORE = NOTHING_RAN(), ENDED_BEFORE()

PROGRAM = """
import atexit, os, pickle, sys
class Mine: pass
def last():
    pickle.loads(pickle.dumps(Mine()))
    print("atexit", __name__)
atexit.register(last)
print(sys.argv, __file__, __name__, __spec__ and __spec__.name, __package__)
print(sys.path[0], os.path.basename(sys.modules["__main__"].__file__))
import beside
"""
ENDS = {"1 / 0": 1, "sys.exit(3)": 3, "": 0, "raise KeyboardInterrupt": 130}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    for place in (tmp_path, tmp_path / "sub"):
        (place / "beside.py").touch()
    (tmp_path / "sub" / "program.py").write_text(PROGRAM)
    (tmp_path / "sub" / "__main__.py").write_text(PROGRAM)
    (tmp_path / "sub" / "__init__.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    "words", first(1, [("sub/program.py",), ("sub",), ("-m", "sub.program"), ("-m", "sub")])
)
def test_the_program_sees_what_python_shows_it(words: tuple[str, ...], folder: Path) -> None:
    plain = python(*words, "--lr", "1", "-m", cwd=folder)
    watched = python("-m", "anynan", "run", *words, "--lr", "1", "-m", cwd=folder)
    assert plain.returncode == 0, plain.stderr
    got = watched.stdout.replace(f"{folder}/", "")
    assert got == plain.stdout.replace(f"{folder}/", "")
    assert (watched.returncode, watched.stderr) == (0, f"{NOTHING}\n")


def test_an_installed_command_is_a_program_too(tmp_path: Path) -> None:
    (tmp_path / "trains").write_text("#!/env/bin/python3\nimport sys\nprint(sys.argv)\n")
    (tmp_path / "other").write_bytes(b"\x7fELF")
    here = str(tmp_path / "python")
    start = f"import sys; sys.executable = {here!r}\nimport anynan._cli.commands as c"
    for name, status in (("trains", 0), ("other", 2), ("none", 2)):
        (tmp_path / "sub").mkdir(exist_ok=True)
        code = f"{start}\nsys.exit(c.main(['run', {name!r}, '--lr', '1']))"
        done = python("-c", code, cwd=tmp_path / "sub")
        assert done.returncode == status, done.stderr
        assert done.stdout == ("" if status else f"['{tmp_path}/trains', '--lr', '1']\n")


def test_the_environment_goes_before_the_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import numpy as np, torch\nx = torch.ones(2, requires_grad=True)\n"
        "(x / 0).sum().backward()\nnp.log(np.zeros(1))\nprint('done')\n"
    )
    ends = []
    for word in ("off", "record", "foo"):
        monkeypatch.setenv("ANYNAN", word)
        ends.append(ran(tmp_path, program, options=("--fail",)))
    off, record, unknown = ends
    assert (off.returncode, off.stdout) == (0, "done\n")
    assert "anynan" not in off.stderr
    assert record.returncode == 1
    assert "AnynanWarning" not in record.stderr
    assert "  op      divide" in record.stderr  # told at the end instead
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "ANYNAN='foo' in the environment is unknown" in unknown.stderr


@pytest.mark.parametrize("end", first(2, ENDS))
def test_the_exit_status_and_the_traceback_are_the_programs(end: str, tmp_path: Path) -> None:
    done = ran(tmp_path, f"import sys\ndef f():\n    {end or 'pass'}\nf()\n")
    assert done.returncode == ENDS[end]
    plain = python("p.py", cwd=tmp_path)
    said = done.stderr.replace(f"{NOTHING}\n", "").replace(f"{BEFORE}\n", "")
    assert said == plain.stderr.replace('File "p.py"', f'File "{tmp_path}/p.py"')


@pytest.mark.parametrize(
    ("words", "said"),
    [(("none.py",), "can't open file"), (("-m", "none_of_them"), "No module named none_of_them")],
)
def test_what_cannot_be_run_is_said(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = python("-m", "anynan", "run", *words, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("anynan run: ")
    assert said in done.stderr


TRAIN = """
import torch
import multiprocessing, sys
from torch import nn

class Log(nn.Module):
    def forward(self, x):
        return torch.log(x)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 3
    def __getitem__(self, i):
        return Log()(torch.ones(4))

def work(rows):
    return len(rows)

if __name__ == "__main__":
    torch.manual_seed(0)
    last = [Log()] if "layer" in sys.argv else []
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), *last)
    criterion = nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters())
    for i in range(3):
        loss = criterion(model(torch.randn(16, 4)), torch.zeros(16, 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if "spawn" in sys.argv:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print("worker", pool.map(work, ["abc"]))
    if "loader" in sys.argv:
        print("worker", [work([*torch.utils.data.DataLoader(Rows(), num_workers=2)])])
    print("done")
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("worker", first(1, ["", "spawn", "loader"]))
def test_a_clean_program_ends_with_one_line(worker: str, tmp_path: Path) -> None:
    done = ran(tmp_path, TRAIN, worker, options=("--action", "raise"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("worker [3]\ndone\n" if worker else "done\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "anynan: Sequential: nothing went bad in 3 steps: 4 layers, 10 readings in the last step, "
        "tightest headroom 12"
    )
    assert line.endswith("(module outputs only)")


@pytest.mark.tier(2)
def test_a_program_that_is_only_warned_goes_on_and_the_report_is_written(
    tmp_path: Path, command: Any
) -> None:
    done = ran(tmp_path, TRAIN, "layer", options=("--report", "found.jsonl"))
    assert (done.returncode, done.stdout) == (0, "done\n")
    # A loss is handed what the model made: that is no batch of its own, and no second fault.
    (event,) = anynan.load(tmp_path / "found.jsonl").events
    status, out, error = command("report", tmp_path / "found.jsonl")
    assert (status, error) == (1, "")
    assert "anynan: Sequential: 1 bad in 3 steps" in out
    assert (event.layer, event.operation.name) == ("3", "log")
    assert done.stderr.count("first appeared") == 2  # the report, and the last line


ARRAYS = """
import numpy as np
def f(x):
    return np.log(x) + 1
for _ in range(3):
    f(np.array([0.0, 1.0]))
with np.errstate(all="ignore"):
    np.exp(1e4)
np.seterr(over="raise")
try:
    np.exp(1e4)
except FloatingPointError as error:
    print(error)
"""


def test_what_numpy_meets_is_told_with_its_line(tmp_path: Path) -> None:
    done = ran(tmp_path, ARRAYS, options=("--action", "raise"))
    plain = python("p.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "overflow encountered in exp\n")
    *given, met, note = done.stderr.splitlines()
    warned = plain.stderr.replace("p.py:4", f"{tmp_path}/p.py:4", 1)
    assert "\n".join(given).replace(f"{tmp_path}/{tmp_path}", str(tmp_path)) in (
        plain.stderr.strip(), warned.strip()
    )  # fmt: skip
    assert met == "anynan: NumPy met: divide by zero in log at p.py:4 (3 times)"
    assert "anynan.track(function)" in note


NAN_AT_THE_END = """
import numpy as np
rows = np.ones((4, 2))
rows[1, 0] = np.nan
weight, best = np.ones(2), np.inf
for _ in range(3):
    weight = weight - 0.1 * rows.T @ (rows @ weight - 1)
"""


def test_arrays_that_are_nan_as_the_program_ends_are_named(tmp_path: Path) -> None:
    done = ran(tmp_path, NAN_AT_THE_END)
    assert done.returncode == 0
    filled = NAN_AT_THE_END.replace(
        "rows.T @ (rows", "np.nan_to_num(rows).T @ (np.nan_to_num(rows)"
    )
    assert ran(tmp_path, filled).stderr == f"{NOTHING}\n"
    told, note = done.stderr.strip().splitlines()
    assert told == "anynan: NaN as the program ended: rows, weight"
    assert "anynan.track(function) finds where it began" in note


COMPILED = """
import jax, jax.numpy as jnp
@jax.jit
def step(w, x):
    loss = jnp.log(x @ w).sum()
    return w, loss
step(jnp.ones(3), jnp.ones((2, 3)))
step(jnp.ones(3), -jnp.ones((2, 3)))
"""


def test_a_compiled_function_of_jax_is_watched(tmp_path: Path) -> None:
    done = ran(tmp_path, COMPILED, options=("--action", "raise"))
    assert done.returncode == 1
    assert "  op      log                     p.py:5 in step\n" in done.stderr
    assert "anynan: step: 1 bad in 2 steps" in done.stderr
    assert not frames_of_ours(done.stderr)


def test_each_rank_has_a_report_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rank in (("RANK", "1"), ("LOCAL_RANK", "2")):
        monkeypatch.setenv(name, rank)
        ran(tmp_path, "", options=("--report", "found.md"))
        monkeypatch.delenv(name)
    assert {path.name for path in tmp_path.glob("*.md")} == {"found-rank1.md", "found-rank2.md"}


DYING = {
    "int(np.array([np.nan])[0])": "ValueError",
    "raise RuntimeError('the loss is not finite')": "RuntimeError",
    "raise RuntimeError('at node\\n' * 99 + 'ValueError: not finite')": "RuntimeError",
    "sys.exit('Loss is nan, stopping')": "SystemExit",
    "np.seterr(all='raise'); np.log(np.zeros(1))": "FloatingPointError",
}


@pytest.mark.parametrize("end", first(1, DYING))
def test_a_program_that_dies_of_a_nan_is_never_told_that_nothing_went_bad(
    end: str, tmp_path: Path
) -> None:
    done = ran(tmp_path, f"import sys, numpy as np\ndef f():\n    {end}\nf()\n")
    assert done.returncode == 1
    assert f"\nanynan: the program died of NaN or Inf: {DYING[end]} at p.py:3 in f: " in (
        f"\n{done.stderr}"
    )
    assert "nothing went bad" not in done.stderr
    assert NOTHING not in done.stderr


MASKED = """
import torch
from torch.distributions import Categorical
actor = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
def act(x):
    logits = actor(x).masked_fill(x[:, :1] > 0.5, float("-inf"))
    return Categorical(logits=logits).sample()
print(act(torch.tensor([[0.1, 0, 0, 0], [0.9, 0, 0, 0]])))
"""


def test_a_step_that_an_exception_ended_gets_no_all_clear(tmp_path: Path) -> None:
    done = ran(tmp_path, "import torch\ntorch.nn.Linear(2, 1)(torch.ones(1, 2))\n[][2]")
    assert "IndexError" in done.stderr
    assert "died" not in done.stderr
    assert "anynan: Linear: nothing bad was read in 1 step" in done.stderr


@pytest.mark.tier(2)
def test_what_the_models_made_was_fine_and_the_program_died_of_what_came_after(
    tmp_path: Path,
) -> None:
    done = ran(tmp_path, MASKED)
    assert "died of NaN or Inf: ValueError at p.py:7 in act: return Categorical(" in done.stderr
    assert "p.py:7: AnynanWarning: " in done.stderr, "told after the program ended, at its line"
    assert "nothing went bad" not in done.stderr
    assert "anynan: Sequential: nothing bad was read in 1 step" in done.stderr
    assert "subtract at p.py:7: Inf minus Inf is NaN" in done.stderr


OWN = """
import anynan, numpy as np
@anynan.track(action="warn")
def f(x):
    return x / x
with np.errstate(all="ignore"):
    f(np.ones(2))
    f(np.full(2, BAD))
"""


@pytest.mark.parametrize(("value", "told", "status"), [("0.0", "1 bad", 1), ("2.0", "nothing", 0)])
def test_what_a_program_tracks_by_itself_is_counted_and_not_overlooked(
    value: str, told: str, status: int, tmp_path: Path
) -> None:
    done = ran(tmp_path, OWN.replace("BAD", value), options=("--fail",))
    assert done.returncode == status
    assert f"anynan: the program calls track itself: 1 tracker, {told}" in done.stderr
    assert "was seen running" not in done.stderr


def test_what_an_adapter_found_bad_at_the_end_counts_and_what_it_did_not_read_is_named() -> None:
    found = Found()
    with anynan.track(np.negative, action="record") as tracker:
        found.add(tracker)
        tracker(np.ones(2))
        found.unwatched("code outside of every model: anynan.track(function)")
        (clean, unread) = found.lines()
        assert clean.startswith("anynan: negative: nothing went bad in 1 step")
        assert unread == "  unwatched code outside of every model: anynan.track(function)"
        found.harm("w holds NaN as the program ends")
        harm, clean, _ = found.lines()
        assert harm == "anynan: w holds NaN as the program ends"
        assert clean.startswith("anynan: negative: nothing bad was read in 1 step")


@pytest.mark.parametrize("name", first(1, ["none/r.html", "r.pdf", "p.py/r.md", "folder.html"]))
def test_a_report_that_cannot_be_written_is_refused_before_the_run(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "folder.html").mkdir()
    done = ran(tmp_path, "print('ran')", options=("--report", name))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"anynan run: --report {name}: ")
    assert done.stderr.count("\n") == 1


TWO = """
import torch
netD, netG = torch.nn.Linear(3, 1), torch.nn.Linear(3, 3)
class Agent:
    def __init__(self): self.critic = torch.nn.Linear(3, 1)
    def value(self, x): return self.critic(x)
agent = Agent()
agent.value(netD(netG(torch.ones(2, 3))).expand(2, 3))
netD(torch.full((2, 3), torch.nan))
"""


@pytest.mark.tier(2)
def test_models_of_one_class_are_told_apart_by_the_names_that_the_program_calls_them(
    tmp_path: Path,
) -> None:
    done = ran(tmp_path, TWO)
    assert "\n  model    netD (Linear)\n" in done.stderr
    for name in ("netD", "netG", "critic"):
        assert f"\nanynan: {name} (Linear): " in done.stderr


NAMING = [
    "raise ValueError(\"mode 'inf' is unknown\")",
    "raise KeyError(float('nan'))",
    "open('nan.csv')",
    "assert 1 > 2, 'info'",
    "np.seterr(all='raise'); np.exp(np.array([-1e4]))",
]


@pytest.mark.parametrize("end", first(1, NAMING))
def test_an_exception_that_only_names_a_name_is_no_nan(end: str, tmp_path: Path) -> None:
    done = ran(tmp_path, f"import sys, numpy as np\ndef f():\n    {end}\nf()\n")
    assert done.returncode == 1
    assert "died" not in done.stderr
    assert done.stderr.endswith(f"{BEFORE}\n")


PYTHON = sys.executable
OURS: list[tuple[Any, int]] = [
    ([PYTHON, "own.py", "--lr", "1"], 1),
    ((PYTHON, "-u", "-B", "own.py"), 3),
    ([PYTHON, Path("own.py")], 1),
    ([PYTHON, "-u", "-m", "package.train"], 2),
]
OTHERS: dict[str, Any] = {
    "code": [PYTHON, "-c", "print(1)"],
    "a module of a library": [PYTHON, "-m", "pytest", "-x"],
    "one of Python's": [PYTHON, "-m", "json"],
    "no file": [PYTHON, "none.py"],
    "no program": [PYTHON, "-u"],
    "another interpreter": ["/opt/python", "own.py"],
    "apart from all packages": [PYTHON, "-I", "own.py"],
    "through a shell": "python own.py",
    "nothing": [],
}
GIVEN: dict[str, Any] = {
    "env": {"PYTHONPATH": "/elsewhere"},
    "executable": "/opt/python",
    "cwd": "package",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "package").mkdir()
    for name in ("own.py", "package/train.py", "package/__init__.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("package")
def test_a_program_of_the_users_is_seen_in_a_command_and_others_are_left_as_they_are() -> None:
    assert [program_in(args) for args, _ in OURS] == [at for _, at in OURS]
    assert program_in([PYTHON, "train.py"], cwd="package") == 1
    assert [kind for kind, args in OTHERS.items() if program_in(args)] == []
    script, _ = OURS[0]
    assert [key for key, value in GIVEN.items() if program_in(script, **{key: value})] == []


WORKERS = """
import multiprocessing, sys
import numpy as np

def work(x):
    return float(np.log(np.array(x)))

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    processes = [context.Process(target=work, args=(x,)) for x in (1.0, 0.0, 0.0)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
        assert "_anynan" not in vars(process)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", first(1, ["fork", "spawn", "forkserver"]))
def test_what_numpy_met_in_a_process_is_told_by_the_program(way: str, tmp_path: Path) -> None:
    done = ran(tmp_path, WORKERS, way)
    assert done.returncode == 0, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("anynan: ")]
    assert said.endswith(" and 1 more: NumPy met: divide by zero in log at p.py:6")


TRAINING = """
import torch
import os, subprocess, sys
from torch import multiprocessing

def train(rank):
    model = torch.nn.Linear(4, 1)
    for i in range(3):
        loss = model(torch.ones(8, 4)).square().mean()
        if rank == 1 and i == 2:
            loss = torch.log(-1 - loss)
        loss.backward()

if __name__ == "__main__":
    how = sys.argv[1]
    if how == "spawn":
        multiprocessing.spawn(train, nprocs=2)
    elif how == "pool":
        with multiprocessing.get_context("fork").Pool(1) as pool:
            pool.map(train, [1])
    elif how in ("script", "kills"):
        how = "alone" if how == "script" else "killed"
        subprocess.run([sys.executable, __file__, how], check=True)
    elif how == "shell":
        subprocess.run(sys.executable + " " + __file__ + " alone", shell=True, check=True)
    else:
        train(1)
        if how == "killed":
            os._exit(0)
"""
OP = "op      log                     p.py:11 in train"
TOLD = {
    "spawn": "anynan: SpawnProcess-2: Linear: 1 bad in 3 steps",
    "pool": "anynan: ForkPoolWorker-1: 1 bad; its end was not seen",
    "script": "anynan: Linear: 1 bad in 3 steps",
    "kills": "anynan: p.py: 1 bad; its end was not seen",
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("how", first(1, TOLD))
def test_a_training_in_a_process_is_watched_and_counts(how: str, tmp_path: Path) -> None:
    done = ran(tmp_path, TRAINING, how, options=("--fail", "--report", "r.md"))
    assert done.returncode == 1, done.stderr
    assert done.stderr.count(OP) == 1
    assert [line for line in done.stderr.splitlines() if line.startswith(TOLD[how])]
    assert "no model" not in done.stderr
    written = {path.name: path.read_text() for path in tmp_path.glob("r*.md")}
    clean = {name for name, text in written.items() if "nothing went bad" in text}
    assert clean == ({"r-SpawnProcess-1.md"} if how == "spawn" else set())
    assert "r.md" not in written  # it ran nothing itself


@pytest.mark.multiprocess
@pytest.mark.tier(2)
def test_what_a_shell_starts_is_no_all_clear(tmp_path: Path) -> None:
    done = ran(tmp_path, TRAINING, "shell")
    assert done.returncode == 0
    assert NOTHING_WATCHED() in done.stderr
    assert "  unwatched what python" in done.stderr
    assert OP not in done.stderr
