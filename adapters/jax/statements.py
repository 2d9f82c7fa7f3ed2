"""What a program computed outside of any jit before an exception ended it.

JAX runs such operations one by one, and tells nobody. But the frames that the exception passed
still hold their operands, so an expression of the program's can be computed once more.
"""

import ast
import functools
import linecache
from collections.abc import Callable, Iterator
from itertools import islice
from types import FrameType, ModuleType, TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import tree_util

from anynan._base import tracebacks
from anynan._base.sources import is_library, is_own


class Computed(NamedTuple):
    """Hold an expression of the program's.

    Attributes:
        run: Computes it; it takes by name what is given.
        given: The arrays that it is computed of, by their names.
        held: All that the names in it stand for.
        came: What may have come of it.
    """

    run: Callable[..., Any]
    given: dict[str, Any]
    held: list[Any]
    came: list[Any]


def computed(error: BaseException) -> Iterator[Computed]:
    """List what the program's functions computed before, first things first.

    What a function does that a library of JAX's called it may do again: the library traces it, or
    calls it many times. What the program does by itself may write a file: there only calls of
    JAX's functions are made again.

    Args:
        error: What ended the program.
    """
    called = False
    for through in tracebacks.frames(error):
        frame = through.tb_frame
        if is_library(frame.f_code.co_filename):
            called = called or (not is_own(frame) and _uses_jax(frame))
            continue
        for value, came in _expressions(through):
            scope = {**frame.f_globals, **frame.f_locals}
            if called or _is_of_jax(value, scope):
                yield _made(value, came, frame, scope)


def _uses_jax(frame: FrameType) -> bool:
    kept = list(frame.f_globals.values())
    return any(value is jax or value is jax.numpy or value is jax.lax for value in kept)


def _is_of_jax(value: ast.expr, scope: dict[str, Any]) -> bool:
    """Tell whether an expression calls functions of JAX's alone, and methods of arrays."""
    called = [x.func for x in ast.walk(value) if isinstance(x, ast.Call)]
    names = [x for x in map(_root, called) if isinstance(x, ast.Name)]
    return all(_comes_of_jax(scope.get(x.id)) for x in names)


def _root(node: ast.expr) -> ast.expr:
    return _root(node.value) if isinstance(node, ast.Attribute) else node


def _comes_of_jax(value: Any) -> bool:
    module = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None)
    return isinstance(value, jax.Array) or str(module).partition(".")[0] == "jax"


def _expressions(through: TracebackType) -> Iterator[tuple[ast.expr, list[Any]]]:
    """List what a frame has computed, with what came of it: the variables, the last arguments."""
    frame, inner = through.tb_frame, through.tb_next
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    body = _body("".join(lines), frame.f_code.co_firstlineno, frame.f_code.co_name)
    for node in body:
        assigned = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if assigned is not None and assigned.lineno < through.tb_lineno:
            names = (x for x in ast.walk(node) if isinstance(x, ast.Name))
            stored = [x.id for x in names if isinstance(x.ctx, ast.Store)]
            yield assigned, [frame.f_locals.get(name) for name in stored]
    place = next(islice(frame.f_code.co_positions(), through.tb_lasti // 2, None), None)
    came = [] if inner is None else list(inner.tb_frame.f_locals.values())
    for node in body:
        if isinstance(node, ast.Call) and place == _place(node):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            simple = ast.Name | ast.Constant | ast.Starred
            yield from ((value, came) for value in given if not isinstance(value, simple))


def _place(node: ast.expr) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


@functools.lru_cache(maxsize=16)
def _body(text: str, line: int, name: str) -> tuple[ast.AST, ...]:
    """Give the parts of a function in their order, without those of functions inside."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # being edited just now
        return ()
    body = tree.body if name == "<module>" else []
    for node in (x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and x.name == name):
        if min([node.lineno, *(x.lineno for x in node.decorator_list)]) == line:
            body = node.body
    return tuple(part for statement in body for part in _parts(statement))


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _parts(child)


def _made(value: ast.expr, came: list[Any], frame: FrameType, scope: dict[str, Any]) -> Computed:
    """Make an expression a function of the arrays that it names."""
    code = compile(ast.Expression(value), frame.f_code.co_filename, "eval", dont_inherit=True)
    code = code.replace(co_name=frame.f_code.co_name)
    names = dict.fromkeys(x.id for x in ast.walk(value) if isinstance(x, ast.Name))
    held = {name: scope[name] for name in names if name in scope}

    def run(**arrays: Any) -> Any:
        return eval(code, {**scope, **arrays})  # noqa: S307  it is the program's own code

    run.__name__ = frame.f_code.co_name
    given = {name: value for name, value in held.items() if _of_arrays(value)}
    return Computed(run, given, list(held.values()), came)


def _of_arrays(value: Any) -> bool:
    """Tell what a trace can take apart; a class of a library's may ask its arrays for a shape."""
    if not isinstance(value, tuple | list | dict):
        return isinstance(value, jax.Array | np.ndarray)
    leaves = tree_util.tree_leaves(value)
    return bool(leaves) and all(isinstance(x, jax.Array | np.ndarray) for x in leaves)
