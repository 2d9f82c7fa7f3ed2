"""What differs between the versions of JAX that are supported, from 0.7.2 to the newest.

The rest of the adapter reads no parameter and calls no function of JAX's whose name or form has
changed from one of them to another.
"""

import functools
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
from jax._src import api, config, pjit
from jax._src.interpreters import partial_eval
from jax._src.lib import jax_jit
from jax.extend import core as jc
from jax.extend import source_info_util

from anynan._base.patches import Patches

# The parameters that are known of what is built again from JAX's public functions. With another
# one it may compute something else, so it is run as it is.
PARAMETERS = {
    "scan": frozenset(
        {
            "jaxpr", "length", "reverse", "unroll", "num_consts", "num_carry", "ft_in", "ft_out",
            "linear", "_split_transpose",
        }
    ),
    "while": frozenset({"cond_jaxpr", "cond_nconsts", "body_jaxpr", "body_nconsts"}),
    "cond": frozenset({"branches", "branches_platforms", "linear"}),
    "shard_map": frozenset(
        {
            "jaxpr", "mesh", "in_specs", "out_specs", "check_vma", "check_rep",
            "newly_manual_axes", "manual_axes", "auto",
        }
    ),
}  # fmt: skip


def scanned(params: Mapping[str, Any]) -> tuple[int, int]:
    """Give how many operands of a scan are the same in every round, and how many are carried."""
    if "ft_in" in params:  # from JAX 0.12 on
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def manual_axes(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Give the mesh axes that a shard_map makes manual, in the mesh's order."""
    axes = params.get("newly_manual_axes", params.get("manual_axes"))
    if axes is None:
        axes = set(params["mesh"].axis_names) - set(params.get("auto", ()))
    return tuple(a for a in params["mesh"].axis_names if a in axes)


def checked(params: Mapping[str, Any]) -> bool:
    """Tell whether a shard_map has its types checked."""
    return bool(params.get("check_vma", params.get("check_rep", True)))


def traces() -> int:
    """Count the functions that were traced; 0 where JAX does not count them, as before 0.10."""
    count = getattr(getattr(partial_eval, "trace_to_jaxpr", None), "cache_info", None)
    return 0 if count is None else int(count().misses)


def rebind(eqn: Any, ins: list[Any], **changed: Any) -> list[Any]:
    """Run an equation's primitive again, with some parameters changed."""
    bound = eqn.primitive.get_bind_params({**eqn.params, **changed})
    if isinstance(bound, dict):
        outs = eqn.primitive.bind(*ins, **bound)
    else:  # before JAX 0.10: the functions apart
        functions, rest = bound
        outs = eqn.primitive.bind(*functions, *ins, **rest)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def rebind_in(eqn: Any, ins: list[Any], dtype: Any) -> list[Any]:
    """Run an equation's primitive again in another dtype: operands, and what it is told to make."""
    wanted = jnp.dtype(dtype)
    cast = [
        jnp.asarray(x).astype(wanted) if jnp.issubdtype(var.aval.dtype, jnp.floating) else x
        for var, x in zip(eqn.invars, ins, strict=True)
    ]
    changed = {
        key: wanted
        for key, value in eqn.params.items()
        if isinstance(value, np.dtype | type)
        and key.endswith(("dtype", "element_type"))
        and jnp.issubdtype(value, jnp.floating)
    }
    return rebind(eqn, cast, **changed)


def is_nan_check(error: Exception) -> bool:
    """Tell whether ``jax_debug_nans`` stopped a compiled part of a program that JAX runs bare.

    JAX makes a FloatingPointError of it in a call of such a part, but not where one is run again.
    """
    return type(error).__name__ == "InternalFloatingPointError"


def dropped(var: Any) -> bool:
    """Tell whether a variable stands for a result that nobody takes."""
    return type(var).__name__ == "DropVar"  # public under no name in every version


_expanded: dict[int, Any] = {}


def expanded(eqn: Any) -> Any:
    """Give the code of an operation that JAX writes out only as it compiles, from 0.12 on.

    ``ldexp``, ``searchsorted`` and ``custom_root`` are such ones.
    """
    prim = eqn.params["_prim"]
    if id(prim) not in _expanded:  # the same code each time: its variables are known by identity
        with source_info_util.user_context(eqn.source_info.traceback):
            _expanded[id(prim)] = jax.make_jaxpr(
                lambda *args: eqn.primitive.to_lojax(*args, **eqn.params)
            )(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars))
        weakref.finalize(prim, _expanded.pop, id(prim), None)
    return _expanded[id(prim)]


def trace_state() -> Any:
    """Give what tells one trace from another, and from none."""
    place: Any = jc if hasattr(jc, "get_opaque_trace_state") else jax.core  # in 0.7.2
    return place.get_opaque_trace_state()


def settings() -> Hashable:
    """Give what is set in JAX at the moment: what it traced under one setting is of no other."""
    found = getattr(config, "trace_context", None)
    return None if found is None else found()


def wide_numbers() -> Any:
    """Give a context in which there are numbers of 64 bits."""
    # The newer one has no truth value.
    place: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
    return place.enable_x64(True)


@functools.cache
def context() -> Any:
    """Give what keeps a trace apart from all others, None where JAX has no such thing.

    The first call has JAX forget what it compiled: it is part of what each program is found by.
    """
    make = getattr(jax, "make_user_context", None)
    return None if make is None else make(None)


def watch_calls(told: Callable[[Any, Any, Any, Any], None]) -> Callable[[], None]:
    """Have the calls told that JAX runs compiled, its own operations among them.

    They have a hook, by which ``jax_debug_nans`` looks at results. The first call of a kind, which
    is compiled, goes past it.

    Args:
        told: Is given the function, its arguments by place and by name, and what it gave; tracers
            where it was traced.

    Returns:
        What ends it.
    """
    patches, state = Patches(), getattr(api, "_post_hook_state", None)

    def after(fn: Any, args: Any, kwargs: Any, out: Any) -> None:
        told(fn, args, kwargs, out)
        if state is not None and state.value is not None:
            state.value(fn, args, kwargs, out)

    def newest(first: Any) -> Any:
        def runs(params: Any, flat: Any, fn: Any, args: Any, kwargs: Any) -> Any:
            out = first(params, flat, fn, args, kwargs)
            told(fn, args, kwargs, out[0])
            return out

        return runs

    def oldest(first: Any) -> Any:
        def runs(fn: Any, info: Any, *args: Any, **kwargs: Any) -> Any:
            out = first(fn, info, *args, **kwargs)
            told(fn, args, kwargs, out[0])
            return out

        return runs

    for name, change in (("_run_python_pjit", newest), ("_python_pjit_helper", oldest)):
        if hasattr(pjit, name):
            patches.change(pjit, name, change)
    # One of its own: JAX takes its hook away wherever it turns the check off for a while.
    own = None if state is None else type(state)("anynan", after, include_in_jit_key=False)
    if own is None:  # in 0.7.2
        jax_jit.global_state().post_hook = after
    else:
        jax_jit.set_post_hook_state(own)

    def undo() -> None:
        patches.undo()
        if own is None:
            jax_jit.global_state().post_hook = None
        else:
            own.set_global(None)
            jax_jit.set_post_hook_state(state)

    return undo
