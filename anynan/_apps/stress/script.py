"""The training loop of a script, as a step that can be run again and again."""

import ast
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import Any

from anynan._apps.stress.batches import TRAINING, Batches
from anynan._base import products

STEP, HUNT, READ = "__anynan_step__", "__anynan_hunt__", "__anynan_read__"
_GIVEN = "_of_the_loop"  # the ending of parameters that stand for the loop's own names
_LOOPS = (ast.For, ast.While)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_INNER = (*_SCOPES, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class NoLoopError(ValueError):
    """Raise where a script has no loop whose body can be a step."""


def stepped(source: str, path: str) -> tuple[Any, int]:
    """Make a function of the body of a script's training loop, and have it handed to a hunt.

    The loop that is meant is the innermost whose body trains; where none does, the last loop
    outside of every function, else the last of all. When the script comes to it, its body becomes
    a function over the very same names, which is given to what the script's globals hold under
    ``HUNT``.

    Args:
        source: The script's text.
        path: Its path, which reports quote.

    Returns:
        Its code, and the line of the loop.

    Raises:
        NoLoopError: If there is no such loop.
        SyntaxError: If it is no Python.
    """
    tree = ast.parse(source, path)
    found = list(_loops(tree, None))
    trains = [item for item in found if _trains(item[0])]
    inner = [
        item
        for item in trains
        if not any(
            _trains(x) for x in ast.walk(item[0]) if x is not item[0] and isinstance(x, _LOOPS)
        )
    ]
    if not found:
        msg = f"{path} has no loop: give a function, as module:step"
        raise NoLoopError(msg)
    outside = [item for item in found if item[1] is None]
    loop, function = inner[0] if inner else (outside or found)[-1]
    _replace(loop, function)
    return compile(ast.fix_missing_locations(tree), path, "exec"), loop.lineno


def _loops(node: ast.AST, function: Any) -> Iterator[tuple[Any, Any]]:
    """Walk the loops of a script, each with the function that it is in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _LOOPS):
            yield child, function
        inside = child if isinstance(child, ast.FunctionDef) else function
        if not isinstance(child, ast.AsyncFunctionDef | ast.Lambda):
            yield from _loops(child, inside)


def _trains(loop: ast.AST) -> bool:
    calls = (node.func for node in ast.walk(loop) if isinstance(node, ast.Call))
    names = {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in calls}
    return bool(names & TRAINING)


def _replace(loop: Any, function: Any) -> None:
    given = list(_assigned([loop.target])) if isinstance(loop, ast.For) else []
    names = sorted({*_assigned(loop.body), *given})
    outer = set() if function is None else set(_declared(function))
    own = [name for name in names if name not in outer]
    shared = [name for name in names if name in outer]
    scopes: list[ast.stmt] = [ast.Global(shared)] if shared else []
    if own:
        scopes.append(ast.Global(own) if function is None else ast.Nonlocal(own))
    loop.body = _handed(loop.body, scopes, names, given)
    if function is not None and own:
        # They are names of the function's, though its loop binds none of them any more.
        local = ast.parse("if 0:\n " + " = ".join([*own, "None"])).body[0]
        at = isinstance(function.body[0], ast.Expr) and len(function.body) > 1
        function.body.insert(int(at), ast.copy_location(local, function.body[0]))


def _handed(
    body: list[ast.stmt], scopes: Sequence[ast.stmt], names: Sequence[str], given: Sequence[str]
) -> list[ast.stmt]:
    """Make a function of a loop's body, and call the hunt with it and its example."""
    reads = [read for item in body if (read := _Read.of(item, names))]
    handed = [*given, *(name for read in reads for name in read.names)]
    step = ast.parse(f"def {STEP}({', '.join(name + _GIVEN for name in handed)}): pass").body[0]
    assert isinstance(step, ast.FunctionDef)
    bound = [ast.parse(f"{name} = {name}{_GIVEN}").body[0] for name in given]
    left = {id(read.statement): read.otherwise() for read in reads}
    bound += [item for read in reads for item in ast.parse(read.bound).body]
    step.body = [*scopes, *bound, *(_Ends().visit(left.get(id(x), x)) for x in body)]
    call = ast.parse(f"{HUNT}({', '.join([STEP, *given, *(x.asked for x in reads)])})").body[0]
    for node in (step, call, *bound):
        ast.copy_location(node, body[0])
    return [step, call]


class _Read:
    """Be a statement that may read a batch, as ``x, y = data.next_batch()`` does.

    Attributes:
        statement: The statement.
        names: What it binds.
        asked: What reads once, if it is a batch, as code.
        bound: What takes a batch that was read, as code.
    """

    def __init__(self, statement: ast.Assign, names: tuple[str, ...]) -> None:
        self.statement, self.names = statement, names
        calls = [node.func for node in ast.walk(statement.value) if isinstance(node, ast.Call)]
        called = {name for func in calls for name in islice(_loaded(func), 1)}
        both = (", ".join(sorted(x)) for x in ({*_loaded(statement.value)}, called))
        told = ", ".join(f"lambda: [{x}]" for x in both)
        self.asked = f"*{READ}({names}, lambda: {ast.unparse(statement.value)}, {told})"
        taken = "; ".join(f"{name} = {name}{_GIVEN}" for name in names)
        self.bound = f"if {names} in {READ}: {taken}"

    @classmethod
    def of(cls, item: ast.stmt, bound: Collection[str]) -> "_Read | None":
        """Take a statement that calls something, and reads nothing that its loop binds."""
        if not isinstance(item, ast.Assign) or len(item.targets) > 1:
            return None
        target, called = item.targets[0], [x for x in ast.walk(item) if isinstance(x, ast.Call)]
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        names = tuple(part.id for part in parts if isinstance(part, ast.Name))
        own = len(names) == len(parts) and not {*_loaded(item.value)} & {*bound}
        return cls(item, names) if called and own else None

    def otherwise(self) -> ast.stmt:
        """Give the statement, for where it reads no batch."""
        test = ast.parse(f"{self.names} not in {READ}", mode="eval").body
        return ast.copy_location(ast.If(test, [self.statement], []), self.statement)


def _loaded(node: ast.AST) -> Iterator[str]:
    return (x.id for x in ast.walk(node) if isinstance(x, ast.Name))


class _Ends(ast.NodeTransformer):
    """Have ``break``, ``continue`` and ``return`` of a loop's body end the step."""

    _inner = False  # whether it is in a loop inside of that

    def visit(self, node: ast.AST) -> Any:
        """Change what ends the loop's body; what ends an inner loop stays."""
        own = isinstance(node, ast.Break | ast.Continue) and not self._inner
        if own or isinstance(node, ast.Return):
            return ast.copy_location(ast.Return(None), node)
        if isinstance(node, _SCOPES):
            return node
        before, self._inner = self._inner, self._inner or isinstance(node, _LOOPS)
        changed = self.generic_visit(node)
        self._inner = before
        return changed


def _assigned(body: Sequence[ast.AST]) -> Iterator[str]:
    """Name what statements bind in their own scope."""
    todo: list[ast.AST] = list(body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((item.asname or item.name).partition(".")[0] for item in node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name
        if not isinstance(node, _INNER):
            todo += ast.iter_child_nodes(node)


def _declared(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Global):
            yield from node.names


class Ended(BaseException):
    """End a script once its loop was hunted in."""


def as_main(path: str, arguments: Sequence[str]) -> Callable[[Any, dict[str, Any]], None]:
    """Give what runs a script's code as the program, and leaves this program as it was."""

    def run(code: Any, scope: dict[str, Any]) -> None:
        before = sys.modules["__main__"], list(sys.argv), list(sys.path)
        load = products.part("run", "program").load
        try:
            load(path, list(arguments), module=False, code=code, scope=scope)()
        finally:
            sys.modules["__main__"], sys.argv[:], sys.path[:] = before

    return run


def hunt_in(path: str, hunt: Callable[..., Any], run: Callable[[Any, dict[str, Any]], None]) -> Any:
    """Run a script up to its training loop, and hunt with the loop's body.

    Args:
        path: The script.
        hunt: Is given the body, and what the loop hands to it: a batch.
        run: Runs the script's code in a namespace that it completes.

    Returns:
        What ``hunt`` returns.

    Raises:
        ValueError: If there is no such loop, or the script does not come to it.
        OSError: If the script cannot be read.
    """
    with open(path, encoding="utf-8") as file:
        code, line = stepped(file.read(), path)
    found: list[Any] = []

    def reached(step: Any, *given: Any) -> None:
        names = [name.removesuffix(_GIVEN) for name in inspect.signature(step).parameters]
        kind = inspect.Parameter.POSITIONAL_ONLY
        step.__signature__ = inspect.Signature([inspect.Parameter(x, kind) for x in names])
        step.__code__ = step.__code__.replace(co_name="step", co_qualname="step")
        step.__name__ = "step"
        found.append(hunt(step, *given))
        raise Ended

    try:
        run(code, {HUNT: reached, READ: Batches()})
    except Ended:
        return found[0]
    msg = f"{path}: the script ended before its loop at line {line} ran"
    raise NoLoopError(msg)
