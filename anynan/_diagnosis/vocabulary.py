"""What operations are called in records, rules and reports, whatever the framework calls them."""

import math
from dataclasses import dataclass

EVERYWHERE = "everywhere"


@dataclass(frozen=True, slots=True)
class Word:
    """Say what one canonical name stands for.

    Attributes:
        name: The array API's where it has one, else the field's.
        arity: How many arrays it takes; None for any number.
        meaning: What it computes, in a line.
        domain: Finite operands of which it is finite, until its result outgrows the dtype.
        bounds: Smallest and largest number it has a value for, for a function of one number
            (of the last operand, where it takes more).
    """

    name: str
    arity: int | None
    meaning: str
    domain: str = EVERYWHERE
    bounds: tuple[float, float] | None = None


_INF = float("inf")

# Grouped as a reader looks for them.
_ARITHMETIC = (
    Word("abs", 1, "magnitude"),
    Word("add", 2, "sum of two"),
    Word("addcdiv", 3, "x + a * y / z", "z other than 0"),
    Word("addcmul", 3, "x + a * y * z"),
    Word("conj", 1, "complex conjugate"),
    Word("divide", 2, "quotient", "y other than 0"),
    Word("floor_divide", 2, "quotient, rounded down", "y other than 0"),
    Word("lerp", 3, "x + w * (y - x)"),
    Word("multiply", 2, "product of two"),
    Word("negative", 1, "-x"),
    Word("positive", 1, "+x"),
    Word("reciprocal", 1, "1 / x", "x other than 0"),
    Word("remainder", 2, "rest of a division", "y other than 0"),
    Word("round", 1, "nearest whole number"),
    Word("square", 1, "x * x"),
    Word("subtract", 2, "difference"),
)
_FUNCTIONS = (
    Word("acos", 1, "inverse cosine", "-1 <= x <= 1", (-1.0, 1.0)),
    Word("acosh", 1, "inverse hyperbolic cosine", "x >= 1", (1.0, _INF)),
    Word("asin", 1, "inverse sine", "-1 <= x <= 1", (-1.0, 1.0)),
    Word("asinh", 1, "inverse hyperbolic sine"),
    Word("atan", 1, "inverse tangent"),
    Word("atan2", 2, "angle of a point", "everywhere; its gradient, where x and y are not both 0"),
    Word("atanh", 1, "inverse hyperbolic tangent", "-1 < x < 1", (-1.0, 1.0)),
    Word("bessel_y0", 1, "Bessel function Y, order 0", "x > 0", (0.0, _INF)),
    Word("bessel_y1", 1, "Bessel function Y, order 1", "x > 0", (0.0, _INF)),
    Word("cos", 1, "cosine"),
    Word("cosh", 1, "hyperbolic cosine"),
    Word("digamma", 1, "slope of lgamma", "x neither 0 nor a negative whole number"),
    Word("entropy", 1, "-x * log(x)", "x >= 0", (0.0, _INF)),
    Word("erfinv", 1, "inverse error function", "-1 < x < 1", (-1.0, 1.0)),
    Word("exp", 1, "e to the power x"),
    Word("exp2", 1, "2 to the power x"),
    Word("expm1", 1, "exp(x) - 1"),
    Word("hypot", 2, "sqrt(x**2 + y**2)", "everywhere; its gradient, where not both are 0"),
    Word("igamma", 2, "regularised incomplete gamma function", "a > 0 and x >= 0"),
    Word("igammac", 2, "1 - igamma(a, x)", "a > 0 and x >= 0"),
    Word("lgamma", 1, "log of the gamma function", "x neither 0 nor a negative whole number"),
    Word("log", 1, "natural logarithm", "x > 0", (0.0, _INF)),
    Word("log10", 1, "logarithm to base 10", "x > 0", (0.0, _INF)),
    Word("log1p", 1, "log(1 + x)", "x > -1", (-1.0, _INF)),
    Word("log2", 1, "logarithm to base 2", "x > 0", (0.0, _INF)),
    Word("logit", 1, "log(p / (1 - p))", "0 < p < 1", (0.0, 1.0)),
    Word("modified_bessel_k0", 1, "modified Bessel function K, order 0", "x > 0", (0.0, _INF)),
    Word("modified_bessel_k1", 1, "modified Bessel function K, order 1", "x > 0", (0.0, _INF)),
    Word("ndtri", 1, "quantile of the normal distribution", "0 < p < 1", (0.0, 1.0)),
    Word("polygamma", 2, "slopes of digamma", "x neither 0 nor a negative whole number"),
    Word("pow", 2, "x ** y", "x > 0; or x = 0 and y >= 0; or y a whole number and x other than 0"),
    Word("rsqrt", 1, "1 / sqrt(x)", "x > 0", (0.0, _INF)),
    Word("scaled_modified_bessel_k0", 1, "exp(x) * modified_bessel_k0(x)", "x > 0", (0.0, _INF)),
    Word("scaled_modified_bessel_k1", 1, "exp(x) * modified_bessel_k1(x)", "x > 0", (0.0, _INF)),
    Word("sigmoid", 1, "1 / (1 + exp(-x))"),
    Word("sin", 1, "sine"),
    Word("sinc", 1, "sin(pi x) / (pi x)"),
    Word("sinh", 1, "hyperbolic sine"),
    Word("sqrt", 1, "square root", "x >= 0; its gradient, x > 0", (0.0, _INF)),
    Word("tan", 1, "tangent"),
    Word("xlog1py", 2, "x * log(1 + y), 0 where x is 0", "y > -1", (-1.0, _INF)),
    Word("xlogy", 2, "x * log(y), 0 where x is 0", "y > 0", (0.0, _INF)),
    Word("zeta", 2, "Hurwitz zeta function", "x > 1 and q > 0"),
)
_REDUCTIONS = (
    Word("all", 1, "is every element true"),
    Word("any", 1, "is an element true"),
    Word("argmax", 1, "where the largest is"),
    Word("corrcoef", 1, "correlation", "no row of equal numbers"),
    Word("cov", 1, "covariance", "more samples than the correction"),
    Word("cumprod", 1, "running product", "everywhere; its gradient, without a 0"),
    Word("cumsum", 1, "running sum"),
    Word("logsumexp", None, "log(sum(exp(x)))", "a row that is not -Inf throughout"),
    Word("max", 1, "largest"),
    Word("mean", 1, "mean", "at least one element"),
    Word("min", 1, "smallest"),
    Word("nanmean", 1, "mean without the NaN", "at least one that is no NaN"),
    Word("prod", 1, "product of all", "everywhere; its gradient, without a 0"),
    Word("quantile", 1, "quantile, median", "at least one element"),
    Word("std", 1, "standard deviation", "more elements than the correction"),
    Word("sum", 1, "sum of all"),
    Word("top_k", 1, "the k largest"),
    Word("var", 1, "variance", "more elements than the correction"),
)
_LINEAR_ALGEBRA = (
    Word("cdist", 2, "distance of every pair", "everywhere; its gradient, where no pair is one"),
    Word("cholesky", 1, "Cholesky factor", "a positive definite matrix"),
    Word("det", 1, "determinant"),
    Word("eig", 1, "eigenvalues and vectors", "everywhere; its gradient, where no two are equal"),
    Word("eigh", 1, "eig of a symmetric matrix", "everywhere; its gradient, as for eig"),
    Word("einsum", None, "sum of products over named axes"),
    Word("inv", 1, "inverse matrix", "a regular matrix"),
    Word("linear", 3, "x @ w + b"),
    Word("lstsq", 2, "least squares solution"),
    Word("lu", 1, "LU factors", "a regular matrix"),
    Word("matmul", 2, "matrix product, inner product"),
    Word("matrix_norm", 1, "length of a matrix", "everywhere; its gradient, away from 0"),
    Word("pinv", 1, "pseudo-inverse", "everywhere; its gradient, at constant rank"),
    Word("qr", 1, "QR factors", "everywhere; its gradient, for full rank"),
    Word("slogdet", 1, "sign and log of the determinant", "a regular matrix"),
    Word("solve", 2, "solution of linear equations", "a regular matrix"),
    Word("svd", 1, "singular values", "everywhere; its gradient, where no two are equal"),
    Word("tril", 1, "what is below the diagonal"),
    Word("triu", 1, "what is above the diagonal"),
    Word("vector_norm", 1, "length of a vector", "everywhere; its gradient, away from 0"),
)
_NETWORKS = (
    Word("adam", None, "an update by Adam and its relatives", "eps above 0 in its dtype"),
    Word("attention", None, "softmax(q k) v", "a key for every query"),
    Word("avg_pool", 1, "mean of each window"),
    Word("batch_norm", None, "normalise over the batch", "more than one value, or eps above 0"),
    Word("binary_cross_entropy", 2, "-y log(p) - (1 - y) log(1 - p)", "0 < p < 1"),
    Word("binary_cross_entropy_with_logits", 2, "the same, of sigmoid(x)"),
    Word("convolution", None, "convolution"),
    Word("cross_entropy", 2, "-log of the target's probability", "a target that is not masked"),
    Word("ctc_loss", None, "loss of sequences without alignment", "targets shorter than inputs"),
    Word("dropout", 1, "zero at random"),
    Word("embedding", 2, "rows of a table"),
    Word("gelu", 1, "x times the normal distribution's mass below x"),
    Word("grid_sample", 2, "values between the points of a grid"),
    Word("group_norm", None, "normalise over channels", "unequal numbers, or eps above 0"),
    Word("huber_loss", 2, "squared near 0, else linear", "at least one element"),
    Word("instance_norm", None, "normalise over one channel", "unequal numbers, or eps above 0"),
    Word("interpolate", 1, "resize"),
    Word("kl_div", 2, "divergence of two distributions", "a target >= 0 and log p above -Inf"),
    Word("layer_norm", None, "normalise over features", "unequal numbers, or eps above 0"),
    Word("leaky_relu", 1, "x, and little of it below 0"),
    Word("log_sigmoid", 1, "log(sigmoid(x))"),
    Word("log_softmax", 1, "log(softmax(x))", "a row that is not -Inf throughout"),
    Word("max_pool", 1, "largest of each window"),
    Word("mse_loss", 2, "mean of squared differences", "at least one element"),
    Word("nll_loss", 2, "-log probability of the target", "a target that is not ignored"),
    Word("pool", 1, "reduce each window"),
    Word("relu", 1, "max(x, 0)"),
    Word("rms_norm", None, "normalise by the root mean square", "a number other than 0, or eps"),
    Word("rnn", None, "a recurrent layer"),
    Word("sgd", None, "an update by gradient descent"),
    Word("silu", 1, "x * sigmoid(x)"),
    Word("smooth_l1_loss", 2, "huber_loss / delta", "at least one element"),
    Word("soft_margin_loss", 2, "mean of log(1 + exp(-x y))", "at least one element"),
    Word("softmax", 1, "exp(x) / sum(exp(x))", "a row that is not -Inf throughout"),
    Word("softplus", 1, "log(1 + exp(x))"),
    Word("weight_norm", 2, "g * v / length of v", "v other than 0"),
)
_CHOOSING = (
    Word("clip", None, "bound from below and above"),
    Word("getitem", 1, "read a part"),
    Word("masked_select", 2, "the elements under a mask"),
    Word("maximum", 2, "larger of two"),
    Word("minimum", 2, "smaller of two"),
    Word("nan_to_num", 1, "replace NaN and Inf"),
    Word("take", 2, "read elements by index", "an index in range"),
    Word("where", 3, "choose by a mask"),
)
_PLACING = (
    Word("arange", 0, "numbers in a row"),
    Word("asarray", 1, "an array of what is given"),
    Word("astype", 1, "convert to another dtype", "what the dtype can hold"),
    Word("concat", None, "join along an axis"),
    Word("constant", 0, "a number written in the code"),
    Word("copy", 1, "copy"),
    Word("empty", 0, "memory as it was"),
    Word("fill", 1, "one number everywhere"),
    Word("full", 0, "an array of one number"),
    Word("full_like", 1, "an array of one number, shaped as another"),
    Word("index_fill", 2, "write one number by index"),
    Word("index_put", None, "write by index"),
    Word("masked_fill", 2, "write one number under a mask"),
    Word("masked_scatter", 3, "write under a mask"),
    Word("ones", 0, "an array of 1"),
    Word("pad", 1, "add a border"),
    Word("random", 0, "random numbers"),
    Word("scatter", None, "write by index"),
    Word("scatter_add", 3, "add by index"),
    Word("scatter_reduce", 3, "combine by index"),
    Word("setitem", 2, "write a part"),
    Word("stack", None, "join along a new axis"),
    Word("zeros", 0, "an array of 0"),
)
_OPAQUE = (
    Word("cond", None, "a branch of a graph"),
    Word("ffi_call", None, "code outside of the framework"),
    Word("function", None, "a function of a graph"),
    Word("io_callback", None, "Python code called from a program"),
    Word("pure_callback", None, "Python code called from a program"),
    Word("while", None, "a loop of a graph"),
)

