"""All ranks stop at one step, and name where it began.

Most scenarios of ``ranks_script.py`` run on threads (``thread_ranks.py``). The rest are real
processes that talk over gloo: one launch forks them all, and the tests read what each rank saw.
What torchrun adds has a test of its own.
"""

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from tests.processes import ROOT, python
from tests.torch_adapter import thread_ranks

fcntl = pytest.importorskip("fcntl")
pytestmark = [
    pytest.mark.tier(2),
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        not (distributed.is_available() and distributed.is_gloo_available()),
        reason="this PyTorch has no gloo",
    ),
]

SCRIPT = Path(__file__).with_name("ranks_script.py")
LIMIT = 600
# What each kind of program is run with at least once; all else runs on threads.
TWO = (
    "one_tracks clean forward backward synchronised_norm counted fsdp_forward bad_shard "
    "tp_forward pipeline_forward pipeline_backward one_leaves one_does_not_come"
)
# How many processes run what; in the last two the rank at the end of the name dies.
LAUNCHES = [f"2:{TWO}", "4:mesh counted", "3:killed_2", "2:killed_0"]

Seen = Callable[[str], list[dict[str, Any]]]
# Names of hosts are not looked up where the loopback will do.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **LOOPBACK}


def launch(folder: Path) -> str:
    """Run all launches from one process, and end it at the limit; give what was printed."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), *LAUNCHES],
        env={**os.environ, **ENVIRONMENT},
        cwd=ROOT,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        return process.communicate(timeout=LIMIT)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Launch once, whatever the number of test processes."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "ranks"
    with (shared / "ranks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            (folder / "output").write_text(launch(folder))
    return folder


def results(folder: Path, launched: int, name: str, victim: int | None = None) -> list[Any]:
    """Give what each rank of a launch saw; the victim's is missing."""
    ranks = range(int(LAUNCHES[launched].partition(":")[0]))
    files = [folder / str(launched) / f"{name}.{rank}.json" for rank in ranks]
    missing = [rank for rank, file in enumerate(files) if not file.exists()]
    output = (folder / "output").read_text()
    assert missing == ([] if victim is None else [victim]), f"{name} did not end\n{output[-4000:]}"
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def ranks(request: pytest.FixtureRequest, launched: int, name: str) -> list[Any]:
    number, _, names = LAUNCHES[launched].partition(":")
    if name in names.split():
        return results(request.getfixturevalue("folder"), launched, name)
    return thread_ranks.run(int(number), name)


@pytest.fixture
def two(request: pytest.FixtureRequest) -> Seen:
    return functools.partial(ranks, request, 0)


@pytest.fixture
def four(request: pytest.FixtureRequest) -> Seen:
    return functools.partial(ranks, request, 1)


def stopped_at_once(results: list[dict[str, Any]], rank: int, step: int = 2) -> dict[str, Any]:
    """Hold that every rank stopped at this step with one story, and return it."""
    events = [result["event"] for result in results]
    assert [result["stopped"] for result in results] == [step] * len(results)
    assert all(event == events[0] for event in events)
    assert (events[0]["rank"], events[0]["step"]) == (rank, step)
    return events[0]


def where(event: dict[str, Any]) -> tuple[Any, ...]:
    return event["layer"], event["phase"], event["op"], event["cause"]


LOG = ("fault", "forward", "log", "log_of_negative")
SQRT = ("fault", "backward", "sqrt", "sqrt_gradient_at_zero")
ZERO = ("0", "forward", "log", "log_of_zero")
# The rank and the step that each began on, and its place.
STOPS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "forward": (1, 2, LOG),
    "backward": (1, 2, SQRT),
    "step": (1, 2, LOG),
    "synchronised_norm": (1, 2, ("1", *LOG[1:])),  # a layer that sums over the ranks hides nothing
    "accumulation": (1, 1, ZERO),  # a call without synchronisation is judged at the update
    "fsdp_forward": (1, 2, LOG),
    "tp_forward": (1, 2, LOG),
    "pipeline_forward": (0, 2, ("1", *LOG[1:])),  # the stage, and not the one it was sent to
    "pipeline_backward": (1, 2, ("1", *SQRT[1:])),
    "mesh": (3, 2, LOG),  # tensor parallelism inside sharded data parallelism
}


