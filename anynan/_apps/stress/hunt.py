"""``anynan.stress``: hunt for inputs that make NaN or Inf before they come by themselves."""

import io
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from anynan._apps.stress.accepted import Accept, accepted
from anynan._apps.stress.edges import Margin, Site
from anynan._apps.stress.inputs import Array, Domain, Input, Program, domains
from anynan._apps.stress.lab import Lab, Watch
from anynan._apps.stress.messages import BUDGET_SPENT, INPUT_NOT_TRIED, NOTHING_TO_CHANGE
from anynan._apps.stress.report import INSIDE, OUTSIDE, SHAPED, SLOPED, Finding, StressReport
from anynan._apps.stress.rules import Trial, spoilt, trials
from anynan._apps.stress.script import as_main, hunt_in
from anynan._apps.stress.search import Step, nearer, towards
from anynan._apps.stress.written import Origin
from anynan._arrays.containers import leaves
from anynan._base import products
from anynan._base.context import but, setting
from anynan._base.folders import refuse_full
from anynan._base.messages import left
from anynan._reach import Holder
from anynan._reports.logs import private
from anynan.events import Event
from anynan.options import CHECKS, Names

DRAWS = 3  # random inputs within the range
NEAREST = 3  # inputs at an edge that are tracked
TRAINED = (1, 8, 64)  # steps of training on, after which the search goes on
Tell = Callable[[str, float], object]
Found = Mapping[str, Any] | None
_AS_IT_IS = "the example itself"
_WITH_GRADIENT = "with its gradient"
_T = TypeVar("_T")


def stress(
    target: Any, *example: Any, budget: float = 60.0, seed: int = 0, domain: Domain = None,
    accept: Accept = None, found: Found = None, tell: Tell | None = None,
    ignore: Names = (),
) -> StressReport:  # fmt: skip
    """Hunt for inputs at which a model, a loss or a training step makes NaN or Inf.

    It runs the example once, and lists every operation with an edge (a logarithm, a division, a
    root) with its distance from it. Then it moves inputs towards each edge along the slope of the
    distance, within the range of the example, and makes inputs by rule: a row of zeros, two rows
    alike, one row only. It runs what fails under ``track``, whose event has the operation, the
    line, the cause and the fix that was tried. An input that the code itself refuses with an
    exception does no harm.

    Args:
        target: A model, a training step, a loss, or any function of a framework or of arrays; or
            the path of a script, whose training loop is the step. It runs up to there.
        *example: What it is called with; a script's arguments. A tensor whose gradient your
            program takes has ``requires_grad``, as there.
        budget: Seconds after which it ends.
        seed: Seed of the inputs that are drawn at random.
        domain: ``(low, high)`` of what can come in, or one for each input by name. Else it is
            the range of the example, column by column from 8 rows on; what fails outside of it
            comes last in the report, in one line.
        accept: Findings that are accepted: reasons by a part of the finding's words or of its
            operation and line, or the path of a file that ``report.accept`` wrote.
        found: What was found before: ``inputs`` by name in place of the example's, ``steps`` of
            training before, the ``mode``. No search runs then, as in a test that
            ``report.to_pytest`` wrote.
        tell: Called with what is tried, and which part of the budget is spent.
        ignore: Names of notes that you do not want to see, such as ``"budget-spent"``.

    Returns:
        The report. Weights, optimizer and random states, modes and data are as before.

    Raises:
        TypeError: If no framework takes the target, or the domain is no range.
        ValueError: If the budget is not positive, the domain names no input, no note has a name
            of ``ignore``, or the file of accepted findings is none.
        Exception: What the target raises on the example.

    Example:
        >>> import numpy, anynan
        >>> def entropy(p):
        ...     return -(p * numpy.log(p)).sum()
        >>> report = anynan.stress(entropy, numpy.array([0.2, 0.8, 0.0001]), domain=(0, 1))
        >>> report.findings[0].words, report.findings[0].event.operation.name
        ('p: a row of zeros', 'log')
    """
    if not budget > 0:
        msg = f"budget={budget} leaves no time: give the seconds to search for"
        raise ValueError(msg)
    known, ignored = accepted(accept), CHECKS["ignore"]("ignore", ignore)

    def hunted(step: Any, *given: Any) -> StressReport:
        with _quiet():
            lab = lab_of(step, given)
        hunt = Hunt(lab, budget, seed, domain, tell or (lambda *_: None))
        report = hunt.report() if found is None else hunt.again(found)
        report.notes[:] = left(report.notes, ignored)
        report.origin = Origin(target, example, lab, hunt.arrays)
        for finding in report.findings:
            texts = (finding.words, finding.name)
            reasons = (item.reason for item in known if item.covers(report.target, texts))
            finding.reason = next(reasons, "")
        return report

    if not isinstance(target, str):
        return hunted(target, *example)
    report: StressReport = hunt_in(target, hunted, as_main(target, example))
    return report


