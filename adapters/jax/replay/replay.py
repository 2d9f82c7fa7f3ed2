"""Run a failing step again, and read every operation that may have made its bad values."""

from typing import Any

from anynan._base.context import replay_context
from anynan._base.walks import walk
from anynan._calls.collector import collecting
from anynan._diagnosis.agreement import CheckedPoint, divergence
from anynan._diagnosis.lineage import PLACING, Replay
from anynan._readings.policy import may_mask
from anynan._readings.readings import ProbePoint, Reading
from anynan.jax.graphs.operations import Op
from anynan.jax.messages import CALLBACK_AGAIN
from anynan.jax.program.evaluator import silent
from anynan.jax.program.program import Program
from anynan.jax.read import probes
from anynan.jax.replay import saving
from anynan.jax.replay.flags import Flag, flags
from anynan.jax.replay.records import Recorder, spoilt
from anynan.jax.replay.steps import Step
from anynan.jax.replay.zoom import nested

# Readings in one second run: more of them take long to compile, and layers are read first.
MOST = 400


def replay(step: Step, first: int, reading: Reading | None = None) -> Replay:
    """Run a step again and record its operations with bad results.

    Args:
        step: What is run again.
        first: Number of the reading to explain; those before it were excused.
        reading: The reading itself, to be compared with what the second run reads; None where
            there was no first run.
    """
    program = step.program
    arrays = step.inputs()
    into = collecting.get()
    if into is not None:
        saving.inputs(into, step)
    watch = step.watch
    words = {index: int(step.read[at, 0]) for index, at in watch.at.items()}
    points = program.points(backward=True)
    failing = watch.points[min(first, len(watch.points) - 1)]
    points += [failing] if failing in program.choices() else []
    bad, together = _bad_points(step, first, points, words)
    with replay_context():
        chosen = slice_behind(program, bad, words, together)
        if len(chosen) > MOST and not nested(program, chosen):
            between = [point.value for point in points if point.value in chosen]
            found = flags(program, arrays, dict.fromkeys(between, "sum"))
            words.update({index: flag.word for index, flag in found.items()})
            here = {point.value for point in watch.points[:first]}
            more = [s for s in points if words.get(s.value) and s.value not in here]
            chosen = slice_behind(program, more or bad, words, together)
        # A forward value may have been masked, or nobody took it but its gradient.
        if bad and bad[0].phase in ("backward", "optimizer"):
            chosen |= ahead(program, chosen)
        wanted: dict[int, Any] = dict.fromkeys(chosen, "sum")
        wanted.update(dict.fromkeys(_before(points, chosen), "span"))
        # A sum does not tell Infs of both signs from NaN.
        wanted[failing.value] = "code"
        found = _seen(program, arrays, wanted, failing.value, words[failing.value])
        passed = [] if reading is None else _passed(step, found, failing.value, points)
        ends = not program.settings.layers
        same = reading is None or divergence(step.rows, reading, passed, ends=ends) is None
        if same and not step.partial:
            _trail(step, found)
        harmful = [point for point in points if watch.at.get(point.value) not in step.meant]
        result, recorder = record(program, arrays, found, harmful)
        result.passed = passed
    step.spoilt = spoilt(program, recorder.held)
    result.end()
    return result


def _seen(
    program: Program, arrays: list[Any], wanted: dict[int, Any], failing: int, word: int
) -> dict[int, Flag]:
    """Read values; where no round of loops in loops gave NaN on, those with an Inf that was made.

    Args:
        program: What is run again.
        arrays: Its arguments.
        wanted: What to read of which value.
        failing: The value that is explained.
        word: What was read of it.
    """
    found = flags(program, arrays, wanted)
    inner = [flag for i, flag in found.items() if program.graph.values[i].loops]
    if not (found[failing].unread or (inner and all(flag.unread for flag in inner))):
        return found
    ops = program.operations().ops
    made = {i for op in ops if op.name not in PLACING for i in op.outs}
    inside = dict.fromkeys(made & wanted.keys(), probes.POSINF)
    if found[failing].unread:
        inside[failing] = min(word, probes.POSINF)
    return flags(program, arrays, wanted, inside=inside)


