"""The framework's operation names in the field's own words."""

import re
from functools import lru_cache

# Namespaces of operators that only move values between ranks, or pack them for that.
MOVING = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp"})
_WORDS = {
    "add": "add", "sub": "subtract", "rsub": "subtract", "mul": "multiply", "div": "divide",
    "true_divide": "divide", "floor_divide": "floor_divide", "pow": "pow", "float_power": "pow",
    "mm": "matmul", "bmm": "matmul", "addmm": "linear", "baddbmm": "matmul", "mv": "matmul",
    "dot": "matmul", "vdot": "matmul", "matmul": "matmul", "addmv": "matmul", "addbmm": "matmul",
    "linear": "linear", "convolution": "convolution", "mkldnn_convolution": "convolution",
    "_convolution": "convolution", "mkldnn_rnn_layer": "rnn",
    "_softmax": "softmax", "_log_softmax": "log_softmax", "_safe_softmax": "softmax",
    "native_layer_norm": "layer_norm", "native_batch_norm": "batch_norm",
    "_native_batch_norm_legit": "batch_norm", "_native_batch_norm_legit_no_training": "batch_norm",
    "cudnn_batch_norm": "batch_norm", "_batch_norm_with_update": "batch_norm",
    "_batch_norm_no_update": "batch_norm", "native_group_norm": "group_norm",
    "_fused_rms_norm": "rms_norm",
    "linalg_vector_norm": "vector_norm", "norm": "vector_norm",
    "linalg_matrix_norm": "matrix_norm",
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
    "_scaled_dot_product_flash_attention": "attention",
    "_scaled_dot_product_efficient_attention": "attention",
    "_scaled_dot_product_cudnn_attention": "attention",
    "_scaled_dot_product_attention_math": "attention",
    "nll_loss_forward": "nll_loss", "nll_loss2d_forward": "nll_loss", "nll_loss": "nll_loss",
    "binary_cross_entropy": "binary_cross_entropy",
    "binary_cross_entropy_with_logits": "binary_cross_entropy_with_logits",
    "smooth_l1_loss": "smooth_l1_loss", "huber_loss": "huber_loss",
    "soft_margin_loss": "soft_margin_loss",
    "_cdist_forward": "cdist", "_euclidean_dist": "cdist", "cdist": "cdist",
    "linalg_eigh": "eigh", "_linalg_eigh": "eigh", "linalg_eig": "eig", "_linalg_svd": "svd",
    "linalg_qr": "qr", "linalg_inv_ex": "inv", "_linalg_det": "det", "_linalg_slogdet": "slogdet",
    "linalg_cholesky_ex": "cholesky", "_linalg_solve_ex": "solve", "linalg_solve_triangular":
    "solve", "linalg_lu_factor_ex": "lu", "linalg_eigvalsh": "eigh",
    "_to_copy": "astype", "to": "astype", "arccos": "acos", "arcsin": "asin", "arctan2": "atan2",
    "arctanh": "atanh", "arccosh": "acosh", "fmod": "remainder",
    "copy": "copy", "clone": "copy", "lift_fresh": "constant", "lift_fresh_copy": "constant",
    "scalar_tensor": "constant", "constant_pad_nd": "pad", "reflection_pad2d": "pad",
    "index_put": "index_put", "_index_put_impl": "index_put", "_unsafe_index_put": "index_put",
    "masked_fill": "masked_fill", "masked_scatter": "masked_scatter", "fill": "fill",
    "scatter": "scatter", "scatter_reduce": "scatter_reduce", "scatter_add": "scatter_add",
    "full": "full", "full_like": "full", "new_full": "full", "index_fill": "index_fill",
    "special_entr": "entropy", "xlogy": "xlogy", "special_xlog1py": "xlog1py",
    "special_logit": "logit", "logit": "logit", "special_erfinv": "erfinv", "amax": "max",
    "amin": "min", "aminmax": "max", "log_sigmoid_forward": "log_sigmoid", "cumsum": "cumsum",
    "cat": "concat", "embedding": "embedding", "gelu": "gelu", "silu": "silu",
    "native_dropout": "dropout", "var_mean": "var", "std_mean": "std", "exponential": "random",
    "normal": "random", "uniform": "random", "random": "random", "bernoulli": "random",
    "upsample_bilinear2d": "interpolate", "grid_sampler_2d": "grid_sample",
    "clamp": "clip", "clamp_min": "clip", "clamp_max": "clip", "index": "take",
    "_unsafe_index": "take", "index_select": "take", "topk": "top_k",
    "logcumsumexp": "logsumexp", "_logcumsumexp": "logsumexp",
    "_weight_norm_interface": "weight_norm", "_foreach_addcdiv": "addcdiv",
}  # fmt: skip


@lru_cache(maxsize=4096)
def canonical(raw: str) -> str:
    """Return the canonical name of an operator name such as ``aten::_softmax``.

    Names are the array-API's where one exists; an operator without an entry keeps its own
    name, without the mark of in-place or private variants.
    """
    name = raw.rpartition("::")[2]
    known = _WORDS.get(name)
    if known is not None:
        return known
    bare = name.rstrip("_")
    known = _WORDS.get(bare)
    if known is not None:
        return known
    bare = bare.lstrip("_")
    for prefix in ("linalg_", "special_", "foreach_"):
        bare = bare.removeprefix(prefix)
    return _WORDS.get(bare, bare)


@lru_cache(maxsize=1024)
def node_name(raw: str) -> str:
    """Return the canonical name behind an autograd node such as ``SqrtBackward0``."""
    bare = raw.rpartition("::")[2]
    stem = re.sub(r"Backward\d*$", "", bare)
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", stem).lower()
    return canonical(snake)