def lab_of(target: Any, example: tuple[Any, ...]) -> Lab:
    """Find the framework that runs a target."""
    refused = (
        f"stress() cannot run a {type(target).__name__} on this example: it takes a model, or a "
        "function of tensors or arrays, and what it is called with"
    )
    lab: Lab = products.side("stress", "lab_of", target, example, refused=refused)
    return lab


class Hunt:
    """Run one target until nothing is left to try, or the time is over."""

    def __init__(self, lab: Lab, budget: float, seed: int, domain: Domain, tell: Tell) -> None:
        self.lab, self._budget, self._tell = lab, budget, tell
        self._program = self._made_of()
        hosts = [lab.host(x) for x in self._program.arrays]
        ranges = domains(domain, self._program.names)
        self.inputs = [
            Input.of(name, x, pair)
            for name, x, pair in zip(self._program.names, hosts, ranges, strict=True)
        ]
        self._random = np.random.default_rng(seed)
        self._began = time.monotonic()
        self._found: dict[tuple[Any, ...], Finding] = {}
        self._known: dict[object, Finding] = {}  # by the operation that was seen to go bad
        self._report = StressReport(self._program.call.__name__)
        self._mode: tuple[str, Callable[[], AbstractContextManager[object]]] = ("", nullcontext)
        self._steps: int | None = 0 if lab.trains else None
        self._deadly: dict[str, str] = {}
        self._sloped = lab.sloped(self._program.call)
        self._still = 0  # how many inputs stay, where weights are what changes

    def _made_of(self, weights: Sequence[Holder] = ()) -> Program:
        lab = self.lab
        held = [*lab.held(), *weights]
        return Program(lab.target, lab.args, lab.parameters, held, lab.changes)

    @property
    def _example(self) -> tuple[Array, ...]:
        return tuple(item.example for item in self.inputs)

    @property
    def arrays(self) -> dict[str, Any]:
        """Give the arrays of the example by name."""
        return dict(zip(self._program.names, self._program.arrays, strict=True))

    def report(self) -> StressReport:
        """Hunt."""
        with _quiet():
            margins = self._first()
            if not self._found:
                self._seek(list(margins))
                self._by_rule()
                self._by_spoiling()
                self._by_mode()
                self._by_training()
                self._by_weights(list(margins))
                self._by_gradient(list(margins))
        return self._ended()

    def again(self, found: Mapping[str, Any]) -> StressReport:
        """Run what was found before, and nothing else."""
        inputs, steps, mode = (found.get(key) for key in ("inputs", "steps", "mode"))
        inputs = inputs or {}
        with _quiet(), self._among(inputs), self._at(steps or 0, mode or ""):
            others = {*found} - {"inputs", "steps", "mode"} or {*inputs} - {*self.arrays}
            if others:
                msg = f"found= names {min(others)!r}: it takes inputs by name, steps and a mode"
                raise ValueError(msg)
            self.inputs = [
                Input.of(item.name, np.asarray(inputs[item.name], item.example.dtype), None)
                if item.name in inputs
                else item
                for item in self.inputs
            ]
            self._first()
        for finding in self._found.values():
            if finding.group == SLOPED:  # it was asked for
                finding.group = INSIDE
        return self._ended()

    def _ended(self) -> StressReport:
        report = self._report
        report.findings = sorted(self._found.values(), key=lambda finding: finding.rank)
        report.seconds = time.monotonic() - self._began
        if not self.inputs:
            report.notes.append(NOTHING_TO_CHANGE())
        if self._over:
            report.notes.append(BUDGET_SPENT(seconds=self._budget))
        return report

    @contextmanager
    def _at(self, steps: int, mode: str) -> Iterator[None]:
        """Stand where something was found: after steps of training, and in another mode."""
        modes = {"": nullcontext, **dict(self.lab.modes())}
        if self._sloped is not None:
            modes[_WITH_GRADIENT] = self._with_gradient
        if mode not in modes:
            msg = f"there is no mode {mode!r}: there are {', '.join(filter(None, modes)) or 'none'}"
            raise ValueError(msg)
        before = self._steps, self._mode
        with self.lab.kept(self._program.call):
            for _ in range(steps):
                self._train()
            self._steps, self._mode = steps or self._steps, (mode, modes[mode])
            try:
                yield
            finally:
                self._steps, self._mode = before

    @contextmanager
    def _among(self, names: Collection[str]) -> Iterator[None]:
        """Have weights be what changes, and the data stay, where these are no names of data."""
        before = self._program, self.inputs, self._still
        weights = [] if {*names} <= {*self.arrays} else self.lab.weights()
        if weights:
            self._program = self._made_of(weights)
            self._still = len(self.inputs)
            # Runs write into the weights themselves.
            hosts = [(held.name, self.lab.host(held.get()).copy()) for held in weights]
            self.inputs = [*self.inputs, *(Input.of(name, x, None) for name, x in hosts)]
        try:
            yield
        finally:
            self._program, self.inputs, self._still = before

    def _save(self, finding: Finding, folder: str) -> None:
        """Run a finding again, and have its tracker write a bundle."""
        refuse_full(folder)
        with _quiet(), self._among(finding.inputs), self._at(finding.steps or 0, finding.mode):
            pairs = ((item.name, item.example) for item in self.inputs)
            self._event([finding.inputs.get(name, x) for name, x in pairs], save=folder)
        if not os.path.isdir(folder):
            msg = f"save(): nothing goes bad in {self._report.target} this time"
            raise ValueError(msg)

    @property
    def _over(self) -> bool:
        return time.monotonic() - self._began > self._budget

    def _in_time(self, items: Iterable[_T]) -> Iterator[_T]:
        """Go on with what is to be tried until the time is over."""
        for item in items:
            if self._over:
                return
            yield item

    # Runs.

    def _made(self, arrays: Sequence[Array]) -> list[Any]:
        pairs = zip(arrays, self._program.arrays, strict=True)
        return [self.lab.like(new, x) for new, x in pairs]

    def _look(self, arrays: Sequence[Array]) -> Watch:
        """Run the program on inputs, and see what it does."""
        watch = Watch(self.lab)
        self._report.runs += 1
        self._tell(self._mode[0], (time.monotonic() - self._began) / self._budget)
        made = self._made(arrays)
        with self._mode[1]():
            self._seen = self.lab.observe(self._program.call, made, watch)
        self._report.seen |= bool(watch.raw)
        given = [x for _, x in leaves(self._seen.value, "") if self.lab.is_array(x)]
        # What a step prints or hands on, and does not return, ends in its last operation.
        self._unread = watch.spoilt and {*map(id, given)} <= {*map(id, made)}
        return watch

    def _first(self) -> dict[Site, Margin]:
        """Run the example itself."""
        watch = self._look(self._example)
        if self._seen.error is not None:
            raise self._seen.error
        self._report.margins = sorted(watch.margins.values(), key=lambda margin: margin.bits)
        self._deadly = {why: raw for raw, why in self.lab.deadly.items() if raw in watch.raw}
        self._phases = watch.phases
        if watch.bad is not None:
            self._investigate(self._example, _AS_IT_IS, watch.bad)
        return watch.margins

    def _train(self) -> None:
        """Run the example once more, and let what it changes stay."""
        self._program.call(*self._made(self._example))

    def _investigate(
        self, arrays: Sequence[Array], words: str, bad: object, *, shaped: bool = False,
        named: bool = False,
    ) -> bool:  # fmt: skip
        """Run inputs under a tracker; tell whether something is bad that did not come in.

        Args:
            arrays: The inputs.
            words: What was done to them.
            bad: Which operation was seen to go bad, and where.
            shaped: Whether no range speaks of them.
            named: Whether only what has an operation counts.
        """
        pairs = list(self._pairs(arrays))
        empty = any(item.example.size and not x.size for item, x in pairs)
        inside = all(item.holds(x) for item, x in pairs) and not (empty or self._still)
        group = SHAPED if shaped and not empty else INSIDE if inside else OUTSIDE
        if inside and self._mode[0] == _WITH_GRADIENT:
            group = SLOPED
        bad = bad, empty  # what an empty batch does is a fault of its own
        facts, known = self._facts(words, group, pairs), self._known.get(bad)
        if known is not None and replace(known, **facts).rank >= known.rank:
            known.add(facts["words"])
            return True
        event = self._event(arrays)
        if event is None or (named and event.operation is None):
            return False
        new = Finding(event=event, again=self._save, **facts)
        known = self._known[bad] = self._found.setdefault(new.key, new)
        if new.rank < known.rank:
            self._known[bad] = self._found[new.key] = new
        self._known[bad].add(known.words, *known.also, new.words)
        return True

    def _facts(
        self, words: str, group: str, pairs: Sequence[tuple[Input, Array]]
    ) -> dict[str, Any]:
        """Say what a finding says of its inputs; where weights change, of those that do."""
        mode, numbers = self._mode[0], [item.changes(x) for item, x in pairs]
        return {
            "words": f"{mode}: {words}" if mode and group != SLOPED else words,
            "group": group,
            "distance": max((item.distance(x) for item, x in pairs), default=0.0),
            "inputs": {
                item.name: x
                for (item, x), changed in zip(pairs, numbers, strict=True)
                if changed or not self._still
            },
            "steps": None if self._still else self._steps,
            "mode": mode,
            "numbers": "; ".join(filter(None, numbers)),
        }

    def _event(self, arrays: Sequence[Array], **options: Any) -> Event | None:
        """Track a run on inputs; by operation, where what goes bad leads nowhere."""
        for level in ("step", "operation"):
            events = self._events(arrays, level=level, **options)
            bad = [event for event in events if event.severity == "bad"]
            if any(event.phase == "input" for event in bad):
                return None
            bad += filter(_is_returned, events)
            if bad:
                return replace(bad[0], severity="bad")
        named = [event for event in events if event.operation is not None and self._unread]
        if not named:
            return None
        notes = tuple(left(named[0].notes, {"contained"}))
        return replace(named[0], severity="bad", notes=notes)

    def _events(self, arrays: Sequence[Array], **options: Any) -> list[Event]:
        with self.lab.kept(self._program.call), self._mode[1]():
            tracker = self.lab.track(self._program.call, **options)
            try:
                tracker(*self._made(arrays))
                tracker.flush()
            except Exception:  # noqa: BLE001, S110  the code refuses the input
                pass
            finally:
                tracker.remove()
        return list(tracker.events)

    # Attacks.

    def _seek(self, sites: Sequence[Site]) -> None:
        """Seek each edge along its slope, those first that are the fewest steps away."""
        if not any(item.fractions for item in self.inputs):
            return
        firsts: list[tuple[float, int, Site, Step]] = []
        for number, site in enumerate(self._in_time(x for x in sites if x.edge.has_slope)):
            step = self._step(site, self._example)
            reach = self._reach(step)
            if reach is not None:
                firsts.append((reach, number, site, step))
        for _, _, site, first in self._in_time(sorted(firsts, key=lambda item: item[:2])):
            self._report.count(harm=self._sought(site, first))

    def _reach(self, step: Step) -> float | None:
        """Estimate how many widths of the range an edge is away; None where no slope leads."""
        steep = sum(
            float(np.abs(np.nan_to_num(slope * item.width)).sum())
            for item, slope in zip(self.inputs, step.slopes, strict=True)
            if slope is not None and item.fractions
        )
        if step.distance is None or not steep:
            return None
        return step.distance / steep

    def _step(self, site: Site, arrays: tuple[Array, ...]) -> Step:
        watch = Watch(self.lab, site)
        self._report.runs += 1
        with self._mode[1]():
            slopes = self.lab.slopes(self._program.call, self._made(arrays), watch)
        slopes = [*[None] * self._still, *slopes[self._still :]]
        margin = watch.margins.get(site)
        return Step(None if margin is None else margin.distance, slopes, watch.bad is not None)

    def _sought(self, site: Site, first: Step) -> bool:
        self._tell(str(site), (time.monotonic() - self._began) / self._budget)

        def look(arrays: tuple[Array, ...]) -> Step:
            if self._over:
                return Step(None, (), bad=False)
            return self._step(site, arrays)

        def is_bad(arrays: tuple[Array, ...]) -> bool:
            return not self._over and self._look(arrays).bad is not None

        def is_harm(arrays: tuple[Array, ...], *, named: bool) -> bool:
            names = ", ".join(item.name for item, x in self._pairs(arrays) if item.changes(x))
            what = f"other weights ({names})" if self._still else names
            bad, words = self._look(arrays).bad, f"{what}: moved towards {site}"
            return bad is not None and self._investigate(arrays, words, bad, named=named)

        # The nearest that a second run can name; right at the edge, it may round otherwise.
        for found in towards(self.inputs, first, look):
            for arrays in islice(nearer(self.inputs, found, is_bad), NEAREST):
                if is_harm(arrays, named=True):
                    return True
            if is_harm(found, named=False):
                return True
        return False

    def _by_rule(self) -> None:
        for trial in self._in_time([*self._drawn(), *trials(self.inputs)]):
            self._report.count(harm=self._tried(trial))

    def _tried(self, trial: Trial) -> bool:
        if any(item.given and not item.holds(x) for item, x in self._pairs(trial.arrays)):
            return False
        for why, raw in self._deadly.items():
            if why in trial.odd:
                self._report.notes.append(INPUT_NOT_TRIED(what=trial.words, operation=raw))
                return False
        bad = self._look(trial.arrays).bad
        if bad is None:
            return False
        return self._investigate(trial.arrays, trial.words, bad, shaped=trial.shaped)

    def _pairs(self, arrays: Sequence[Array]) -> Iterator[tuple[Input, Array]]:
        return zip(self.inputs, arrays, strict=True)

    def _drawn(self) -> Iterator[Trial]:
        """Draw inputs within the range."""
        if not any(item.fractions and item.example.size for item in self.inputs):
            return
        for _ in range(DRAWS):
            arrays = tuple(
                (item.low + self._random.random(item.example.shape) * (item.high - item.low))
                .clip(item.low, item.high)
                .astype(item.example.dtype)
                if item.fractions
                else item.example
                for item in self.inputs
            )
            yield Trial("random numbers", arrays)

    def _by_spoiling(self) -> None:
        """Put a NaN or an Inf into one sample, and see whether the others stay finite."""
        example = self._example
        for number, item in enumerate(self.inputs):
            if not item.fractions or item.given or not item.example.shape[:1] > (1,):
                continue
            for words, x in self._in_time(spoilt(item.example)):
                arrays = [*example[:number], x, *example[number + 1 :]]
                good = self._others_stay_good(arrays, len(x))
                if good is not None:
                    self._report.count(harm=not good)
                if good is False:
                    self._found_spoilt(arrays, f"{item.name}: {words}")

    def _others_stay_good(self, arrays: Sequence[Array], many: int) -> bool | None:
        """Tell whether the first sample spoils no other; None where no result has rows."""
        self._look(arrays)
        value = self.lab.results(self._seen.value)
        results = [self.lab.host(x) for _, x in leaves(value, "") if self.lab.changes(x)]
        # What has the batch on two axes compares its samples.
        rows = [x[1:] for x in results if x.shape[:1] == (many,) and x.shape.count(many) == 1]
        return all(np.isfinite(x).all() for x in rows if x.size) if rows else None

    def _found_spoilt(self, arrays: Sequence[Array], words: str) -> None:
        events = self._events(arrays, level="step")
        named = dict(zip(self._program.names, arrays, strict=True))
        for event in [event for event in events if event.severity == "bad"][:1]:
            new = Finding(words, OUTSIDE, np.inf, event, named, self._steps, again=self._save)
            self._found.setdefault(new.key, new).add(words)

    def _by_mode(self) -> None:
        for mode in self._in_time(self.lab.modes()):
            self._mode = mode
            bad = self._look(self._example).bad
            harm = bad is not None and self._investigate(self._example, _AS_IT_IS, bad)
            self._report.count(harm=harm)
        self._mode = ("", nullcontext)

    def _by_training(self) -> None:
        """Train on, and seek again from there."""
        if not self.lab.trains or any(x.group == INSIDE for x in self._found.values()):
            return
        with self.lab.kept(self._program.call):
            for steps in self._in_time(range(1, max(TRAINED) + 1)):
                try:
                    self._train()
                except Exception:  # noqa: BLE001  the code itself ends the training
                    return
                self._steps = steps
                if steps in TRAINED and self._trained():
                    return

    def _by_weights(self, sites: Sequence[Site]) -> None:
        """Move the weights of a training step towards the edges that no data led to."""
        if not self.lab.trains:
            return
        with self._among(["weights"]):
            if self._still:
                self._seek([site for site in sites if site.key not in self._found])

    def _by_gradient(self, sites: Sequence[Site]) -> None:
        """Take the gradient that a target leaves to its caller, and try all that again."""
        if self._sloped is None or {"backward", "optimizer"} & self._phases:
            return
        before, self._mode = self._mode, (_WITH_GRADIENT, self._with_gradient)
        if "backward" in self._look(self._example).phases:
            self._seek([site for site in sites if site.key not in self._found])
            self._by_rule()
        self._mode = before

    def _with_gradient(self) -> AbstractContextManager[None]:
        return but(self._program, call=self._sloped or self._program.call)

    def _trained(self) -> bool:
        """Tell whether the training is lost; else seek what was not found yet."""
        watch = self._look(self._example)
        if watch.bad is not None:
            self._report.tried += 1
            return self._investigate(self._example, _AS_IT_IS, watch.bad)
        self._seek([site for site in watch.margins if site.key not in self._found])
        return False


def _is_returned(event: Event) -> bool:
    """Tell of an infinity that an operation made and the target returns, which may be meant."""
    contained = left(event.notes, {"contained"}) != event.notes
    infinite = event.severity == "suspect" and event.kind != "nan" and not event.expected
    return infinite and event.operation is not None and not contained


@contextmanager
def _quiet() -> Iterator[None]:
    """Let a program that runs many times say nothing."""
    with (
        warnings.catch_warnings(),
        redirect_stdout(io.StringIO()),
        np.errstate(all="ignore"),
        setting(private, True),
    ):
        warnings.simplefilter("ignore")
        yield
