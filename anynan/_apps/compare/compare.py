"""``anynan.compare``: the first place where two runs part."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anynan._apps.compare.captures import (
    Capture,
    Choice,
    Perturbation,
    RecordedChoices,
    Runner,
    RunRequest,
    Taken,
    Way,
    settings_of,
)
from anynan._apps.compare.comparison import BEYOND, Comparison, Parting, Row, Turn
from anynan._apps.compare.distances import apart, holds, nearest, summed
from anynan._apps.compare.messages import (
    AFTER_CHOICE,
    BACKWARD_NOT_COMPARED,
    LAYER_ALONE,
    SHAPES_DIFFER,
)
from anynan._apps.compare.pairs import pairs, refuse_unused
from anynan._base import products
from anynan._base.messages import left
from anynan._readings.patterns import within
from anynan.options import CHECKS, Names

RERUNS = 2
_TURNS = 10  # runs at most, to see whether rounding alone turns a choice
_UNSEEN = "its gates (ReLU, clipping) have another shape or number in the second model"
_GATES = "an element near a limit (of a ReLU, of clipping) lies on its other side"
_ZEROS = (
    "an element is 0 in one run and not in the other, so it may lie at a limit (of a ReLU, of "
    "clipping)"
)


def capture(
    model: Any, *batch: Any, inputs: Mapping[str, Any] | None = None, backward: bool = True
) -> Capture:
    """Run a model once, and keep what every layer was given and made.

    Use it to compare what cannot be in one process: two machines, two versions of a framework,
    Keras on two backends. ``Capture.save`` writes one, ``Capture.load`` reads it, and
    ``compare`` takes it as its second model.

    Args:
        model: A model, or a function that calls one.
        *batch: What it is called with.
        inputs: What it is called with by name, as the batch of a tokenizer is.
        backward: Take the backward pass, too.

    Returns:
        The capture; the model's weights, buffers and random states are as before.

    Raises:
        TypeError: If no adapter knows how to run the model.

    Example:
        >>> import torch, anynan
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        >>> [taken.layer for taken in anynan.comparing.capture(model, torch.ones(2, 4)).taken][:3]
        ['0', '1', '']
    """
    if inputs is not None:
        model, batch = _by_name(model), (*batch, dict(inputs))
    return _side(model, "the model").run(batch, RunRequest(weights=True, backward=backward))


def compare(
    a: Any,
    b: Any,
    *batch: Any,
    inputs: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    backward: bool = True,
    follow: bool = False,
    limit: float = BEYOND,
    ignore: Names = (),
) -> Comparison:
    """Find the first layer where two models differ by more than rounding explains.

    Both run on the same batch and are compared in the order of execution, forward, then backward.
    What rounding explains is measured, not chosen: the first model runs again with weights and
    inputs moved by one rounding unit of the coarser side. The place is the first layer whose
    outputs differ by more than ``limit`` times what that moved them, while its inputs do not.
    Weights, buffers and random states are put back.

    Args:
        a: The reference: a PyTorch or Keras model, a JAX function, or a function that calls
            one.
        b: The other, of the same framework or another; or a ``Capture`` of one that ran
            elsewhere.
        *batch: What both are called with; arrays of any framework.
        inputs: What both are called with by name: ``inputs=tokenizer(text)``.
        names: Patterns from the first model's layer paths to the second's, where they differ:
            ``{"layers.*": "blocks_*"}``. What no pattern names is matched by path, then by
            order and shape.
        backward: Compare the gradients, too.
        follow: Make the second model use the first one's discrete choices (top-k, argmax, sort)
            and draws (dropout, noise); else what comes after one that differs is not compared.
        limit: How many times what rounding explains is too much.
        ignore: Names of notes that you do not want to see, such as ``"no-gradient"``.

    Returns:
        A Comparison; ``print`` it.

    Raises:
        TypeError: If no adapter knows how to run one of the two.
        ValueError: If a pattern of ``names`` fits nothing, or no note has a name of ``ignore``.

    Example:
        >>> import copy, torch, anynan
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch...>
        >>> mine = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        >>> port = copy.deepcopy(mine)
        >>> port[1].eps = 1e-3
        >>> anynan.compare(mine, port, torch.randn(4, 8)).place.layer
        '1'
    """
    if inputs is not None:
        a, batch = _by_name(a), (*batch, dict(inputs))
        b = b if isinstance(b, Capture) else _by_name(b)
    first = _side(a, "the first model")
    ready = b if isinstance(b, Capture) else None
    second = _side(b, "the second model") if ready is None else None
    if limit <= 1:
        msg = f"limit={limit} is no more than rounding itself: it must be above 1"
        raise ValueError(msg)
    ignored = CHECKS["ignore"]("ignore", ignore)
    comparing = _Comparing(first, second, ready, batch, dict(names or {}), limit, follow=follow)
    found = comparing.result(backward=backward)
    return replace(found, holes=left(found.holes, ignored), notes=left(found.notes, ignored))


def _by_name(model: Any) -> Any:
    """Have a model called by name with what its last argument holds."""
    if not callable(model):
        return model

    def call(*batch: Any) -> Any:
        return model(*batch[:-1], **batch[-1])

    return call


def _side(target: Any, what: str) -> Runner:
    """Find the adapter that runs a target."""
    refused = (
        f"compare() cannot run {what}: a {type(target).__name__} is no PyTorch or Keras model, "
        "no JAX function, and no function that calls one"
    )
    side: Runner = products.side("compare", "side_of", target, refused=refused)
    return side


@dataclass(frozen=True, slots=True)
class _Comparing:
    """Run both sides as often as it takes, and judge."""

    first: Runner
    second: Runner | None
    ready: Capture | None
    batch: tuple[Any, ...]
    names: dict[str, str]
    limit: float
    follow: bool

    @property
    def layouts(self) -> bool:
        """Tell whether the two may lay out their arrays otherwise."""
        others = {side.backend for side in (self.second, self.ready) if side}
        return self.first.backend not in others

    def result(self, *, backward: bool) -> Comparison:
        """Compare."""
        mine = self.first.run(self.batch, RunRequest(weights=True, backward=backward))
        held = mine.choices if self.follow else None
        if self.second is not None:
            wish = RunRequest(weights=True, backward=backward, follow=held)
            theirs = self.second.run(self.batch, wish)
        else:
            assert self.ready is not None
            theirs = self.ready
        refuse_unused(self.names, mine.taken, theirs.taken)
        unit = max(mine.unit, theirs.unit, 2.0**-53)
        moved = [
            self.first.run(
                self.batch,
                RunRequest(backward=backward, nudge=Perturbation(unit, seed), follow=mine.choices),
            )
            for seed in range(RERUNS)
        ]
        turns, until = self._turns(mine, theirs, moved)
        more = list(moved)
        while (
            any(not turn.rounding and not turn.choice.drawn for turn in turns)
            and len(more) < _TURNS
        ):
            nudge = Perturbation(unit, len(more))
            more.append(self.first.run(self.batch, RunRequest(nudge=nudge, follow=mine.choices)))
            turns, until = self._turns(mine, theirs, more)
        moved += self._widened(mine, theirs, unit, backward=backward)
        gates = [turn.choice for turn in turns if turn.choice.gate]
        rows, holes = self._rows(mine, theirs, moved, unit, until, gates)
        place = self._place(rows)
        operation = None
        if place is not None:
            operation = self._inside(place, unit)
        elif self._precision(mine, theirs):
            rows = self._local(rows, mine, unit)
        notes = dict.fromkeys((*mine.notes, *theirs.notes))
        return Comparison(
            place, tuple(rows), operation, self._weights(mine, theirs, unit, place),
            self._settings(place), turns,
            tuple(dict.fromkeys(holes)), unit, tuple(notes), self.limit,
        )  # fmt: skip

    def _widened(
        self, mine: Capture, theirs: Capture, unit: float, *, backward: bool
    ) -> list[Capture]:
        """Run in float64 what runs in float32: long sums round more than their terms.

        Where only the second side can, how far it moves is told by the first one's names.
        """
        if unit != 2.0**-24:
            return []
        for side, own in ((self.first, mine), (self.second, theirs)):
            if side is None or not side.can_widen:
                continue
            wish = RunRequest(backward=backward, wide=True, follow=own.choices)
            try:
                run = side.run(self.batch, wish)
            except Exception:  # noqa: BLE001, S112  an operation has no such kernel
                continue
            return [run if side is self.first else _carried(run, mine, theirs, self.names)]
        return []

    def _turns(
        self, mine: Capture, theirs: Capture, moved: Sequence[Capture]
    ) -> tuple[tuple[Turn, ...], int | None]:
        """Find the choices that differ, and after how many calls of layers the first does."""
        own, again = _discrete(mine), [_discrete(run) for run in moved]
        partners, loose = _partners(own, _discrete(theirs))
        found: list[Turn] = []
        until = None
        for i, x in enumerate(own):
            partner, same, share = partners.get(id(x)), False, None
            if partner is None and not (x.drawn and loose):
                continue
            if partner is not None:
                same = np.array_equal(x.picked, partner.picked)
                if same and not partner.moved:
                    continue
                share = partner.moved or float(np.mean(x.picked != partner.picked))
            rounding = not x.drawn and any(run[i].moved for run in again if i < len(run))
            found.append(Turn(x, share, rounding, held=same))
            if not same:
                until = x.before  # what was chosen after it follows from it
                break
        if mine.backend == theirs.backend:
            found += _turned_gates(mine, theirs)
        return tuple(found), until

    def _rows(
        self, mine: Capture, theirs: Capture, moved: Sequence[Capture], unit: float,
        until: int | None, gates: Sequence[Choice],
    ) -> tuple[list[Row], list[str]]:  # fmt: skip
        rows: list[Row] = []
        holes: list[str] = []
        if not (mine.whole_gradients and theirs.whole_gradients):
            mine, theirs, *moved = map(arriving, (mine, theirs, *moved))
        again = [{taken.key: taken for taken in run.taken} for run in moved]

        def told(x: Taken, y: Taken | None) -> None:
            others = [run[x.key] for run in again if x.key in run]
            row = self._row(x, y, others, unit)
            rows.append(row)
            if row.error is None and x.made:
                holes.append(_hole(x, y))

        found = pairs(_of("forward", mine)[:until], _of("forward", theirs), self.names)
        for pair in found:
            told(*pair)
        if until is not None:
            can = (
                "the second model cannot be held to it" if self.follow else "follow=True continues"
            )
            holes.append(AFTER_CHOICE(next=can))
            return rows, holes
        back = _of("backward", mine)
        seen = _sees_gates(mine, theirs)
        if back and (not seen or any(row.shapes for row in rows)):
            why = "shapes differ in the forward pass" if seen else _UNSEEN
            holes.append(BACKWARD_NOT_COMPARED(from_="", why=why))
            return rows, holes
        shut = _shut(mine, found, gates)
        for x, y in pairs(back, _of("backward", theirs), self.names, found):
            if shut(x):
                why = _GATES if gates else _ZEROS
                start = f" from {x.layer or 'the model'} on"
                holes.append(BACKWARD_NOT_COMPARED(from_=start, why=why))
                break
            told(x, y)
        return rows, holes

    def _row(self, x: Taken, y: Taken | None, again: Sequence[Taken], unit: float) -> Row:
        joint = x.way == "backward"
        floor, into = unit, unit
        for z in again:
            floor = max(floor, apart(x.made, z.made, layouts=False, joint=joint) or 0.0)
            into = max(into, apart(x.given, z.given, layouts=False, joint=joint) or 0.0)
        error = given = None
        if y is not None:
            error = apart(x.made, y.made, layouts=self.layouts, joint=joint)
            far = apart(x.given, y.given, layouts=self.layouts, joint=joint)
            given = None if far is None else far / into
        other, call = (None, x.call) if y is None else (y.layer, y.call)
        sizes = None
        if error is None and y is not None and not self.layouts and x.way == "forward":
            sizes = _sizes(x, y)
        return Row(
            x.layer, other, x.kind, x.call, x.way, error, floor,
            given, other_call=call, broken=_broken(x, y), shapes=sizes,
        )  # fmt: skip

    def _place(self, rows: Sequence[Row]) -> Row | None:
        """Find the first call whose inputs agree and whose results do not."""
        beyond = [row for row in rows if row.ratio is not None and row.ratio > self.limit]
        fresh = [row for row in beyond if row.given is None or row.given <= self.limit]
        return next(iter(fresh), beyond[0] if beyond else None)

    def _inside(self, place: Row, unit: float) -> Parting | None:
        """Find the operation of a layer's own code that parts first."""
        second = self.second
        if place.way == "backward" or second is None or place.other is None:
            return None
        if not (self.first.can_look_inside and second.can_look_inside):
            return None
        here, there = (place.layer, place.call), (place.other, place.other_call)
        mine = self.first.run(self.batch, RunRequest(inside=here))
        nudge = Perturbation(unit, 0)
        moved = self.first.run(
            self.batch, RunRequest(inside=here, nudge=nudge, follow=mine.choices)
        )
        held = mine.choices if self.follow else None
        theirs = second.run(self.batch, RunRequest(inside=there, follow=held))
        left = list(theirs.operations)
        last = None
        for i, x in enumerate(mine.operations):
            again = moved.operations[i].made if i < len(moved.operations) else x.made
            floor = max(unit, apart(x.made, again, layouts=False) or 0.0)
            found = None
            for j, y in enumerate(left):
                far = apart(x.made, y.made, layouts=self.layouts)
                if far is not None and len(x.made) == len(y.made) and far <= self.limit * floor:
                    found = j
                    break
            if found is None:
                other = (left[0].name, left[0].source) if left else (None, None)
                return Parting(last, x.name, x.source, *other)
            left = left[found + 1 :]
            last = x.name
        return None

    def _settings(self, place: Row | None) -> tuple[tuple[str, Any, Any], ...]:
        """List the settings that differ, of the layer where the models part.

        Across frameworks one name may mean two things, as ``momentum`` does: none is compared.
        """
        second = self.second
        if place is None or place.other is None or second is None:
            return ()
        if self.first.backend != second.backend:
            return ()
        mine = settings_of(self.first.layers.get(place.layer))
        theirs = settings_of(second.layers.get(place.other))
        both = [name for name in mine if name in theirs]
        return tuple((x, mine[x], theirs[x]) for x in both if mine[x] != theirs[x])

    def _precision(self, mine: Capture, theirs: Capture) -> bool:
        second = self.second
        return second is not None and second.can_give and mine.unit != theirs.unit

    def _local(self, rows: list[Row], mine: Capture, unit: float) -> list[Row]:
        """Give the second model's layers the first one's inputs: what each adds by itself."""
        assert self.second is not None
        partner = {
            (row.other, row.other_call): (row.layer, row.call)
            for row in rows
            if row.way == "forward" and row.other is not None
        }
        made = {(t.layer, t.call): t for t in mine.taken if t.way == "forward"}
        given = {other: made[own].given for other, own in partner.items()}
        own = {key: taken.given for key, taken in made.items()}
        theirs = self.second.run(self.batch, RunRequest(given=given, follow=mine.choices))
        alone = self.first.run(
            self.batch, RunRequest(given=own, nudge=Perturbation(unit, 0), follow=mine.choices)
        )
        there = {(t.layer, t.call): t for t in theirs.taken}
        again = {(t.layer, t.call): t for t in alone.taken}
        found = []
        for row in rows:
            key = (row.layer, row.call)
            other = there.get((row.other or "", row.other_call))
            if row.way == "backward" or other is None or key not in again:
                found.append(row)
                continue
            floor = max(unit, apart(made[key].made, again[key].made, layouts=False) or 0.0)
            far = apart(made[key].made, other.made, layouts=self.layouts)
            found.append(row if far is None else replace(row, local=far / floor))
        return found

    def _weights(
        self, mine: Capture, theirs: Capture, unit: float, place: Row | None
    ) -> tuple[tuple[str, float], ...]:
        """Compare weights of the same name; those of the place with any, where names differ."""
        found = []
        for name, x in mine.weights.items():
            if x.dtype.kind != "f":
                continue
            y = theirs.weights.get(name)
            if y is not None:
                far = nearest(x, y)
                if far == math.inf:  # NaN in one of them, or the first is all zeros
                    far = 1.0 if np.isfinite(x).all() and np.isfinite(y).all() else math.nan
            elif place is not None and name.rpartition(".")[0] == place.layer and theirs.weights:
                there = any(holds(z, x, 4 * unit) for z in theirs.weights.values())
                far = 0.0 if there else math.inf
            else:
                continue
            if far is not None and not far <= 2 * unit:
                found.append((name, far))
        return tuple(found)


