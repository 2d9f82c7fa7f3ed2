"""What one fix is called for one operation: the same advice, written as that operation's code."""

from anynan._diagnosis.vocabulary import WORDS

# Numbers inside an open interval: the condition, and one that fulfils it.
_INSIDE: dict[tuple[float, float], tuple[str, str]] = {
    (0.0, float("inf")): ("{x} > 0", "1"),
    (-1.0, float("inf")): ("{x} > -1", "0"),
    (1.0, float("inf")): ("{x} > 1", "2"),
    (-1.0, 1.0): ("abs({x}) < 1", "0"),
    (0.0, 1.0): ("({x} > 0) & ({x} < 1)", "0.5"),
}
_LENGTHS = frozenset({"vector_norm", "matrix_norm"})
_WITH_EPS = frozenset(
    {"layer_norm", "batch_norm", "group_norm", "rms_norm", "instance_norm", "adam"}
)


def _call(operation: str, argument: str) -> str:
    """Write the operation with another argument in the place of its deciding one."""
    match operation:
        case "divide" | "floor_divide":
            return f"x / {argument}"
        case "reciprocal":
            return f"1 / {argument}"
        case "pow":
            return f"{argument} ** p"
        case "xlogy" | "xlog1py":
            return f"{operation}(x, {argument.strip('()') if argument[0] == '(' else argument})"
    name = operation if operation.isidentifier() else "f"
    return f"{name}({argument.strip('()') if argument[0] == '(' else argument})"


def _deciding(operation: str) -> str:
    return "y" if operation in ("divide", "floor_divide", "xlogy", "xlog1py") else "x"


def guarded(operation: str, eps: str, margin: str) -> str:
    """Keep the deciding argument away from 0 by adding eps to it."""
    if operation in _WITH_EPS:
        return f"such as {eps}"
    if operation in _LENGTHS:
        return f"`sqrt(sum(x * x) + {eps})`"
    if operation == "hypot":
        return f"`sqrt(x * x + y * y + {eps})`"
    if operation in ("log1p", "xlogy", "xlog1py"):  # the edge is at -1, or 0 is meant there
        return floored(operation, eps, margin)
    return f"`{_call(operation, f'({_deciding(operation)} + {eps})')}`"


def floored(operation: str, eps: str, margin: str) -> str:
    """Keep the deciding argument above the edge."""
    if operation == "weight_norm":
        return f"x / maximum(norm(x), {eps})"
    edge = f"-1 + {margin}" if operation in ("log1p", "xlog1py") else eps
    return f"`{_call(operation, f'maximum({_deciding(operation)}, {edge})')}`"


def trapless(operation: str, cap: str) -> str:
    """Give a masked branch a safe input before the function, and mask its result."""
    x = _deciding(operation)
    word = WORDS.get(operation)
    if operation in ("divide", "reciprocal"):
        condition, safe = f"{x} != 0", "1"
    elif operation == "pow":
        condition, safe = "x > 0", "1"
    elif operation in ("exp", "expm1", "exp2"):
        condition, safe = f"x < {cap}", "0"
    elif word is not None and word.bounds is not None:
        condition, safe = _INSIDE[word.bounds]
        condition = condition.format(x=x)
    else:
        return "where(mask, f(where(mask, x, 1)), 0)"
    return f"`where({condition}, {_call(operation, f'where({condition}, {x}, {safe})')}, 0)`"
