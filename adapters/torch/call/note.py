"""One operation as it is noted: what it was called with, weakly, what it gave, and where."""

import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeGuard

import torch

from anynan._base.sources import gone_through, is_library, located, position
from anynan.events import Source
from anynan.torch.call.kinds import WRITES, kind_of
from anynan.torch.private import storage_number, writes

# So many tensors of one argument are looked at.
LONG = 2**12
# Files that only hand on.
_WAYS = ("torch/overrides.py", "torch/_tensor.py")
PLAINS = frozenset(
    {
        int, float, bool, complex, str, type(None), type(...), torch.dtype, torch.device, slice,
        torch.Size, torch.layout, torch.memory_format,
    }
)  # fmt: skip
# Whether code is the program's own; of so much of it.
CODES: dict[CodeType, bool] = {}
_MOST = 4096

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_ref = weakref.ref


class Memory(NamedTuple):
    """Say which memory a tensor has: views of one have the same storage."""

    storage: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, x: torch.Tensor) -> "Memory":
        """Give a tensor's."""
        return cls(storage_number(x), x.size(), x.stride(), int(x.storage_offset()))


class Note(NamedTuple):
    """Hold an operation that ran: one is made for each, so they hold no more than numbers and refs.

    A weak reference is the same object for as long as its tensor lives, and so stands for it.

    Attributes:
        func: What was called.
        args: Its arguments, tensors weakly.
        kwargs: Its arguments by name.
        versions: How often each of the tensors among these had been written to, in order.
        code: Where it was called: the user's code or the library's,
        last: and which instruction of it.
        around: The user's code and instruction, where a library called it.
        autocast: The casts in force.
        out: What it gave, weakly; a tuple of these where it gave several.
        version: How often that had been written to; a list for an operation that wrote to many.
        grad: Whether that had a gradient.
        copy: What it wrote to, as it was before, where that is held.
        memory: Which memory it wrote to, where that may be another tensor's, too.
    """

    func: Any
    args: list[Any]
    kwargs: dict[str, Any] | None
    versions: list[int]
    code: CodeType
    last: int
    around: tuple[CodeType, int] | None
    autocast: Any
    out: Any
    version: Any
    grad: bool
    copy: Any = None
    memory: "Memory | None" = None

    @property
    def made(self) -> list[tuple[Any, int]]:
        """List what it gave, weakly, each with how often that had been written to."""
        if isinstance(self.out, list):
            return [(ref, 0) for ref in self.out]
        return [(self.out, self.version)]

    @property
    def in_place(self) -> bool:
        """Tell whether it wrote to its first operand."""
        return type(self.func) is not Transformed and kind_of(self.func) == WRITES

    def source(self) -> Source | None:
        """Give the user's line."""
        code, last = self.around or (self.code, self.last)
        found = located(code, line_of(code, last), offset=last)
        if self.around is None:
            return found
        return gone_through(found, self.code, line_of(self.code, self.last), "torch")


class Held(NamedTuple):
    """Hold the value of a tensor as it was used, and whether it had a graph then."""

    ref: Any
    version: int
    grad: bool
    value: torch.Tensor


class Noted(NamedTuple):
    """Hold what was noted up to a moment.

    Attributes:
        operations: In order.
        held: Values that are held.
        since: The first operation since the backward pass before.
    """

    operations: list[Note]
    held: dict[int, Held]
    since: int


class Transformed:
    """Call what a function transform made; what it gives is listed flat.

    Args:
        made: What the transform made.
    """

    def __init__(self, made: Callable[..., Any]) -> None:
        self.made = made

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call it."""
        return tuple(leaves(self.made(*args, **kwargs)))


def is_trained(x: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Tell whether the program has gradients kept for a tensor: a weight, or what it made so."""
    return isinstance(x, torch.Tensor) and x.is_leaf and x.requires_grad


def as_weight(x: torch.Tensor) -> torch.Tensor:
    """Stand for the making of a weight."""
    return x.detach()


def weakly(x: Any, versions: list[int]) -> Any:
    """Take an argument, tensors in it weakly.

    Raises:
        TypeError: If it may hold what is not to be held.
    """
    kind = type(x)
    if kind is _Tensor or kind is _Parameter:
        versions.append(writes(x))
        return _ref(x)
    if kind in PLAINS:
        return x
    if kind in (tuple, list) and len(x) <= LONG:
        return kind([weakly(item, versions) for item in x])
    if kind is dict and len(x) <= LONG:
        return {key: weakly(item, versions) for key, item in x.items()}
    if isinstance(x, int | float):
        return x
    raise TypeError(kind)


def leaves(x: Any) -> Iterator[Any]:
    """Walk what tuples, lists and dicts hold."""
    if isinstance(x, tuple | list | dict):
        for item in x.values() if isinstance(x, dict) else x:
            yield from leaves(item)
    else:
        yield x


def split(note: Note) -> Iterator[Note]:
    """Walk the operations that one is: what writes to a list is one for each of its tensors."""
    if not isinstance(note.version, list):
        yield note
        return
    versions = iter(note.versions)

    def versioned(x: Any) -> tuple[Any, list[int]]:
        return x, [next(versions)] if type(x) is weakref.ReferenceType else []

    each = len(note.version)
    columns = [
        [versioned(item) for item in x] if isinstance(x, tuple | list) else [versioned(x)] * each
        for x in note.args
    ]
    one = getattr(_Tensor, note.func.__name__.removeprefix("_foreach_"), None)
    if one is None:  # a scaler's own: what it wrote is as if it came from outside
        return
    for row, version, copy in zip(zip(*columns, strict=True), note.version, note.copy, strict=True):
        yield note._replace(
            func=one, args=[x for x, _ in row], versions=[n for _, found in row for n in found],
            out=row[0][0], version=version, copy=copy,
        )  # fmt: skip


def several(out: Any) -> tuple[Any, int, bool]:
    """Take several results."""
    refs = [_ref(x) if type(x) is _Tensor else None for x in out]
    return refs, 0, any(x.requires_grad for x in out if type(x) is _Tensor)


def is_users(code: CodeType) -> bool:
    """Tell whether code is the program's own."""
    found = CODES.get(code)
    if found is None:
        found = not is_library(code.co_filename)
        if len(CODES) < _MOST:
            CODES[code] = found
    return found


def place_of(frame: FrameType | None) -> tuple[CodeType, int, tuple[CodeType, int] | None]:
    """Give the place of the stack, past the framework's own way, and the user's around it."""
    library: tuple[CodeType, int] | None = None
    while frame is not None:
        code = frame.f_code
        if is_users(code):
            if library is None:
                return code, frame.f_lasti, None
            return (*library, (code, frame.f_lasti))
        if library is None and not code.co_filename.endswith(_WAYS):
            library = code, frame.f_lasti
        frame = frame.f_back
    assert library is not None
    return (*library, None)


def line_of(code: CodeType, last: int) -> int:
    """Give the line of an instruction."""
    return position(code, last)[0] or code.co_firstlineno