def test_the_rank_it_began_on_reports_in_full_and_the_others_name_it(two: Seen) -> None:
    other, own = (result["message"] for result in two("forward"))
    assert own.startswith("NaN first appeared in the forward pass of step 2\n")
    assert "\n  rank    1\n" in own and "\n  fix     keep the argument positive" in own
    assert "input   float32 (3, 8)" in own
    lines = other.splitlines()
    assert lines[0] == "NaN first appeared in the forward pass of step 2 on rank 1"
    assert lines[2] == "  layer   fault" and lines[3].startswith("  op      log  ")
    assert lines[-1] == "  rank    1, which has the full report; this is rank 0"


def test_a_bad_batch_of_one_rank_is_its_own(two: Seen) -> None:
    event = stopped_at_once(results := two("bad_batch"), rank=1)
    assert (event["phase"], event["cause"]) == ("input", "bad_input")
    assert "1 of 3 rows is bad: 2" in results[1]["message"]
    assert "  batch    x  float32 (3, 4)" in results[1]["message"]


def test_a_weights_gradient_is_traced_to_the_rank_that_made_it(two: Seen) -> None:
    # Every rank reads the sum at the same position.
    event = stopped_at_once(two("weight_gradient"), rank=1)
    assert (event["parameter"], event["op"]) == ("1.weight", "divide")


def test_a_skipped_update_is_agreed_on_at_the_next_call(two: Seen) -> None:
    first, second = two("scaler")
    assert first["event"] == second["event"]
    assert where(first["event"]) == ("0", "forward", "log", "log_of_zero")
    assert (first["stopped"], first["event"]["step"]) == (second["stopped"], 1) == (2, 1)


def test_whatever_the_settings(two: Seen) -> None:
    first, second = (result["seen"] for result in two("settings"))
    assert len(first) == 6
    for name, result in first.items():
        (event,) = result["events"]
        assert [event] == second[name]["events"], name
        assert (event["layer"], event["phase"], event["rank"]) == ("2", "forward", 1), name
        assert (event["op"] is None) == (name in ("every", "no replay")), name
        assert (result["error"], result["stopped"]) == (None, 3), name
        # read=n lets updates from a bad step happen, as its documentation says.
        assert result["finite"] == (name != "every"), name
        assert result["weights"] == second[name]["weights"] or name == "every", name


def test_what_a_step_returns_is_heard_of_at_the_next_update(two: Seen) -> None:
    first, second = two("result_only")
    assert first["event"] == second["event"]
    assert (first["event"]["phase"], first["event"]["rank"]) == ("loss", 1)
    assert (first["event"]["step"], first["stopped"], second["stopped"]) == (1, 2, 2)
    assert "step 1 was over when it was read" in first["event"]["notes"][0]


def test_one_all_reduce_a_step_and_none_when_off(two: Seen, four: Seen) -> None:
    for result in [*two("counted"), *four("counted")]:
        assert result["tracked"] == result["plain"] + 3  # steps
        assert result["off"] == result["plain"]


def test_without_it_a_rank_raises_in_its_layer_alone(two: Seen) -> None:
    first, second = two("apart")
    assert (first["error"], first["stopped"], first["events"]) == (None, 3, [])
    assert (second["stopped"], where(second["event"])) == (2, LOG)
    assert "spread" not in second["message"]  # raised before anything followed


def test_an_evaluation_on_one_rank_waits_for_nobody(two: Seen) -> None:
    first, second = two("evaluation")
    assert where(first["event"]) == LOG and second["error"] is None
    assert (first["stopped"], second["stopped"]) == (2, 2)


def test_what_is_held_is_said_where_the_program_raises_first(two: Seen) -> None:
    for rank, result in enumerate(two("refused")):
        assert result["stopped"] == 2
        (said,) = result["warnings"]
        (event,) = result["events"]
        assert said.startswith("NaN first appeared in the forward pass of step 2\n")
        assert (event["rank"], where(event)) == (rank, ("1", *LOG[1:]))


ABSENT = {
    "one_tracks": "rank 1 does not track; each is judged alone",
    "one_leaves": "rank 1 stopped tracking",
    "one_does_not_come": "rank 1 did not come to agree on a step within 1 s",
}


@pytest.mark.parametrize("name", ABSENT)
def test_a_rank_that_does_not_take_part_is_said(two: Seen, name: str) -> None:
    first, second = two(name)
    (warning,) = first["warnings"]
    assert ABSENT[name] in warning
    assert (first["stopped"], second["stopped"], second["warnings"]) == (3, 3, [])