GROUPS: dict[str, tuple[Word, ...]] = {
    "Arithmetic": _ARITHMETIC,
    "Functions of a number": _FUNCTIONS,
    "Reductions": _REDUCTIONS,
    "Linear algebra": _LINEAR_ALGEBRA,
    "Networks": _NETWORKS,
    "Choosing": _CHOOSING,
    "Placing": _PLACING,
    "Seen from outside": _OPAQUE,
}
WORDS: dict[str, Word] = {word.name: word for group in GROUPS.values() for word in group}
# What records call the operands of an operation, in the order of its meaning, where frameworks
# have orders of their own.
OPERANDS: dict[str, dict[str, str]] = {
    "linear": {
        "input": "x", "mat1": "x", "mat2": "weight", "weight": "weight", "self": "bias",
        "bias": "bias",
    },
}  # fmt: skip
# What a backward operation works on besides: the gradient that comes in, and what the forward
# operation took and gave. Fixes call the operands x and y, too.
GRADIENTS = {"grad": "gradient", "result": "result", "self": "x", "other": "y"}
# Rules know these, and no framework that is watched today runs them under this name.
WAITING: dict[str, str] = {
    "instance_norm": "every framework runs it as batch_norm, or as the arithmetic it is made of",
    "sgd": "an update by gradient descent is seen as the arithmetic it is made of",
}


