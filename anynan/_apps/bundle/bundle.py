"""A bundle on disk: written once, and believed only after every part of it was looked at."""

import hashlib
import importlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import anynan
from anynan._apps.bundle.script import TENSORS, script
from anynan._base.about import FOLDERS, __version__, versions
from anynan._calls.calls import BundleError, Call, call_of, refuse
from anynan._calls.collector import Collector
from anynan._calls.dialect import Dialect
from anynan._calls.tensors import keepable, stored, write
from anynan._files.safetensors import tensors as listed
from anynan._files.tensors import UnreadableError
from anynan.errors import reason
from anynan.events import Event

VERSION = 1
FORMAT = "anynan bundle"
FACTS, SCRIPT = "bundle.json", "reproduce.py"
_FIELDS = {
    "format": str, "version": int, "framework": str, "device": str, "versions": dict,
    "event": dict, "operation": dict, "tensors": dict, "left_out": list, "notes": list,
    "sha256": str,
}  # fmt: skip
_LARGEST = 64 * 2**20  # of the file of facts


@dataclass(frozen=True)
class Bundle:
    """Hold a bundle that was looked at.

    Attributes:
        event: What happened.
        call: The operation, None where none is known.
        framework: Whose it is.
        versions: What it was seen with.
        left_out: What was not kept, each with the reason.
        notes: What could not be had.
        script: The code that shows it, made from the rest.
        tensors: The content of the tensor file.
    """

    event: Event
    call: Call | None
    framework: str
    versions: dict[str, str]
    left_out: list[dict[str, Any]]
    notes: list[str]
    script: str
    tensors: bytes


def dialect_of(framework: str) -> Dialect:
    """Give a framework's dialect.

    Raises:
        BundleError: If there is no such framework.
        ImportError: If it is not installed.
    """
    folder = FOLDERS.get(framework, "")
    package = os.path.dirname(anynan.__file__)
    if not folder or not os.path.isfile(os.path.join(package, folder, "bundle.py")):
        refuse(f"it is of a framework {framework[:40]!r}, which is not known")
    found: Dialect = importlib.import_module(f"anynan.{folder}.bundle").DIALECT
    return found


