"""What MLX's functions are called in reports, and what their operands and arguments are."""

from typing import Any

from anynan.arrays import names

_WORDS = {
    "addmm": "linear", "conv_general": "convolution", "convolve": "convolution", "topk": "top_k",
    "gather_mm": "matmul", "block_masked_mm": "matmul", "segmented_mm": "matmul",
    "quantized_matmul": "matmul", "gather_qmm": "matmul", "qqmm": "matmul", "gather_qqmm": "matmul",
    "take_along_axis": "take", "put_along_axis": "scatter", "slice_update": "setitem",
    "full_like": "full", "zeros_like": "zeros", "ones_like": "ones", "identity": "ones",
    "eye": "ones", "logaddexp": "logsumexp", "logcumsumexp": "logsumexp", "divmod": "floor_divide",
    "median": "quantile", "contiguous": "copy", "stop_gradient": "copy", "positive": "positive",
    "scaled_dot_product_attention": "attention", "linspace": "arange", "solve_triangular": "solve",
    "cholesky_inv": "inv", "tri_inv": "inv", "eigvals": "eig", "lu_factor": "lu",
}  # fmt: skip
# The others of mlx.core make no arrays, or are no operations: they change functions, say.
NO_OPERATIONS = frozenset(
    {
        "array_equal", "async_eval", "broadcast_shapes", "can_cast", "checkpoint", "clear_cache",
        "clear_streams", "compile", "custom_function", "default_device", "default_stream",
        "depends", "device_count", "device_info", "disable_compile", "einsum_path",
        "enable_compile", "eval", "export_function", "export_to_dot", "exporter", "finfo",
        "get_active_memory", "get_array_buffer_size", "get_cache_memory", "get_memory_limit",
        "get_peak_memory", "get_printoptions", "grad", "iinfo", "import_function", "is_available",
        "isdtype", "issubdtype", "jvp", "load", "new_stream", "new_thread_local_stream",
        "new_thread_unsafe_stream", "printoptions", "reset_peak_memory", "result_type", "save",
        "save_gguf", "save_safetensors", "savez", "savez_compressed", "set_cache_limit",
        "set_default_device", "set_default_stream", "set_memory_limit", "set_printoptions",
        "set_wired_limit", "stream", "synchronize", "value_and_grad", "vjp", "vmap", "seed", "key",
        "split_key", "cuda_kernel", "metal_kernel", "precompiled_cuda_kernel",
    }
)  # fmt: skip
# They have no gradient: what they give are truths and places.
FLAT = frozenset(
    {
        "all", "allclose", "any", "argmax", "argmin", "argpartition", "argsort", "equal", "greater",
        "greater_equal", "isclose", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "less",
        "less_equal", "logical_and", "logical_not", "logical_or", "not_equal", "searchsorted",
        "sign", "floor", "ceil", "round", "trunc", "stop_gradient", "randint", "permutation", "key",
        "zeros_like", "ones_like", "full_like", "empty_like", "count_nonzero",
    }
)  # fmt: skip
METHODS = frozenset(
    {
        "abs", "cos", "cummax", "cummin", "cumprod", "cumsum", "diag", "diagonal", "exp", "flatten",
        "log", "log10", "log1p", "log2", "logcumsumexp", "logsumexp", "max", "mean", "min",
        "moveaxis", "prod", "reciprocal", "reshape", "round", "rsqrt", "sin", "split", "sqrt",
        "square", "squeeze", "std", "sum", "swapaxes", "transpose", "var", "view", "astype", "conj",
    }
)  # fmt: skip
OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_AXES = frozenset(
    {
        "softmax", "sum", "mean", "var", "std", "max", "min", "prod", "logsumexp", "cumsum",
        "cumprod", "cummax", "cummin", "logcumsumexp", "all", "any", "argmax", "argmin", "norm",
        "median", "squeeze",
    }
)  # fmt: skip


def canonical(name: str) -> str:
    """Return the vocabulary's name of a function or method of MLX.

    Example:
        >>> from anynan.mlx.names import canonical
        >>> canonical("arccos"), canonical("addmm"), canonical("conv2d")
        ('acos', 'linear', 'convolution')
    """
    bare = name.rpartition(".")[2]
    if name.startswith("random."):
        return "random"
    if name.startswith("at."):
        return "scatter_add" if bare in ("add", "subtract") else "scatter_reduce"
    if bare.startswith("conv") and bare[-1] == "d":
        return "convolution"
    return _WORDS.get(bare) or names.canonical(name)


PROPERTIES = ("T", "mT", "real", "imag")
WRITING = ("__setitem__", *(f"__i{name}__" for name in OPERATORS))


def reflected(name: str) -> bool:
    """Tell whether a method takes its operands the other way round: ``__rsub__``."""
    return name.startswith("__r") and name.strip("_")[1:] in OPERATORS


def split(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give plain arguments that came by position by their names, as rules ask for them."""
    bare = name.rpartition(".")[2]
    if bare not in _AXES or len(args) < 2:
        return args, kwargs
    second = ("ord", "axis", "keepdims") if bare == "norm" else ("axis", "keepdims", "ddof")
    return args[:1], {**dict(zip(second, args[1:], strict=False)), **kwargs}


def operands(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """List what went into an operation by the names that rules know, and its plain arguments.

    Args:
        name: MLX's name.
        args: Positional arguments.
        kwargs: Arguments by name.
    """
    word = canonical(name)
    args, kwargs = split(name, args, kwargs)
    found = names.params(word, args, kwargs)
    if word == "linear" and len(args) == 3:  # bias, x, weight
        args = (args[1], args[2], args[0])
    if word == "getitem":
        args = args[:1]
    if len(args) > 2:  # a stride or a size; of two arguments it may be an exponent
        args = tuple(None if _is_whole(x) else x for x in args)
    given = names.named(word, args, {k: v for k, v in kwargs.items() if k not in _PLAIN})
    return [(label, x) for label, x in given if hasattr(x, "dtype") or names.is_number(x)], found


def _is_whole(x: Any) -> bool:
    return all(map(_is_whole, x)) if isinstance(x, tuple | list) else type(x) is int


_PLAIN = frozenset({"stream", "dtype", "shape", "key", "axes", "eps", "axis", "keepdims", "ddof"})