def bounds(name: str) -> tuple[float, float]:
    """Give the smallest and the largest number that a function has a value for.

    Raises:
        KeyError: If the name is not of a function with such an interval.
    """
    found = WORDS[name].bounds
    if found is None:
        raise KeyError(name)
    return found


_GAMMA = frozenset({"lgamma", "digamma", "polygamma"})


def is_edge(name: str, x: float) -> bool:
    """Tell whether a number is a pole of a function of one number, or ends its interval."""
    if not math.isfinite(x):
        return False
    return x <= 0 and x == int(x) if name in _GAMMA else x in bounds(name)


def domain(name: str) -> str:
    """Say of which finite operands an operation is finite; empty for a name that is not known."""
    word = WORDS.get(name)
    return "" if word is None else word.domain


def table() -> str:
    """Return the vocabulary as Markdown tables, one for each group."""
    parts = []
    for title, words in GROUPS.items():
        lines = [f"### {title}", "", "| name | arrays | meaning | finite |"]
        lines.append("| --- | --- | --- | --- |")
        for word in words:
            arity = "any" if word.arity is None else str(word.arity)
            cells = (f"`{word.name}`", arity, cell(word.meaning), cell(word.domain))
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def cell(text: str) -> str:
    """Write a text into a Markdown table."""
    # A star or a bar would be Markdown's, not the code's.
    return text.replace("|", "\\|").replace("*", "\\*")