def save(folder: str, event: Event, collector: Collector, framework: str) -> None:
    """Write a bundle; the folder is there with all of it, or not at all.

    Args:
        folder: Where to; it is empty, or not there.
        event: What happened.
        collector: What was taken.
        framework: Whose dialect it is written in.
    """
    dialect = dialect_of(framework)
    held, left_out = collector.finish()
    parent = os.path.dirname(os.path.abspath(folder))
    os.makedirs(parent, exist_ok=True)
    beside = tempfile.mkdtemp(prefix=".anynan-", dir=parent)
    try:
        path = os.path.join(beside, TENSORS)
        write(path, held, bits=dialect.bits)
        data = {
            "format": FORMAT,
            "version": VERSION,
            "framework": framework,
            "device": _device(event),
            "versions": _versions(framework),
            "event": _at_home(event.to_dict()),
            "operation": {} if collector.call is None else _at_home(collector.call.to_dict()),
            "tensors": {
                name: {"dtype": item.dtype, "shape": list(item.shape)}
                for name, item in held.items()
            },
            "left_out": left_out,
            "notes": _at_home(collector.notes),
            "sha256": _hash(path),
        }
        data = json.loads(json.dumps(data, allow_nan=False))
        try:
            text = _script(data, dialect)
        except BundleError as error:  # what it refuses to run it does not write either
            data["operation"]["unwritable"] = str(error)
            text = _script(data, dialect)
        for name, content in (
            (FACTS, json.dumps(data, indent=1, allow_nan=False) + "\n"),
            (SCRIPT, text),
        ):
            with open(os.path.join(beside, name), "x", encoding="utf-8", newline="\n") as file:
                file.write(content)
        os.chmod(beside, 0o777 & ~_umask())
        if os.path.isdir(folder):
            os.rmdir(folder)
        os.rename(beside, folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def load(folder: str) -> Bundle:
    """Read a bundle, and believe nothing in it: nothing of it is run here.

    Raises:
        BundleError: If it is none, or was changed.
        ImportError: If its framework is not installed.
    """
    data = _facts(folder)
    try:
        with open(os.path.join(folder, TENSORS), "rb") as file:
            content = file.read()
        with open(os.path.join(folder, SCRIPT), encoding="utf-8") as file:
            lying = file.read()
        if hashlib.sha256(content).hexdigest() != data["sha256"]:
            refuse(f"{TENSORS} is not the file that {FACTS} was written with")
        _match(os.path.join(folder, TENSORS), data["tensors"], dialect_of(data["framework"]))
    except (OSError, UnicodeDecodeError) as error:
        refuse(f"{getattr(error, 'filename', None) or SCRIPT} cannot be read: {reason(error)}")
    text = _script(data, dialect_of(data["framework"]))
    if lying != text:
        by = data["versions"].get("anynan")
        other = f" (it is of anynan {by}, this is {__version__})" if by != __version__ else ""
        refuse(f"{SCRIPT} is not what {FACTS} makes{other}: read it, and run it yourself if at all")
    return Bundle(
        Event.from_dict(data["event"]), _call(data), data["framework"], data["versions"],
        data["left_out"], data["notes"], text, content,
    )  # fmt: skip


def _facts(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, FACTS)
    try:
        if os.path.getsize(path) > _LARGEST:
            refuse(f"{FACTS} is too large to be one")
        with open(path, encoding="utf-8") as file:
            data = json.load(file, parse_constant=lambda _: refuse(f"{FACTS} is no strict JSON"))
    except OSError as error:
        refuse(f"no bundle: {FACTS} cannot be read: {error.strerror}")
    except BundleError:
        raise
    except (ValueError, RecursionError) as error:
        refuse(f"{FACTS} is no JSON: {reason(error)}")
    if type(data) is not dict or data.get("format") != FORMAT:
        refuse(f"{FACTS} is of something else")
    if data.get("version") != VERSION:
        refuse(f"it is of version {str(data.get('version'))[:20]}, and this reads {VERSION}")
    if set(data) != set(_FIELDS) or any(type(data[k]) is not kind for k, kind in _FIELDS.items()):
        refuse(f"{FACTS} has other fields than expected")
    if any(type(x) is not str for x in (*data["versions"].values(), *data["notes"])):
        refuse("its versions or notes are no text")
    for item in data["left_out"]:
        if type(item) is not dict or set(item) != {"name", "dtype", "shape", "why"}:
            refuse("its list of what is left out has another form than expected")
    checked: dict[str, Any] = data
    return checked


def _match(path: str, told: Mapping[str, Any], dialect: Dialect) -> None:
    """Compare the tensor file's own header with what the facts tell of it."""
    try:
        whole = (item for item in listed(path) if not str(item.note).startswith("cut off"))
        found = {item.name: (item.dtype, item.shape) for item in whole}
    except (UnreadableError, ValueError, KeyError, TypeError) as error:
        refuse(f"{TENSORS} is no safetensors file: {reason(error)}")
    wanted = {
        name: stored(dtype, shape, bits=dialect.bits)
        for name, (dtype, shape) in _told(told).items()
    }
    if found != wanted:
        refuse(f"{TENSORS} holds other tensors than {FACTS} tells")


def _told(told: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    found = {}
    for name, said in told.items():
        whole = type(said) is dict and set(said) == {"dtype", "shape"}
        known = whole and type(said["dtype"]) is str and keepable(said["dtype"])
        shape = said["shape"] if known else None
        if type(shape) is not list or any(type(n) is not int or n < 0 for n in shape):
            refuse("its list of tensors has another form than expected")
        found[name] = said["dtype"], tuple(shape)
    return found


def _script(data: Mapping[str, Any], dialect: Dialect) -> str:
    try:
        event = Event.from_dict(data["event"])
        call, tensors = _call(data), _told(data["tensors"])
        return script(dialect, event, call, tensors, data["versions"], data["device"])
    except BundleError:
        raise
    except Exception as error:  # noqa: BLE001  whatever an event of somebody else's is made of
        return str(refuse(f"its event is none: {reason(error)}"))


def _call(data: Mapping[str, Any]) -> Call | None:
    return call_of(data["operation"]) if data["operation"] else None


def _device(event: Event) -> str:
    operation = event.operation
    summary = event.summary if operation is None else operation.output
    name = "" if summary is None else summary.device.partition(":")[0].lower()
    return name if name in ("cuda", "mps", "xpu") else "cpu"


def _versions(framework: str) -> dict[str, str]:
    found = {str(name): str(text) for name, text in versions(framework).items()}
    return {**found, "on": f"{platform.system()} {platform.machine()}".strip()}


def _hash(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _at_home(value: Any) -> Any:
    """Write ``~`` for the user's home, which is nobody else's affair."""
    home = os.path.expanduser("~").rstrip(os.sep)
    text = json.dumps(value)
    if len(home) > 1:
        text = text.replace(json.dumps(home + os.sep)[1:-1], json.dumps("~" + os.sep)[1:-1])
    return json.loads(text)