def _broken(x: Taken, y: Taken | None) -> str:
    """Say which of the two made NaN or +Inf; -Inf is what masks are made of."""
    bad = [
        side is not None and any(np.isnan(made).any() or np.isposinf(made).any() for made in side)
        for side in (x.made, None if y is None else y.made)
    ]
    return {(True, True): "both", (True, False): "first", (False, True): "second"}.get(
        (bad[0], bad[1]), ""
    )


def _sizes(x: Taken, y: Taken) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Give the shapes of what two calls made, where one made more numbers than the other."""
    if len(x.made) != 1 or len(y.made) != 1 or x.made[0].size == y.made[0].size:
        return None
    return x.made[0].shape, y.made[0].shape


def _discrete(run: Capture) -> list[Choice]:
    return [choice for choice in run.choices if not choice.gate]


def _of(way: Way, run: Capture) -> list[Taken]:
    return [taken for taken in run.taken if taken.way == way]


def _shut(
    mine: Capture, found: Sequence[tuple[Taken, Taken | None]], gates: Sequence[Choice]
) -> Callable[[Taken], bool]:
    """Give what tells of a gradient whether it came through a gate that differs."""
    ended = {(x.layer, x.call): i for i, x in enumerate(mine.taken) if x.way == "forward"}
    opens = [ended.get((x.layer, x.call), -1) for x, y in found if y is not None and _opens(x, y)]
    last = max([*opens, *(gate.before - 1 for gate in gates)], default=-1)
    return lambda x: (
        ended.get((x.layer, x.call), -1) <= last or any(within(g.layer, x.layer) for g in gates)
    )


def _opens(x: Taken, y: Taken) -> bool:
    """Tell whether an element is 0 in one run and not in the other: a gate opens or closes."""
    return len(x.made) == len(y.made) and any(
        a.shape == b.shape and not np.array_equal(a == 0, b == 0)
        for a, b in zip(x.made, y.made, strict=True)
    )


def _carried(run: Capture, mine: Capture, theirs: Capture, names: Mapping[str, str]) -> Capture:
    """Move the first run's arrays as far as another run moved the second's."""
    own = {taken.key: taken for taken in theirs.taken}
    wide = {taken.key: taken for taken in run.taken}
    taken = []
    found: list[tuple[Taken, Taken | None]] = []
    ways: tuple[Way, ...] = ("forward", "backward")
    for way in ways:
        found = pairs(_of(way, mine), _of(way, theirs), names, found)
        for x, y in found:
            if y is None or y.key not in wide:
                continue
            z = wide[y.key]
            made = apart(own[y.key].made, z.made, layouts=False) or 0.0
            given = apart(own[y.key].given, z.given, layouts=False) or 0.0
            taken.append(
                replace(
                    x,
                    made=tuple(array * (1 + made) for array in x.made),
                    given=tuple(array * (1 + given) for array in x.given),
                )
            )
    return replace(run, taken=taken)


def arriving(run: Capture) -> Capture:
    """Take the gradients that arrive at layers for what there is of the backward pass."""
    return replace(
        run,
        taken=[
            replace(x, given=(), made=tuple(summed(x.given))) if x.way == "backward" else x
            for x in run.taken
        ],
        whole_gradients=False,
    )


def _partners(own: Sequence[Choice], theirs: Sequence[Choice]) -> tuple[dict[int, Choice], bool]:
    """Pair choices, by the identity of the first run's; tell whether the second drew others."""
    held, partners, loose = RecordedChoices(own), {}, False
    for y in theirs:
        like = held.next(y.name, y.picked.shape)
        if like is not None:
            partners[id(like)] = y
        loose = loose or (like is None and y.drawn)
    return partners, loose


def _gates(run: Capture) -> list[Choice]:
    return [choice for choice in run.choices if choice.gate]


def _sees_gates(mine: Capture, theirs: Capture) -> bool:
    """Tell whether each gate of a backward pass has its like in the other run."""
    if mine.backend != theirs.backend:
        return True  # zeros in what layers made tell of them
    forms = [[(x.name, x.picked.shape) for x in _gates(run)] for run in (mine, theirs)]
    return forms[0] == forms[1]


def _turned_gates(mine: Capture, theirs: Capture) -> list[Turn]:
    return [
        Turn(x, None, rounding=True)
        for x, y in zip(_gates(mine), _gates(theirs), strict=False)
        if x.picked.shape == y.picked.shape and not np.array_equal(x.picked, y.picked)
    ]


def _hole(x: Taken, y: Taken | None) -> str:
    name = (x.layer or "the model") + (f", call {x.call + 1}" if x.call else "")
    if y is None:
        return LAYER_ALONE(layer=name, what="gradient" if x.way == "backward" else "layer")
    return SHAPES_DIFFER(layer=name, other=y.layer or "the model")
