"""JAX's names of operations in the field's own words."""

from typing import Any

# Primitives.
PRIMITIVES = {
    "sub": "subtract", "mul": "multiply", "div": "divide", "add_any": "add", "neg": "negative",
    "rem": "remainder", "integer_pow": "pow", "dot_general": "matmul", "ragged_dot": "matmul",
    "conv_general_dilated": "convolution", "reduce_sum": "sum", "reduce_max": "max",
    "reduce_min": "min", "reduce_prod": "prod", "reduce_and": "all", "reduce_or": "any",
    "select_n": "where", "select_and_scatter_add": "max_pool",
    "select_and_gather_add": "max_pool", "reduce_window_max": "max_pool",
    "reduce_window_sum": "avg_pool", "reduce_window": "pool", "convert_element_type": "astype",
    "reduce_precision": "astype", "dynamic_update_slice": "setitem", "scatter": "index_put",
    "scatter-add": "scatter_add", "scatter-mul": "scatter_reduce",
    "scatter-min": "scatter_reduce", "scatter-max": "scatter_reduce",
    "scatter_mul": "scatter_reduce", "concatenate": "concat", "max": "maximum",
    "min": "minimum", "clamp": "clip", "logistic": "sigmoid", "erf_inv": "erfinv",
    "triangular_solve": "solve", "custom_linear_solve": "solve", "psum": "sum", "psum2": "sum",
    "psum_invariant": "sum", "pmax": "max", "pmin": "min", "reduce_scatter": "sum",
    "iota": "arange", "random_bits": "random", "erf_inv_p": "erfinv", "igamma_grad_a": "igamma",
    "lu_pivots_to_permutation": "lu", "householder_product": "qr", "geqrf": "qr",
    "gather": "take", "broadcast_in_dim": "full", "approx_top_k": "top_k",
    "cumlogsumexp": "logsumexp", "empty": "empty", "ffi_call": "ffi_call",
    "io_callback": "io_callback", "pure_callback": "pure_callback",
}  # fmt: skip

# Functions of JAX that are made of several primitives and are one operation to their users.
_SAME = """
    softmax log_softmax logsumexp mean nanmean var std vector_norm matrix_norm det slogdet inv
    solve pinv cholesky qr eigh eig svd lstsq lu xlogy xlog1py kl_div logit gelu silu softplus
    log_sigmoid hypot sinc remainder nan_to_num tril triu digamma quantile cov corrcoef
    polygamma lgamma prod cumprod
"""
FUNCTIONS = {
    **{name: name for name in _SAME.split()},
    "average": "mean", "nanvar": "var", "nanstd": "std", "norm": "vector_norm",
    "standardize": "layer_norm", "eigvalsh": "eigh", "eigvals": "eig", "svdvals": "svd",
    "entr": "entropy", "rel_entr": "kl_div", "swish": "silu", "logaddexp": "logsumexp",
    "logaddexp2": "logsumexp", "mod": "remainder", "fmod": "remainder",
    "dot_product_attention": "attention", "gammaln": "lgamma", "power": "pow",
    "arccosh": "acosh", "arcsinh": "asinh", "arctanh": "atanh", "nanquantile": "quantile",
    "percentile": "quantile", "median": "quantile", "nanmedian": "quantile",
    "logdet": "slogdet", "expit": "sigmoid",
}  # fmt: skip

BINARY = ("self", "other")
OPERANDS: dict[str, tuple[str, ...]] = {
    "pow": ("self", "exponent"),
    "select_n": ("condition", "self", "other"),
    "dot_general": BINARY,
    "clamp": ("min", "self", "max"),
    "dynamic_update_slice": ("self", "value"),
    "scatter": ("self", "indices", "value"),
    "scatter-add": ("self", "indices", "value"),
    "pad": ("self", "value"),
    "gather": ("self", "index"),
    "broadcast_in_dim": ("value",),
}


def primitive(name: str) -> str:
    """Give the canonical name of a primitive."""
    return PRIMITIVES.get(name, name)


def function(names: tuple[str, ...]) -> str | None:
    """Give the operation that a chain of JAX's own functions is, None if it is no known one."""
    for name in names:
        bare = name.rpartition(".")[2].lstrip("_").removesuffix("_deprecated")
        if bare in FUNCTIONS:
            return FUNCTIONS[bare]
    return None


def update(stack: tuple[Any, ...]) -> str | None:
    """Name the optimizer that a call inside an update belongs to, None if it is no known one."""
    made = " ".join(code.co_qualname for code, _ in stack if "optax" in code.co_filename)
    return "adam" if "scale_by_adam" in made else None


def operand(op: str, i: int, count: int) -> str:
    """Name an operand by its position."""
    known = OPERANDS.get(op)
    if known is not None and i < len(known):
        return known[i]
    if op == "concatenate":
        return f"arrays[{i}]"
    return BINARY[i] if i < 2 else f"operand{i}"
