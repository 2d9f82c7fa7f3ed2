"""Find the functions that a program compiles, differentiates and maps, and have them watched."""

import functools
import inspect
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax

from anynan._base.imports import when_imported
from anynan._base.patches import Patches
from anynan._base.sources import is_library
from anynan._everywhere import Found
from anynan.jax.eager import bad, held, refused
from anynan.jax.everywhere import reads
from anynan.jax.everywhere.compiled import Given, Watched, is_module
from anynan.jax.everywhere.uncompiled import Eager, Foreign, once
from anynan.jax.everywhere.watch import Watch, traced_anew
from anynan.jax.messages import EAGER_CALLS
from anynan.jax.program import signature
from anynan.jax.program.trace import eager as eager_now
from anynan.jax.program.trace import under_way
from anynan.options import Options

# What compiles, and what differentiates, in JAX and in modules that are no part of it.
COMPILERS = {"jax": ("jit", "pmap"), "flax.nnx": ("jit",), "equinox": ("filter_jit",)}
SLOPES = {
    "jax": ("value_and_grad", "jacfwd", "jacrev", "hessian"),
    "flax.nnx": ("grad", "value_and_grad"),
    "equinox": ("filter_grad", "filter_value_and_grad"),
}
# What runs a function of the program's round by round; outside of any jit it is compiled by itself.
LOOPS = ("scan", "while_loop", "fori_loop", "map")
# What takes no function with readings in it: they are neither linear nor differentiated forwards,
# and JAX keeps what it traced for a shape and gives it to `make_jaxpr`.
BARE = ("eval_shape", "jvp", "linearize", "linear_transpose")
FIXED = frozenset({"length", "reverse", "unroll", "batch_size"})
# What compiles for others is looked into by its own name, or by another adapter.
OWN = frozenset({"jax", "jaxlib", "flax", "equinox", "keras", "anynan"})


