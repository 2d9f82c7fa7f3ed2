"""How an array's elements are reached: on the host as NumPy, or in cache-sized pieces."""

import math
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import array_api_compat
import numpy as np

# What a library may raise when it cannot do what the standard asks of it.
REFUSALS = (
    AttributeError, BufferError, IndexError, NotImplementedError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
BLOCK = 2**18  # elements: a bool temporary of 256 KiB, a float32 one of 1 MiB

_SMALL_FLOAT = re.compile(r"(?:bfloat16|float[468]_e\d+m(?P<mantissa>\d+).*)")
_NEVER_BAD = re.compile(r"float[46]_")
_SMALL_INT = re.compile(r"u?int[124]")
_SMALL_COMPLEX = {"complex32": "float16", "bcomplex32": "bfloat16"}
_REAL = (np.float16, np.float32, np.float64, np.longdouble)
_COMPLEX = {np.complex64: np.float32, np.complex128: np.float64, np.clongdouble: np.longdouble}
_CPU = 1  # kDLCPU, the device type that DLPack gives to host memory


@dataclass(frozen=True, slots=True)
class Format:
    """Describe a NumPy dtype, also one that an extension package added.

    Attributes:
        name: Short name, such as ``float32``.
        kind: What its elements are; ``other`` has no numbers that could be bad.
        part: Native dtype of a real element or of a complex element's two parts.
        nan_from: Smallest bit pattern that is a NaN when the patterns, read as sign and
            magnitude, are in the order of the values; None where they are not.
        max: Largest finite value, in the precision of ``part`` (None for integers).
        tiny: Smallest normal magnitude, likewise.
    """

    name: str
    kind: Literal["real", "complex", "integer", "other"]
    part: np.dtype[Any]
    nan_from: int | None = None
    max: Any = None
    tiny: Any = 0.0


@lru_cache(maxsize=256)
def format_of(dtype: np.dtype[Any]) -> Format:
    """Describe a dtype; dtypes of extension packages are known by their names."""
    name, scalar = dtype.name, dtype.type
    if scalar in _REAL:
        return _standard(name, "real", np.dtype(scalar))
    if scalar in _COMPLEX:
        return _standard(name, "complex", np.dtype(_COMPLEX[scalar]))
    if dtype.kind in "biu" or _SMALL_INT.fullmatch(name):
        return Format(name, "integer", dtype)
    if found := _SMALL_FLOAT.fullmatch(name):
        return _tabulated(name, "real", dtype, int(found["mantissa"] or 7))
    if part := _SMALL_COMPLEX.get(name):
        if part == "float16":
            return _standard(name, "complex", np.dtype(np.float16))
        package = sys.modules[scalar.__module__]
        return _tabulated(name, "complex", np.dtype(getattr(package, part)), 7)
    return Format("structured" if dtype.names else name, "other", dtype)


def _standard(name: str, kind: Literal["real", "complex"], part: np.dtype[Any]) -> Format:
    info: Any = np.finfo(part)
    nan_from = None
    if part.type is not np.longdouble:
        infinity = np.array(np.inf, part).view(f"u{part.itemsize}")
        nan_from = int(infinity) + 1
    return Format(name, kind, part, nan_from, info.max, info.tiny)


def _tabulated(
    name: str, kind: Literal["real", "complex"], part: np.dtype[Any], mantissa: int
) -> Format:
    # A small format is best described by its own values: no two of these families agree on
    # where NaN, the sign and the largest value are.
    half = 2 ** (8 * part.itemsize - 1)
    with np.errstate(all="ignore"):
        codes = np.arange(2 * half, dtype=f"u{part.itemsize}")
        values = codes.view(part).astype(np.float32)
        above, below = values[:half], values[half:]
        nans = np.isnan(above)
        nan_from = half - int(nans.sum())
        ordered = (
            bool(nans[nan_from:].all())
            and bool((np.isnan(below) == nans).all())
            and bool((np.diff(above[:nan_from]) > 0).all())
            and bool((below[:nan_from] == -above[:nan_from]).all())
        )
        largest = float(values[np.isfinite(values)].max())
    tiny = float(values[1 << mantissa]) if mantissa else 0.0
    return Format(name, kind, part, nan_from if ordered else None, largest, tiny)


def as_float(value: Any) -> float:
    """Turn a scalar into a float; a finite one beyond float64 stays finite."""
    number = float(value)
    if math.isinf(number) and bool(np.isfinite(value)):
        return math.copysign(sys.float_info.max, number)
    return number


def namespace(x: Any) -> Any:
    """Return the array API namespace of ``x``, None if it has none."""
    try:
        return array_api_compat.array_namespace(x)
    except TypeError:
        return None


def on_host(x: Any) -> np.ndarray[Any, Any] | None:
    """View ``x`` as a NumPy array without copying; None where only its library can read it.

    Raises:
        TypeError: If neither NumPy nor the array API standard reaches the elements.
    """
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, np.generic | float | complex | int):
        return np.asarray(x)
    if hasattr(x, "__dlpack__"):
        view = _shared(x)
        if view is not None:
            return view
    if namespace(x) is not None:
        return None
    if hasattr(x, "__array__"):
        return np.asarray(x)
    msg = (
        f"anynan cannot read the elements of a {type_name(x)}: it follows neither the array "
        "API standard nor __array__ or __dlpack__; pass its values as an array"
    )
    raise TypeError(msg)


