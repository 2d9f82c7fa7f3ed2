"""Find the user's call behind an equation, from the stack that JAX kept of it."""

import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, cast

import jax

from anynan._base.sources import position, user_source
from anynan.events import Source


def _folders(*names: str) -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(os.path.join(paths[name], "") for name in names if paths.get(name))


_STDLIB, _PACKAGES = _folders("stdlib", "platstdlib"), _folders("purelib", "platlib")
_JAX = (
    os.path.join(os.path.dirname(jax.__file__), ""),
    *(
        os.path.join(folder, name, "")
        for folder in _PACKAGES
        for name in ("jaxlib", "opt_einsum", "numpy", "scipy", "ml_dtypes")
    ),
)

# What watches calls of JAX's stands between them and what they run.
_BETWEEN = os.path.join(os.path.dirname(__file__), "versions.py")

Point = tuple[CodeType, int]


@dataclass(frozen=True, slots=True)
class CallSite:
    """Name one call into JAX.

    Attributes:
        near: The stack down to the call, within the body it is in.
        around: The calls that the bodies around it come from, outermost first.
        inside: Its way through JAX to where the operation is bound.
        functions: The functions of JAX that it went through, outermost first.
    """

    near: tuple[Point, ...]
    around: tuple[tuple[Point, ...], ...]
    inside: tuple[Point, ...]
    functions: tuple[str, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """Give what tells the call from others."""
        return self.near, self.around


@lru_cache(maxsize=4096)
def is_jax(file: str) -> bool:
    """Tell whether a file is JAX's, or one that JAX's calls go through."""
    if file.startswith(_JAX):
        return True
    return file.startswith(_STDLIB) and not file.startswith(_PACKAGES)


def points(eqn: Any) -> list[Point]:
    """Give the stack of an equation, outermost frame first; empty where none was kept."""
    trace = eqn.source_info.traceback
    if trace is None:
        return []
    codes, offsets = trace.raw_frames()
    both = zip(reversed(codes), reversed(offsets), strict=True)
    return [(code, at) for code, at in both if code.co_filename != _BETWEEN]


def _stacks(chain: tuple[Any, ...], eqn: Any) -> list[list[Point]]:
    """Give the stack of each level, outermost first; empty where it is another call's.

    JAX keeps what it traced of a function, as of ``norm``. Where the backward rule of a
    ``custom_vjp`` called it first, all of it has the stack of the call that the rule is of.
    """
    found, body = [], None
    for level in (*chain, eqn):
        stack = points(level)
        borrowed = body is not None and _is_of_rule(stack)
        if borrowed and all(code.co_name != body for code, _ in stack):
            stack = []
        found.append(stack)
        name = level.params.get("name")
        body = name if isinstance(name, str) else body
    return found


def _is_of_rule(stack: list[Point]) -> bool:
    return any(
        code.co_qualname == "custom_vjp.__call__" and is_jax(code.co_filename) for code, _ in stack
    )


def call_site(chain: tuple[Any, ...], eqn: Any) -> CallSite:
    """Find the call into JAX that made an equation.

    A body inside another equation keeps only its own part of the stack: where no line outside
    of JAX is in it, the equation around it is the call.
    """
    inner: list[Point] = []
    functions: list[str] = []
    stacks = _stacks(chain, eqn)
    for depth, level in reversed(list(enumerate((*chain, eqn)))):
        outer, rest = _cut(stacks[depth])
        inner = rest + inner
        name = level.params.get("name")
        named = [name] if isinstance(name, str) and depth < len(chain) else []
        functions = [code.co_name for code, _ in rest] + _rules(stacks[depth]) + named + functions
        if outer:
            around = tuple(tuple(_cut(stack)[0]) for stack in stacks[:depth])
            return CallSite(tuple(outer), around, tuple(inner), tuple(functions))
    return CallSite((), (), tuple(inner), tuple(functions))


def in_rule(chain: tuple[Any, ...], eqn: Any) -> bool:
    """Tell whether an equation of the backward pass comes from a custom rule of the user's."""
    return any(map(_is_of_rule, _stacks(chain, eqn)))


def _cut(stack: list[Point]) -> tuple[list[Point], list[Point]]:
    """Cut a stack where it goes into JAX for good."""
    outside = [i for i, (code, _) in enumerate(stack) if not is_jax(code.co_filename)]
    at = max(outside, default=-1)
    return stack[: at + 1], _to_bind(stack[at + 1 :])


def _rules(stack: list[Point]) -> list[str]:
    """Name the functions of JAX whose own derivative rule made an equation."""
    names = [code.co_name for code, _ in stack if is_jax(code.co_filename)]
    return [name.removesuffix("_jvp") for name in names if name.endswith("_jvp")]


def _to_bind(stack: list[Point]) -> list[Point]:
    """Cut a stack where the operation is bound: what follows is JAX differentiating it."""
    for i, (code, _) in enumerate(stack):
        if code.co_name == "bind" and code.co_filename.endswith("core.py"):
            return stack[:i]
    return stack


class _Frame:
    """Look like a frame, to the core."""

    def __init__(self, point: Point, back: "_Frame | None") -> None:
        self.f_code, offset = point
        self.f_lineno = _line(self.f_code, offset)
        self.f_lasti = offset
        self.f_back = back
        self.f_globals: dict[str, Any] = {}


@lru_cache(maxsize=4096)
def _line(code: CodeType, offset: int) -> int:
    return position(code, offset)[0] or code.co_firstlineno


def source(chain: tuple[Any, ...], eqn: Any) -> Source | None:
    """Find the user's line behind an equation."""
    return _source(point for stack in _stacks(chain, eqn) for point in stack)


def source_here(frame: FrameType | None) -> Source | None:
    """Find the user's line behind an equation that is made at this moment, in a frame."""
    stack: list[Point] = []
    while frame is not None:
        stack.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return _source(reversed(stack))


def _source(stack: Iterable[Point]) -> Source | None:
    frame: _Frame | None = None
    for point in stack:
        if not is_jax(point[0].co_filename):
            frame = _Frame(point, frame)
    return None if frame is None else user_source(cast(Any, frame), framework="jax")
