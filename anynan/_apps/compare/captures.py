"""What one run of a model gave, layer by layer, on the host."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from anynan._base.about import __version__
from anynan.events import Source

Array = NDArray[Any]
Way = Literal["forward", "backward"]
_FORM = "anynan capture 2"


@dataclass(frozen=True, slots=True)
class Taken:
    """Hold what went into one call of a layer, and what came out.

    Attributes:
        layer: Its path.
        kind: What the layer is: the name of its class.
        call: Which call of it, from 0.
        way: ``forward``, or ``backward``: then the gradients of its outputs go in, and those of
            its inputs and of its own weights come out.
        given: The arrays that go in, those of numbers with a fraction only.
        made: The arrays that come out.
    """

    layer: str
    kind: str
    call: int
    way: Way
    given: tuple[Array, ...]
    made: tuple[Array, ...]

    @property
    def key(self) -> tuple[str, int, Way]:
        """Tell it from the others of its run."""
        return self.layer, self.call, self.way


@dataclass(frozen=True, slots=True)
class Choice:
    """Hold what one discrete operation chose: a sort, an argmax, a draw.

    Attributes:
        name: The operation.
        layer: The layer whose code it is in.
        source: Its line.
        picked: What it chose, whole numbers.
        before: How many calls of layers had ended by then.
        moved: The share of it that would have been chosen otherwise, had it not been held to
            another's choice.
        gate: Whether only its gradient jumps: ReLU, clipping, the larger of two.
        drawn: Whether it is random: the numbers that were drawn, or what dropout keeps.
    """

    name: str
    layer: str
    source: Source | None
    picked: Array
    before: int
    moved: float = 0.0
    gate: bool = False
    drawn: bool = False


class RecordedChoices:
    """Find to which choice of another run each discrete operation of a run is held.

    They are taken in order; what has no like is passed over.
    """

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._left = [choice for choice in choices if not choice.gate]

    def next(self, name: str, shape: tuple[int, ...]) -> Choice | None:
        """Give the other run's choice, None if it has no like.

        Args:
            name: Of the operation that chooses.
            shape: Of what it chooses.
        """
        for i, choice in enumerate(self._left):
            alike = _MASK.get(choice.name, choice.name) == _MASK.get(name, name)
            if alike and choice.picked.shape == tuple(shape):
                del self._left[: i + 1]
                return choice
        return None


# What dropout draws, by its own name and by that of its distribution.
_MASK = {"dropout": "bernoulli"}


@dataclass(frozen=True, slots=True)
class Operation:
    """Hold what one operation of a layer's own code made."""

    name: str
    source: Source | None
    made: tuple[Array, ...]