def _bad_points(
    step: Step, first: int, points: list[ProbePoint], words: dict[int, int]
) -> tuple[list[ProbePoint], set[int]]:
    """List what was read bad, masks last; with it the values that were read with others.

    Args:
        step: What ran.
        first: Number of the first reading that counts.
        points: Of its program.
        words: What was read of values, by their numbers; gets what they share with others.
    """
    watch = step.watch
    meant = {index for index, at in watch.at.items() if at in step.meant}
    bad = [
        point
        for point in watch.points[first:]
        if words[point.value] and point.phase != "input" and point.value not in meant
    ]
    # A weight is read together with its optimizer state.
    joined = {i: point.value for point in bad for i in watch.members(point.value)}
    words.update({i: words[index] for i, index in joined.items()})
    hidden = joined.keys() - {point.value for point in bad}
    bad += [point for point in points if point.value in hidden]
    return masks_last(bad, words), {joined[i] for i in hidden}


def _passed(
    step: Step, found: dict[int, Flag], failing: int, points: list[ProbePoint]
) -> list[CheckedPoint]:
    """List what the second run read where the first one did, or between the ends it read."""
    passed, watch = [], step.watch
    for point in watch.points if step.program.settings.layers else points:
        flag = found.get(point.value)
        if point.parameter is not None and point.value == failing:
            break  # behind it the first run was not judged
        if flag is None or point.parameter is not None or watch.at.get(point.value) in step.meant:
            continue
        if flag.unread and point.value != failing:
            continue
        low, high = probes.UNREAD if flag.row is None else probes.read(flag.row)
        word = flag.word
        at = watch.at.get(point.value)
        once = word if at is None else int(step.read[at, 0])
        if point.value != failing and {word, once} == {probes.POSINF, probes.NAN}:
            word = once
        if word:
            low, high = probes.read((word, *probes.UNREAD))
        passed.append(CheckedPoint(point.layer, point.phase, point.tensor, point.call, low, high))
    return passed


def _before(points: list[ProbePoint], chosen: set[int]) -> list[int]:
    """Give the layers' outputs up to the last value that is looked at: the report's trail."""
    last = max((i for i, point in enumerate(points) if point.value in chosen), default=-1)
    before = points[: last + 1]
    return [point.value for point in before if point.phase == "forward" or point.value in chosen]


def everything(step: Step) -> Replay | None:
    """Run a step again with every operation read; None if all of it is finite."""
    program, watch = step.program, step.watch
    arrays = step.inputs()
    points = program.points(backward=True)
    wanted: dict[int, Any] = {i: "sum" for op in program.operations().ops for i in op.outs}
    wanted.update(dict.fromkeys((point.value for point in points), "sum"))
    with replay_context():
        found = flags(program, arrays, wanted)
        if all(flag.word < probes.NAN for flag in found.values()) and nested(program, wanted):
            found = flags(program, arrays, wanted, inside=dict.fromkeys(wanted, probes.NAN))
        if not any(flag.word for flag in found.values()):
            return None
        results = {i for i in program.graph.results if watch.at.get(i) not in step.meant}
        if max((found[i].word for i in results & found.keys()), default=0) <= probes.NEGINF:
            # A gradient that reached nothing that the step returns was dropped, as a loss
            # scaler's is.
            points = program.points(backward=program.settings.gradients)
        harmful = [point for point in points if watch.at.get(point.value) not in step.meant]
        return record(program, arrays, found, harmful)[0]


