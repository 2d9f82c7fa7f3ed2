"""What ``anynan.precision`` says breaks first in JAX, against JAX's own float16 on the CPU.

``python -m tests.benchmarks.precision_jax OUT.jsonl [PROGRAM...]`` takes the programs of
``make wild``. The judge knows nothing of anynan: it traces a step with arrays in float16, runs one
primitive after the other, and notes the first that makes NaN or Inf of finite numbers, and not in
float32 as well. A weight is multiplied until that happens. Loops are not opened: a step that breaks
inside of one is left out.
"""

import functools
import importlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import source_info_util
from jax.extend import core

import anynan
from anynan.jax.graphs import names
from tests.wild.jax_programs.program import PROGRAMS

FACTORS = [4.0**k for k in range(1, 14)]
MODULES = ("plain", "linen", "equinox", "haiku_jraph", "inference", "optimizers")
PLACING = ("broadcast_in_dim", "select_n", "iota", "copy", "pad")
LOOPS = ("scan", "while", "cond")


def cases() -> list[str]:
    """List the programs whose libraries are there."""
    for name in MODULES:
        with suppress(ImportError):
            importlib.import_module(f"tests.wild.jax_programs.{name}")
    return list(PROGRAMS)


def good(x: Any) -> bool:
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
        return True
    return bool(np.isfinite(np.asarray(x).astype(np.float32)).all())


def place(eqn: Any) -> tuple[str, str]:
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    line = "" if frame is None else f"{os.path.basename(frame.file_name)}:{frame.start_line}"
    return eqn.primitive.name, line


def inner(eqn: Any) -> Any:
    """Give the jaxpr of a call, None for what is no call."""
    if eqn.primitive.name in LOOPS:
        return None
    found = [x for x in eqn.params.values() if isinstance(x, core.ClosedJaxpr | core.Jaxpr)]
    return found[0] if found else None


class Judge:
    """Run a program, and list what makes NaN or Inf of finite numbers."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def run(self, jaxpr: Any, consts: Any, args: Any) -> list[Any]:
        env: dict[Any, Any] = {}
        env.update(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            ins = [x.val if isinstance(x, core.Literal) else env[x] for x in eqn.invars]
            env.update(zip(eqn.outvars, self.equation(eqn, ins), strict=True))
        return [x.val if isinstance(x, core.Literal) else env[x] for x in jaxpr.outvars]

    def equation(self, eqn: Any, ins: list[Any]) -> list[Any]:
        body = inner(eqn)
        if body is not None:
            plain = body.jaxpr if isinstance(body, core.ClosedJaxpr) else body
            return self.run(plain, getattr(body, "consts", ()), ins[-len(plain.invars) :])
        with eqn.ctx.manager:
            outs = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(eqn.params))
        outs = outs if eqn.primitive.multiple_results else [outs]
        bad = not all(map(good, outs)) and all(map(good, ins))
        if bad and eqn.primitive.name not in PLACING:
            self.found.append(place(eqn))
        return list(outs)


def judged(step: Any, args: Any) -> list[tuple[str, str]]:
    closed, _ = jax.make_jaxpr(step, return_shape=True)(*args)
    judge = Judge()
    judge.run(closed.jaxpr, closed.consts, jax.tree.leaves(args))
    return judge.found


def half(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: (
            x.astype(jnp.float16) if isinstance(x, jax.Array) and x.dtype == jnp.float32 else x
        ),
        tree,
    )


def real(step: Any, args: Any) -> tuple[str, str] | None:
    """Tell what breaks first in float16, and not in float32."""
    meant = {line for _, line in judged(step, args)}
    return next((each for each in judged(step, half(args)) if each[1] not in meant), None)


def scaled(args: tuple[Any, ...], which: int | None, leaf: int, factor: float) -> tuple[Any, ...]:
    """Multiply one array of the weights, or of all arguments."""
    part = args if which is None else args[which]
    leaves, form = jax.tree.flatten(part)
    wide = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and x.dtype == jnp.float32]
    at = wide[leaf % len(wide)]
    leaves[at] = leaves[at] * factor
    new = jax.tree.unflatten(form, leaves)
    return new if which is None else (*args[:which], new, *args[which + 1 :])


def verdict(report: Any, found: tuple[str, str]) -> str:
    said = report.first("forward", "loss", "backward", "optimizer")
    if said is None:
        return "fits" if report.fits else "cast" if report.breaks else "not known"
    source = said.source
    line = "" if source is None else (source.via or f"{source.file}:{source.line}")
    line = os.path.basename(line.partition(" ")[0])
    return "right" if (said.place[4], line) == (names.primitive(found[0]), found[1]) else (
        f"{said.place[4]} at {line}"
    )  # fmt: skip


def pairs(case: str) -> Iterator[dict[str, Any]]:
    loop = PROGRAMS[case].build("")
    args = loop.start()
    step = functools.partial(lambda *given: loop.step(*given))
    found = real(step, args)
    if found is not None:
        yield told(case, loop, args, found, "as it is")
        return
    for leaf in (0, 1, 3, 5):
        for factor in FACTORS:
            given = scaled(args, loop.weights, leaf, factor)
            if not all(map(good, jax.tree.leaves(half(given)))):
                break
            found = real(step, given)
            if found is not None:
                yield told(case, loop, given, found, f"{leaf} * {factor:g}")
                break


def told(case: str, loop: Any, given: Any, found: tuple[str, str], what: str) -> dict[str, Any]:
    report = anynan.precision(loop.step, *given, plan=False)
    said = "loop" if found[0] in LOOPS else verdict(report, found)
    return {
        "kind": case, "how": "cast", "phase": "first", "what": what, "said": {"whole": said},
        "found": {"operator": found[0], "line": found[1]}, "notes": list(report.notes),
    }  # fmt: skip


def main() -> None:
    warnings.simplefilter("ignore")
    out, *kinds = sys.argv[1:]
    known = cases()
    with Path(out).open("a") as file:
        for kind in kinds or known:
            try:
                rows = list(pairs(kind))
            except Exception as error:
                rows = [{"kind": kind, "phase": "none", "why": repr(error)[:300]}]
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()


if __name__ == "__main__":
    main()