def _shared(x: Any) -> np.ndarray[Any, Any] | None:
    try:
        if x.__dlpack_device__()[0] != _CPU:
            return None
        return np.from_dlpack(detached(x))
    except REFUSALS:
        # Not every dtype, layout and lazy flag crosses: the standard's functions still can.
        return None


def detached(x: Any) -> Any:
    """Return ``x`` outside of its gradient graph, where its library keeps one."""
    detach = getattr(x, "detach", None)
    return detach() if callable(detach) else x


def standard_format(x: Any) -> Format:
    """Describe the dtype of an array of another library, in NumPy's terms."""
    name, kind, xp = dtype_name(x), _float_kind(x), namespace(x)
    # Formats of 4 and 6 bits have neither NaN nor Inf, and libraries pack them in bytes.
    if kind is None or _NEVER_BAD.match(name):
        with suppress(TypeError):  # a random key is no number to its own library
            if xp.isdtype(x.dtype, ("bool", "integral")):
                return Format(name, "integer", np.dtype(np.int64))
        return _extension(x) or Format(name, "other", np.dtype(np.void))
    info = xp.finfo(x.dtype)
    part = np.dtype(np.float64 if info.bits > 32 else np.float32)
    return Format(name, kind, part, max=float(info.max), tiny=float(info.smallest_normal))


def widened(x: Any, bits: int) -> Any:
    """Give floats of fewer bits than this as float32, and those of an extension package, too."""
    xp, kind = namespace(x), _float_kind(x)
    if _extension(x) is None if kind is None else xp.finfo(x.dtype).bits >= bits:
        return x
    return xp.astype(x, xp.complex64 if kind == "complex" else xp.float32)


def _float_kind(x: Any) -> Literal["real", "complex"] | None:
    """Say what kind of floats an array's library takes its elements for, None if for none."""
    with suppress(TypeError):  # a random key
        isdtype = namespace(x).isdtype
        if isdtype(x.dtype, "real floating"):
            return "real"
        if isdtype(x.dtype, "complex floating"):
            return "complex"
    return None


def _extension(x: Any) -> Format | None:
    """Describe a dtype that an extension package added, of which the library knows nothing."""
    name = dtype_name(x)
    if not isinstance(x.dtype, np.dtype) or not _SMALL_FLOAT.fullmatch(name):
        return None
    if _NEVER_BAD.match(name):
        return None
    return replace(format_of(x.dtype), part=np.dtype(np.float32), nan_from=None)


def to_host(x: Any) -> np.ndarray[Any, Any]:
    """Copy a small array to the host, in a dtype that NumPy has."""
    x, xp = widened(x, 32), namespace(x)
    view = _shared(x)
    if view is not None:
        return view
    for device in ("cpu", *_host_devices(xp)):
        with suppress(*REFUSALS):
            x = array_api_compat.to_device(x, device)
            break
    resolve = getattr(x, "resolve_conj", None)
    return np.asarray(resolve() if callable(resolve) else x)


def _host_devices(xp: Any) -> list[Any]:
    """List the devices that a library calls a CPU in words of its own."""
    with suppress(*REFUSALS):
        devices = xp.__array_namespace_info__().devices()
        return [device for device in devices if "cpu" in str(device).lower()]
    return []


