"""``reproduce.py``: a bundle's operation as a script that needs its framework and safetensors."""

import re
from collections.abc import Mapping
from typing import Any

from anynan._base.escaping import prose
from anynan._calls.calls import Call, Coder, identifier, refuse
from anynan._calls.dialect import Dialect
from anynan._calls.tensors import stored
from anynan._reports.report import render_line
from anynan.events import Event

TENSORS = "tensors.safetensors"
_DEVICE = re.compile(r"[a-z]{1,10}")
# What a script prints of the result; read back by ``anynan replay``.
RESULT = re.compile(
    r"^after +(\S+): .*: (\d+) NaN, (\d+) Inf, (\d+) -Inf(?:, first at \[([\d, ]*)\])?$",
    re.MULTILINE,
)


def script(
    dialect: Dialect, event: Event, call: Call | None,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], versions: Mapping[str, str], device: str,
) -> str:  # fmt: skip
    """Write the script.

    Args:
        dialect: The framework's.
        event: What it shows.
        call: The operation, None where none is known.
        tensors: Dtype and shape of what the tensor file holds.
        versions: What the event was seen with.
        device: Where it was seen.

    Raises:
        BundleError: If the call is not one of the framework's.
    """
    if not _DEVICE.fullmatch(device):
        refuse("its device is no name of one")
    about = [render_line(event)]
    operation = event.operation
    if operation is not None:
        about.append(f"{operation.name} ({operation.raw})")
        if operation.source is not None:
            source = operation.source
            about.append(f"{source.file}:{source.line}: {source.text.strip()}")
    about.append(f"seen with {', '.join(f'{name} {text}' for name, text in versions.items())}")
    lines = [f"# {prose(text)}" for text in about]
    lines += [f"# needs: pip install {dialect.framework} safetensors", ""]
    lines += [dialect.head.replace("DEVICE", repr(device)).strip(), ""]
    for name, (dtype, shape) in tensors.items():
        ready = dialect.ready(dtype)
        if ready is not None or stored(dtype, shape, bits=dialect.bits)[1] != shape:
            lines.append(f"x = loaded[{name!r}]")
            lines.append(f"loaded[{name!r}] = {ready or 'x'}")
    if call is None or call.unwritable:
        return "\n".join([*lines, *_only_shown(call)]) + "\n"
    return "\n".join([*lines, *_run(dialect, call, set(tensors))]) + "\n"


def _only_shown(call: Call | None) -> list[str]:
    """Write what can be done without the operation's call: show what is there."""
    if call is None:
        said = ["# No operation is known to have made it: these are the tensors of the call."]
    else:
        said = [
            f"# {prose(call.text)} is not run here: {prose(call.unwritable)}.",
            '# Its operands are the tensors "operation.*".',
        ]
    return [*said, "for name, x in loaded.items():", '    show("saved", name, x)']


def _run(dialect: Dialect, call: Call, names: set[str]) -> list[str]:
    own = {name.removeprefix("operation.") for name in names if name.startswith("operation.")}
    coder = Coder(dialect.words, own)
    lines = [f"# {prose(call.cut)}"] if call.cut else []
    lines += [
        "tensors = {",
        '    name.removeprefix("operation."): x',
        "    for name, x in loaded.items()",
        '    if name.startswith("operation.")',
        "}",
        "for name, x in tensors.items():",
        '    show("before", name, x)',
    ]
    gradient = call.gradient
    if gradient is not None:
        known = [name for name in [*gradient.of, *gradient.incoming] if name is not None]
        if dialect.gradient is None or not gradient.of or not own.issuperset(known):
            refuse("its gradient is of operands that are not there")
        lines += [f"for name in {gradient.of!r}:", "    tensors[name].requires_grad_()"]
    for line in call.lines:
        given = [coder.value(value) for value in line.arguments]
        given += [f"{identifier(key)}={coder.value(x)}" for key, x in line.keywords.items()]
        lines.append(f"{line.gives} = {dialect.function(line.function)}({', '.join(given)})")
        coder.made.add(line.gives)
    if call.result not in coder.made:
        refuse("its result is the result of none of its calls")
    if gradient is not None and dialect.gradient is not None:
        lines += dialect.gradient(call.result, gradient.of, gradient.incoming)
    else:
        lines += [
            f"made = {call.result}",
            "for x in made if isinstance(made, (tuple, list)) else [made]:",
            '    show("after", "result", x)',
        ]
    return lines


def results(printed: str) -> list[dict[str, Any]]:
    """Read what a script printed of its results."""
    found = []
    for match in RESULT.finditer(printed):
        first = None if match[5] is None else [int(i) for i in match[5].split(",") if i.strip()]
        counts = dict(zip(("nan", "posinf", "neginf"), map(int, match.group(2, 3, 4)), strict=True))
        found.append({**counts, "first": first})
    return found