@dataclass(slots=True)
class Capture:
    """Hold what every layer was given and made in one run.

    Attributes:
        backend: Name of the framework.
        taken: The calls of layers, in the order in which they ended.
        weights: The weights and buffers, by name, where they were asked for.
        unit: The largest unit roundoff among the dtypes that the layers made.
        choices: What discrete operations chose, in order, if a framework shows them.
        operations: What one layer's own code computed, if it was asked for.
        notes: What was not seen.
        whole_gradients: Whether the gradients that leave a layer were taken, not only those that
            arrive at it.
    """

    backend: str
    taken: list[Taken] = field(default_factory=list)
    weights: dict[str, Array] = field(default_factory=dict)
    unit: float = 0.0
    choices: list[Choice] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    whole_gradients: bool = True

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the capture to one ``.npz`` file, which holds no code and no pickle.

        Raises:
            OSError: If it cannot be written.

        Example:
            >>> import numpy as np, tempfile, os
            >>> from anynan._apps.compare.captures import Capture
            >>> path = os.path.join(tempfile.mkdtemp(), "run.npz")
            >>> Capture("numpy", weights={"w": np.ones(2)}).save(path)
            >>> Capture.load(path).weights["w"].tolist()
            [1.0, 1.0]
        """
        arrays: dict[str, Array] = {}

        def put(items: Sequence[Array]) -> Any:
            names = [f"a{len(arrays) + i}" for i in range(len(items))]
            arrays.update(zip(names, items, strict=True))
            return names

        named = replace(
            self,
            taken=[replace(t, given=put(t.given), made=put(t.made)) for t in self.taken],
            weights=dict(zip(self.weights, put(list(self.weights.values())), strict=True)),
            choices=[replace(c, picked=put([c.picked])) for c in self.choices],
            operations=[],
        )
        said = {"form": _FORM, "anynan": __version__, **asdict(named)}
        with open(path, "wb") as file:
            text = np.frombuffer(json.dumps(said).encode(), np.uint8)
            np.savez_compressed(file, **arrays, said=text)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Capture":
        """Read what ``save`` wrote.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If it is no capture, or cannot be read.
        """
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as held:
                said = json.loads(bytes(held["said"]).decode())
                assert said.pop("form") == _FORM
                del said["anynan"]

                def get(names: Sequence[str]) -> tuple[Array, ...]:
                    return tuple(held[name] for name in names)

                for t in said["taken"]:
                    t.update(given=get(t["given"]), made=get(t["made"]))
                for c in said["choices"]:
                    source = c["source"] and Source(**c["source"])
                    c.update(source=source, picked=get(c["picked"])[0])
                said["taken"] = [Taken(**t) for t in said["taken"]]
                said["weights"] = {name: held[key] for name, key in said["weights"].items()}
                said["choices"] = [Choice(**c) for c in said["choices"]]
                return cls(**said)
        except FileNotFoundError:
            raise
        except Exception as error:
            msg = f"{os.fspath(path)} is no capture that anynan.comparing.capture(...).save wrote"
            raise ValueError(msg) from error


@dataclass(frozen=True, slots=True)
class Perturbation:
    """Move numbers by about one unit in the last place, the same way every time.

    Each is multiplied by a random factor between ``1 - 2 * unit`` and ``1 + 2 * unit``, which
    is how far rounding may leave a number that was computed in another order.

    Attributes:
        unit: Unit roundoff of the dtype: 2**-24 for float32.
        seed: Which factors.
    """

    unit: float
    seed: int

    def factor(self, name: str, shape: tuple[int, ...]) -> Array:
        """Give the factors of one array.

        Args:
            name: Which array; the same name has the same factors.
            shape: Its shape.
        """
        draw = np.random.default_rng([self.seed, *name.encode()])
        return np.asarray(1 + 2 * self.unit * (2 * draw.random(shape) - 1))


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Say how a side shall run.

    Attributes:
        weights: Take the weights, too.
        backward: Run the backward pass too.
        nudge: Move weights and inputs by so much.
        wide: Compute in float64, with the same weights and inputs.
        follow: What discrete operations shall choose, in order.
        given: What layers shall be given in the place of their inputs, by layer and call.
        inside: The layer and the call of which every operation is wanted, and nothing else.
    """

    weights: bool = False
    backward: bool = False
    nudge: Perturbation | None = None
    wide: bool = False
    follow: Sequence[Choice] | None = None
    given: Mapping[tuple[str, int], tuple[Array, ...]] | None = None
    inside: tuple[str, int] | None = None


class Runner:
    """Run a model as an adapter knows how: one side of a comparison.

    Attributes:
        backend: Name of the framework.
        can_widen: Whether it can compute in float64 what is in float32.
        can_give: Whether layers can be given other inputs.
        can_look_inside: Whether the operations of one layer can be taken.
        layers: Its layers by path, where these are objects that hold their settings.
    """

    backend: str
    layers: Mapping[str, Any] = {}
    can_widen = False
    can_give = False
    can_look_inside = False

    def run(self, batch: tuple[Any, ...], wish: RunRequest) -> Capture:
        """Run once, and put everything back: weights, buffers, random states.

        Args:
            batch: What the model is called with; arrays of any framework.
            wish: How to run.
        """
        raise NotImplementedError


def settings_of(layer: Any) -> dict[str, Any]:
    """Give a layer's settings: public attributes that are strings, numbers, or tuples of these."""

    def is_plain(x: Any) -> bool:
        return x is None or isinstance(x, bool | int | float | str)

    return {
        name: value
        for name, value in getattr(layer, "__dict__", {}).items()
        if not name.startswith("_") and name not in ("name", "training")
        if is_plain(value) or (isinstance(value, tuple) and all(map(is_plain, value)))
    }


def cotangent(shape: tuple[int, ...], number: int) -> Array:
    """Give what an output is multiplied with to make one number of it, for a backward pass.

    Args:
        shape: Of the output.
        number: Which output.
    """
    size = int(np.prod(shape, dtype=np.int64))
    draw = np.random.default_rng(number).standard_normal(shape)
    return np.asarray(draw / max(size, 1) ** 0.5)