def watch_all(options: Options, found: Found) -> Callable[[], None]:
    """Watch what the program's own code has compiled, by ``jax.jit`` and the like.

    Of what a library compiles only the results are looked at, as of loops outside of any jit. What
    was compiled before stays as it is.

    Args:
        options: As for ``track``.
        found: Is given the trackers.

    Returns:
        What undoes it; the trackers stay.
    """
    patches, watch = Patches(), Watch(options, found, once)
    valued = jax.value_and_grad

    def compiled(made: Any, *args: Any, **given: Any) -> Any:
        of = args[0].bare if args and isinstance(args[0], Eager) else next(iter(args), None)
        if is_module(of) and is_module(made) and "first" not in given.get("donate", ""):
            return Given(made, watch, of, given)
        return Watched(made, watch, watch.again(made, *args, **given))

    def foreign(made: Any, of: Any, library: str) -> Any:
        return Foreign(made, watch, of, library)

    def looping(loop: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(loop)

        @functools.wraps(loop)
        def loops(*args: Any, **kwargs: Any) -> Any:
            of = [x for x in args if callable(x)]
            if not of or not eager_now():
                return loop(*args, **kwargs)
            try:
                given = parameters.bind(*args, **kwargs).arguments
            except TypeError:  # JAX has its own words for it
                return loop(*args, **kwargs)
            known = {key: given.pop(key) for key in FIXED & given.keys()}
            return foreign(functools.partial(loop, **known), of[-1], loop.__name__)(**given)

        return loops

    def differentiated(made: Any, *args: Any, **given: Any) -> Any:
        return Eager(made, watch, args[0])

    def sloped(made: Any, *args: Any, **given: Any) -> Any:
        if len(args) > 2:
            return differentiated(made, *args)
        # It is what grad itself calls, and gives the value too.
        return Eager(valued(*args, **given), watch, args[0], made, given)

    def change(module: str, names: tuple[str, ...], stand_in: Callable[..., Any]) -> None:
        for name in names:
            if hasattr(sys.modules[module], name):
                made = functools.partial(_watching, stand_in, foreign)
                patches.change(sys.modules[module], name, made)

    waiting = [
        when_imported(module, functools.partial(change, module, names, stand_in))
        for doors, stand_in in (
            (COMPILERS, compiled),
            ({"jax": ("grad",)}, sloped),
            (SLOPES, differentiated),
        )
        for module, names in doors.items()
    ]

    def mapped(made: Any, *args: Any, **given: Any) -> Any:
        return foreign(made, args[0], "vmap")

    def noted(made: Any, *_: Any) -> Any:
        @functools.wraps(made)
        def maps(*args: Any, **kwargs: Any) -> Any:
            out = made(*args, **kwargs)
            if eager_now():  # a library's own is not looked at: it is followed back from its result
                watch.calls.note(made, args, kwargs, out, watched=True)
            return out

        return maps

    patches.change(jax, "vmap", functools.partial(_watching, mapped, noted))
    for name in LOOPS:
        patches.change(jax.lax, name, looping)
    for name in BARE:
        patches.change(jax, name, _bare)
    patches.change(
        jax,
        "make_jaxpr",
        lambda make: functools.wraps(make)(lambda *args, **given: _bare(make(*args, **given))),
    )

    def clearing(clear: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(clear)
        def clears() -> None:
            clear()
            traced_anew(found.living())

        return clears

    patches.change(jax, "clear_caches", clearing)
    reads.put_in(patches, watch)
    calls = watch.calls.begin()

    def undo() -> None:
        for leave in waiting:
            leave()
        patches.undo()
        calls()
        _look_at_the_end(watch)
        watch.forget()

    return undo


def _watching(
    stand_in: Callable[..., Any], foreign: Callable[..., Any], make: Callable[..., Any]
) -> Callable[..., Any]:
    """Give what compiles as before, and has a function of the program's own watched."""

    @functools.wraps(make)
    def making(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        frame = sys._getframe(1)
        if is_library(frame.f_code.co_filename):
            library = str(frame.f_globals.get("__name__")).partition(".")[0]
            return (
                made
                if library in OWN or not _alone(made, args)
                else foreign(made, args[0], library)
            )
        if not args:  # it was given options alone, and returns a decorator
            return lambda *given, **more: stand_in(made(*given, **more), *given, **more)
        return stand_in(made, *args, **kwargs)

    return making


def _alone(made: Any, args: tuple[Any, ...]) -> bool:
    """Tell a function from a class's method of equinox's making, which is bound in its own way."""
    fn: Any = args[0] if args else None
    outer = str(getattr(fn, "__qualname__", "")).rpartition(".")[0]
    bound = isinstance(fn, types.MethodType) or not outer or outer.endswith("<locals>")
    return callable(fn) and (bound or not is_module(made))


def _bare(transform: Callable[..., Any]) -> Callable[..., Any]:
    """Have a program's functions run as they are while JAX transforms them."""

    @functools.wraps(transform)
    def transforms(*args: Any, **kwargs: Any) -> Any:
        with under_way():
            return transform(*args, **kwargs)

    return transforms


def _look_at_the_end(watch: Watch) -> None:
    """Say what of a program was not read, and what it kept that is bad, if nothing was told."""
    found, calls = watch.found, watch.calls
    program = dict(vars(sys.modules["__main__"]))
    if any(value is jax.numpy or value is jax for value in program.values()):
        found.unwatched(EAGER_CALLS())
    arrays = {"": [] if found.ended_by is None else held(found.ended_by)}
    for name, value in program.items():
        if signature.is_kept(name) or name == "loss":
            arrays[name] = [x for x in bad(value) if not calls.placed(x)]
    told = False
    with suppress(Exception):  # what cannot be made once more stays without its operation
        left = (*arrays.values(), [x for x in calls.left() if not calls.placed(x, numpys=True)])
        ended = arrays[""]
        origins = ((calls.origin(x, numpys=True, floats=x is ended), x) for x in left)
        for call, came in ((watch.read and watch.read.call, ()), *origins):
            if call is not None and not told and not found.bad():
                told = once(watch, call, came)
    if told or found.bad():
        return
    if found.ended_by and (text := refused(found.ended_by)):
        found.harm(text)
    if watch.read is not None:
        found.harm(f"a number was NaN or Inf as it was read, at {watch.read.place}")
    for name, each in arrays.items():
        if name and each:
            found.harm(f"{name} holds NaN or Inf as the program ends")