def record(
    program: Program, arrays: list[Any], found: dict[int, Flag], points: list[ProbePoint]
) -> tuple[Replay, Recorder]:
    """Turn the values that were found bad into records and sinks."""
    operations = program.operations()
    bad = [op for op in operations.ops if any(i in found and found[i].word for i in op.outs)]
    recorder = Recorder(program, found, bad, points)
    recorder.capture(arrays)
    result = Replay(recorder.records(), recorder.sinks())
    result.notes += dict.fromkeys(recorder.trouble)
    if any(node.name == "io_callback" and not silent(node.eqn) for node in program.graph.nodes):
        what = "a callback of the step whose result is used"
        result.notes.append(CALLBACK_AGAIN(what=what))
    elif any(node.name == "pure_callback" for node in program.graph.nodes):
        result.notes.append(CALLBACK_AGAIN(what="a pure_callback of the step"))
    return result, recorder


def masks_last(bad: list[ProbePoint], words: dict[int, int]) -> list[ProbePoint]:
    """Sort what is bad: a mask is no failure of its own, what came after it is looked for first."""
    masks = [s for s in bad[1:] if may_mask(probes.KINDS[words[s.value]], s.phase)]
    return sorted(bad, key=masks.__contains__)


def slice_behind(
    program: Program, bad: list[ProbePoint], words: dict[int, int], together: set[int]
) -> set[int]:
    """Give the results of every operation that may have made the first bad values.

    The way back from a bad value ends where a value was read and is finite. What comes after
    the first NaN is bad because of it.

    Args:
        program: What ran.
        bad: Where bad values are.
        words: What was read of values, by their numbers.
        together: Of the bad ones, those read with others.
    """
    operations = program.operations()
    chosen: set[int] = set()
    for point in bad:
        chosen |= {point.value, *behind(program, point.value, words)}
        # A weight is read together with its optimizer state: which of them it is shows later.
        alone = point.value not in together
        if len(chosen) > MOST or (alone and words[point.value] == probes.NAN):
            break
    return chosen | {
        i for op in operations.ops if any(o in chosen for o in op.outs) for i in op.outs
    }


def behind(program: Program, start: int, words: dict[int, int] | None = None) -> set[int]:
    """Give the results of the operations that a value is made by, back to what was read finite.

    Args:
        program: What ran.
        start: Number of the value.
        words: What was read of values, by their numbers.
    """
    words = words or {}
    graph, operations = program.graph, program.operations()
    chosen: set[int] = set()

    def more(i: int) -> list[int]:
        writer = graph.values[i].writer
        op: Op | None = None if writer is None else operations.of.get(writer)
        found = graph.made_of(i)
        if op is not None:
            chosen.update(op.outs)
            # What a forward operation hid may be what the gradient runs into.
            hidden = [] if op.forward is None else op.forward.outs
            found = [*graph.values[i].feeds, *op.ins, *hidden]
        return [j for j in found if words.get(j, 1)]

    list(walk([start], more))
    return chosen


def ahead(program: Program, chosen: set[int]) -> set[int]:
    """Give the results of the forward operations that values go into, none if too many.

    Args:
        program: What ran.
        chosen: Numbers of the values.
    """
    graph, operations = program.graph, program.operations()
    found: set[int] = set()

    def more(i: int) -> set[int]:
        made: set[int] = set()
        for reader in graph.readers(i):
            if reader is not None and not reader.backward:
                op = operations.of.get(reader.index)
                outs = {j for j in (reader if op is None else op).outs if j is not None}
                found.update(outs if op is not None else ())
                made |= outs
        return made

    many = any(len(found) > MOST for _ in walk(chosen, more)) or len(found) > MOST
    return set() if many else found


def _trail(step: Step, found: dict[int, Flag]) -> None:
    """Fill in how large the values of each layer were."""
    rows = step.rows
    for order, point in enumerate(step.watch.points):
        flag = found.get(point.value)
        if flag is not None and flag.row is not None and point.phase == "forward":
            low, high = probes.read(flag.row)
            if rows.lo[order] > rows.hi[order]:
                rows.correct(order, low, high)
