"""A plain function of JAX's that is one operation to its users, as its parts are bound.

JAX neither jits it nor gives it a rule of its own, so there is no one place where it is bound:
its call is told by its frame.
"""

import inspect
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

import jax
import jax.numpy as jnp

from anynan._diagnosis.rules.repair import RepairError
from anynan.jax.graphs import names
from anynan.jax.graphs.stacks import MENDED
from anynan.jax.replay.mended import Mended, of_call


class Tally:
    """Hold what a function binds, in order.

    Args:
        name: What it is called.

    Attributes:
        parts: The results of each.
        passed: Whether a part is the whole operation by itself.
        ends: Whether the function gives what the last one gives.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.parts: list[list[Any]] = []
        self.passed = self.ends = False

    def add(self, word: str | None, made: Any) -> None:
        """Take a part."""
        self.parts.append(list(made) if isinstance(made, list | tuple) else [made])
        self.passed = self.passed or word == self._name

    def of(self, run: Callable[..., Any], *args: Any) -> Any:
        """Run the function."""
        out = run(*args)
        self.ends = bool(self.parts) and len(self.parts[-1]) == 1 and self.parts[-1][0] is out
        return out


class Whole:
    """Stand for one call of such a function.

    Args:
        frame: The call.
        counts: Runs a function to see what it binds.

    Attributes:
        passed: Whether a part of it is the whole operation.
        mended: What stands in its place.
        shapes: The form of what each part gives.
        position: How many parts were bound.

    Raises:
        RepairError: If it cannot be called once more from its frame, or its last part does not
            give what it gives.
    """

    def __init__(
        self, frame: FrameType, counts: Callable[[str, Callable[..., Any], list[Any]], Tally]
    ) -> None:
        code = frame.f_code
        if code.co_freevars or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
            raise RepairError(code.co_name)
        fn = FunctionType(code, frame.f_globals)
        known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = inspect.signature(fn).bind_partial()
        given.arguments.update({name: frame.f_locals[name] for name in known})
        self.mended: Mended = of_call(fn, given, numbers=False)
        tally = counts(names.function((code.co_name,)) or "", *self.mended.itself)
        self.passed, self.position = tally.passed, 0
        if not (tally.ends or tally.passed):
            raise RepairError(code.co_name)
        self.shapes = [[(x.shape, x.dtype) for x in made] for made in tally.parts]

    @property
    def open(self) -> bool:
        """Tell whether there are parts still to come."""
        return not self.passed and self.position < len(self.shapes)

    def blank(self, primitive: Any) -> Any:
        """Give a part's results, of which nothing is used: zeros."""
        with jax.named_scope(MENDED):
            made = [jnp.zeros(*form) for form in self.shapes[self.position - 1]]
        return made if primitive.multiple_results else made[0]
