"""Follow a pickle's opcodes without running anything: globals and calls stay names."""

import pickletools
from dataclasses import dataclass
from typing import Any, BinaryIO

from anynan._files.tensors import UnreadableError


@dataclass(eq=False, slots=True)
class Name:
    """Stand for what ``import module; module.name`` would give."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class Call:
    """Stand for a call that is not made, and for the object it would make."""

    function: Any
    args: Any
    state: Any = None


@dataclass(eq=False, slots=True)
class Kept:
    """Stand for what the pickle keeps elsewhere, such as a tensor's storage."""

    key: Any


_MARK = object()
_PLAIN = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE"),
    *("BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_VALUES: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, type] = {"EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_DICT": dict}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def follow(file: BinaryIO | bytes) -> Any:
    """Return what a pickle describes, made of plain containers, names and calls.

    Args:
        file: The pickle; of a file, the next one in it.

    Raises:
        UnreadableError: If it is none, or of a kind that no weights are stored in.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(file):
            if opcode.name == "STOP":
                return machine.stack.pop()
            machine.step(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        msg = f"its pickle is damaged: {error}"
        raise UnreadableError(msg) from None
    msg = "its pickle has no end"
    raise UnreadableError(msg)


class _Machine:
    """Keep the stack and the memo of one pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _PLAIN:
            stack.append(argument)
        elif name in _VALUES:
            stack.append(_VALUES[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[-count:] = [tuple(stack[-count:])]
        else:
            getattr(self, f"_{name.lower()}", self._unknown)(argument)

    def _unknown(self, _: Any) -> None:
        msg = "an opcode that no weights are stored with"
        raise ValueError(msg)

    def _marked(self) -> list[Any]:
        at = max(i for i, item in enumerate(self.stack) if item is _MARK)
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def _mark(self, _: Any) -> None:
        self.stack.append(_MARK)

    def _proto(self, _: Any) -> None:
        pass

    _frame = _proto

    def _put(self, index: Any) -> None:
        self.memo[int(index)] = self.stack[-1]

    _binput = _long_binput = _put

    def _memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _get(self, index: Any) -> None:
        self.stack.append(self.memo[int(index)])

    _binget = _long_binget = _get

    def _pop(self, _: Any) -> None:
        self.stack.pop()

    def _pop_mark(self, _: Any) -> None:
        self._marked()

    def _dup(self, _: Any) -> None:
        self.stack.append(self.stack[-1])

    def _tuple(self, _: Any) -> None:
        self.stack.append(tuple(self._marked()))

    def _list(self, _: Any) -> None:
        self.stack.append(self._marked())

    def _dict(self, _: Any) -> None:
        held = self._marked()
        self.stack.append(dict(_pairs(held)))

    def _empty_set(self, _: Any) -> None:
        self.stack.append([])

    def _frozenset(self, _: Any) -> None:
        self.stack.append(self._marked())

    def _additems(self, _: Any) -> None:
        held = self._marked()
        self.stack[-1].extend(held)

    def _append(self, _: Any) -> None:
        item = self.stack.pop()
        _into(self.stack[-1], [item])

    def _appends(self, _: Any) -> None:
        held = self._marked()
        _into(self.stack[-1], held)

    def _setitem(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _update(self.stack[-1], [key, value])

    def _setitems(self, _: Any) -> None:
        held = self._marked()
        _update(self.stack[-1], held)

    def _global(self, argument: Any) -> None:
        module, _, name = str(argument).partition(" ")
        self.stack.append(Name(module, name))

    def _stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(Name(str(module), str(name)))

    def _reduce(self, _: Any) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        # An ordered dict is what a state dict is; it is filled later.
        ordered = isinstance(function, Name) and function.name == "OrderedDict"
        self.stack.append({} if ordered else Call(function, args))

    _newobj = _reduce

    def _newobj_ex(self, _: Any) -> None:
        self.stack.pop()
        self._reduce(None)

    def _inst(self, argument: Any) -> None:
        self._global(argument)
        name = self.stack.pop()
        self.stack.append(Call(name, tuple(self._marked())))

    def _obj(self, _: Any) -> None:
        function, *args = self._marked()
        self.stack.append(Call(function, tuple(args)))

    def _build(self, _: Any) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Call):
            self.stack[-1].state = state

    def _binpersid(self, _: Any) -> None:
        self.stack.append(Kept(self.stack.pop()))

    def _persid(self, argument: Any) -> None:
        self.stack.append(Kept(argument))


def _pairs(held: list[Any]) -> list[tuple[Any, Any]]:
    """Pair keys with values; a key of another kind gets a name that no other has."""
    keys = [
        key if isinstance(key, str | int | float | bool | None) else f"{type(key).__name__} {i}"
        for i, key in enumerate(held[::2])
    ]
    return list(zip(keys, held[1::2], strict=True))


def _update(target: Any, held: list[Any]) -> None:
    if isinstance(target, Call):  # an object that is a dict
        if not isinstance(target.state, dict):
            target.state = {}
        target = target.state
    if isinstance(target, dict):
        target.update(_pairs(held))


def _into(target: Any, held: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(held)