def test_a_rank_that_dies_leaves_none_of_the_others_hanging(folder: Path) -> None:
    first, second, _ = results(folder, 2, "killed_2", victim=2)
    assert (first["error"], first["stopped"]) == ("LostRankError", 2)
    assert first["message"] == (
        "rank 2 is gone: the connection closed while rank 0 waited to agree on a step with "
        "the other ranks; look at the output of the process that ended first"
    )
    # What was found is told all the same.
    assert (second["error"], second["stopped"]) == ("NonFiniteError", 2)
    assert "layer   fault\n  op      log" in second["message"]
    note = " ".join(second["message"].split())
    assert "the other ranks could not be informed: rank 2 is gone" in note


def test_nor_does_the_one_that_holds_the_store(folder: Path) -> None:
    _, other = results(folder, 3, "killed_0", victim=0)
    assert (other["error"], other["stopped"]) == ("LostRankError", 2)
    assert "a rank is gone, and with it the store that the ranks share" in other["message"]


@pytest.mark.parametrize("name", ["fsdp_backward", "tp_backward", "fsdp_step"])
def test_training_goes_on_after_a_replay_on_all_ranks(two: Seen, name: str) -> None:
    for result in two(name):
        assert (result["error"], result["stopped"], result["finite"]) == (None, 3, True)
        (event,) = result["events"]
        place = LOG if name == "fsdp_step" else SQRT
        assert (event["rank"], event["step"], where(event)) == (1, 2, place)
        (said,) = result["warnings"]
        assert said.endswith("the update of this step is dropped")


def test_a_bad_shard_of_a_weight_is_named_with_its_rank(two: Seen) -> None:
    event = stopped_at_once(two("bad_shard"), rank=1)
    assert event["parameter"] == "first.weight" and event["kind"] == "posinf"
    assert event["phase"] in ("parameter", "optimizer")


def test_a_rank_that_is_alone_does_not_gather_weights_for_a_replay(two: Seen) -> None:
    for rank, result in enumerate(two("fsdp_evaluation")):
        event = result["event"]
        assert (event["rank"], event["layer"], event["op"]) == (rank, "fault", None)
        (note,) = event["notes"]
        assert note.startswith("the model's weights are sharded over the ranks, and only this")
        assert "so it cannot be run again: the report names no operation" in note


@pytest.mark.parametrize("name", STOPS)
def test_all_ranks_stop_at_one_step_and_name_where_it_began(two, four, name) -> None:
    rank, step, place = STOPS[name]
    results = (four if name == "mesh" else two)(name)
    assert where(stopped_at_once(results, rank, step)) == place
    assert all(result.get("finite", True) for result in results)


@pytest.mark.parametrize("name", ["clean", "fsdp_clean", "tp_clean"])
def test_a_clean_run_is_left_as_it_is(two: Seen, name: str) -> None:
    for result in two(name):
        assert result["error"] is None and not result["events"] and not result["warnings"]
        assert result["weights"] == result["untracked"]
        assert result["layers"] == ["", "fault", "first", "last"]


ENDS = """
import os, sys, time, torch, anynan
from torch import distributed, nn
distributed.init_process_group("gloo")
rank = distributed.get_rank()
class Fault(nn.Module):
    on = False
    def forward(self, x):
        return torch.log(-1 - x.abs()) if self.on and rank == 0 else x * 1.0
class After(nn.Module):
    def forward(self, x):
        if fault.on and rank == 0:
            open("made", "w").close()
        while fault.on and not os.path.exists("made"):  # what is not made yet cannot be told
            time.sleep(0.01)
        if fault.on and rank == 1 and sys.argv[1] == "dies":
            os._exit(9)
        if fault.on and rank == 1:
            raise KeyError("a bug on this rank")
        return x
fault = Fault()
layers = nn.Sequential(nn.Linear(4, 4), fault, After(), nn.Linear(4, 1))
model = nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
tracker = anynan.torch.track(model)
for step in range(4):
    fault.on = step == 2
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("other", ["raises", "dies"])
def test_what_a_rank_held_is_told_when_another_ends(other, tmp_path, monkeypatch) -> None:
    script = tmp_path / "train.py"
    script.write_text(ENDS, encoding="utf-8")
    command = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2"
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    done = python(*command.split(), script, other, cwd=tmp_path, timeout=LIMIT)
    assert done.returncode != 0
    assert "NaN first appeared in the forward pass of step 2" in done.stderr
    assert "the logarithm of a negative number is NaN" in done.stderr