def blocks(x: Any, limit: int = BLOCK) -> Iterator[Any]:
    """Cut an array of any library into slices of at most ``limit`` elements, in C order."""
    shape = x.shape
    # A chunked array is lazy and reduces chunk by chunk by itself; its size may be unknown.
    if hasattr(x, "chunks") or math.prod(shape) <= limit:
        yield x
        return
    axis, inner = 0, math.prod(shape[1:])
    while inner > limit:
        axis += 1
        inner //= shape[axis]
    rows = max(1, limit // inner)
    for outer in np.ndindex(*shape[:axis]):
        for start in range(0, shape[axis], rows):
            # The standard leaves slices that end outside of the axis unspecified.
            yield x[(*outer, slice(start, min(start + rows, shape[axis])), ...)]


def pieces(
    x: np.ndarray[Any, Any], count: int, *, mask: np.ndarray[Any, Any] | None = None,
    order: Literal["C", "K"] = "K", dtype: Any = None,
) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]]:  # fmt: skip
    """Walk a NumPy array as contiguous 1-D pieces of at most ``count`` elements.

    Args:
        x: The array; any strides, alignment and byte order.
        count: Elements in a piece.
        mask: True where an element is to be left out; it goes along in the same order.
        order: ``C``, or ``K`` for the order in memory.
        dtype: What to convert to, piece by piece; the native form of its own by default.

    Yields:
        A piece, good until the next one is asked for, and its part of the mask.
    """
    native = x.dtype.newbyteorder("=") if dtype is None else np.dtype(dtype)
    if mask is None and x.dtype == native and x.flags.aligned:
        flat = None
        if x.flags.c_contiguous:
            flat = x.reshape(-1)
        elif order == "K" and x.flags.f_contiguous:
            flat = x.T.reshape(-1)
        if flat is not None:
            for start in range(0, flat.size, count):
                yield flat[start : start + count], None
            return
    if x.size == 0:
        return
    operands = [x] if mask is None else [x, mask]
    each: list[Any] = ["readonly", "contig", "aligned"]
    walker = np.nditer(
        operands,
        flags=["external_loop", "buffered"],
        op_flags=[each] * len(operands),
        op_dtypes=[native, np.bool_][: len(operands)],
        order=order,
        casting="unsafe",
        buffersize=count,
    )
    for piece in walker:
        yield (piece, None) if mask is None else piece  # type: ignore[misc]


def unreadable(x: Any, error: Exception) -> TypeError:
    """Make the error for an array that its own library would not read."""
    # Some libraries append pages of build details to their first sentence.
    reason = str(error).strip().partition("\n")[0].partition(". ")[0][:200]
    msg = (
        f"anynan cannot read the elements of this {type_name(x)} of {dtype_name(x)} "
        f"({reason}); pass its values as a dense array, outside of a traced function"
    )
    return TypeError(msg)


def fields(
    x: np.ndarray[Any, Any],
) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None, Format]]:
    """Split a structured array into its float fields; any other array is yielded as it is.

    Yields:
        The array, its mask (None if nothing is masked) and its format.
    """
    if x.dtype.names:
        for name in x.dtype.names:
            for found in fields(x[name]):
                if found[2].kind in ("real", "complex"):
                    yield found
        return
    mask = None
    if isinstance(x, np.ma.MaskedArray):
        if x.mask is not np.ma.nomask:
            mask = np.asarray(x.mask)
        x = x.data
    yield np.asarray(x), mask, format_of(x.dtype)


def dtype_name(x: Any) -> str:
    """Return the short name of the dtype, the same in every library; empty if it has none."""
    dtype = getattr(x, "dtype", "")
    if isinstance(dtype, np.dtype):
        return format_of(dtype).name
    name = getattr(dtype, "name", None)  # some write <dtype: 'float32'>
    return name if isinstance(name, str) else str(dtype).rpartition(".")[2]


def dtype_max(x: Any) -> float | None:
    """Return the largest finite value of the dtype, None where it has none."""
    if isinstance(x, float | complex):
        return sys.float_info.max
    dtype = getattr(x, "dtype", None)
    if isinstance(dtype, np.dtype):
        largest = format_of(dtype).max
        return None if largest is None else as_float(largest)
    xp = namespace(x)
    try:
        # Outside of the array API a dtype may know its own range.
        own = getattr(dtype, "real_dtype", dtype)
        found = getattr(own, "max", None) if xp is None else xp.finfo(dtype).max
        return None if found is None else float(found)
    except REFUSALS:
        return None


def device_name(x: Any) -> str:
    """Return the device as the library prints it, ``cpu`` for host memory."""
    if isinstance(x, np.ndarray | np.generic):
        return "cpu"
    try:
        text = str(array_api_compat.device(x))
    except REFUSALS:
        text = str(getattr(x, "device", "cpu"))
    if text.isidentifier() or re.fullmatch(r"\w+:\d+", text):
        return text
    with suppress(*REFUSALS):
        if x.__dlpack_device__()[0] == _CPU:
            return "cpu"
    quoted = re.fullmatch(r"[\w.]+\('([\w:]+)'\)", text)
    return text.partition("(")[0] if quoted is None else quoted[1]


def library_name(x: Any) -> str:
    """Return the name of the array library that ``x`` belongs to."""
    if isinstance(x, np.ndarray | np.generic):
        return "numpy"
    if isinstance(x, float | complex | int):
        return "python"
    xp = namespace(x)
    whole = type(x).__module__ if xp is None else xp.__name__
    return str(whole).removeprefix("array_api_compat.").partition(".")[0]


def type_name(x: Any) -> str:
    """Return the type as a user would write it."""
    kind = type(x)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"
