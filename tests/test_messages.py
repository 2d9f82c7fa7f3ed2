"""Every warning and every note has a name, which silences it and has its place in the docs."""

import ast
import re
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anynan
from anynan import Advanced
from anynan._base.messages import Message, known, slug_of

DOCS = Path(__file__).parents[1] / "docs"
FILLED = re.compile(r"\{\w+[^}]*\}")  # where a message takes a value


@pytest.mark.skipif(not DOCS.exists(), reason="not a checkout")
def test_every_message_has_its_paragraph_which_quotes_it_and_every_paragraph_its_message() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in DOCS.glob("messages*.md"))
    assert known().keys() == set(re.findall(r"^### ([a-z-]+)$", pages, re.MULTILINE))
    quoted = dict(re.findall(r"^### ([a-z-]+)\n\n> (.*)$", pages, re.MULTILINE))
    for slug, text in known().items():
        said = text.removeprefix("anynan: ").replace("{{", "\0").replace("}}", "\1")
        plain = (part.replace("\0", "{").replace("\1", "}") for part in FILLED.split(said))
        assert re.fullmatch("(anynan: )?" + ".*".join(map(re.escape, plain)), quoted[slug]), slug


def test_a_name_stands_for_one_text() -> None:
    Message("unlooked", known()["unlooked"])
    with pytest.raises(ValueError, match="two messages have the name 'unlooked'"):
        Message("unlooked", "another text")


def test_a_message_ends_in_its_name_and_one_inside_of_it_loses_its_own() -> None:
    inner = Message("test-only-inner", "{n} were lost")(n=2)
    assert (inner, slug_of(inner)) == ("2 were lost [test-only-inner]", "test-only-inner")
    outer = Message("test-only-outer", "no replay: {why}")(why=inner)
    assert outer == "no replay: 2 were lost [test-only-outer]"


def test_an_ignored_warning_is_neither_said_nor_listed() -> None:
    def gave(ignore: tuple[str, ...]) -> tuple[list[str], tuple[str, ...]]:
        step = anynan.track(np.exp, advanced=Advanced(ignore=ignore))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step(np.ma.masked_array([1.0]))
        return [slug_of(str(w.message)) for w in found], tuple(map(slug_of, step.notes))

    assert gave(()) == (["argument-opaque"], ("argument-opaque",))
    assert gave(("argument-opaque",)) == ([], ())
    assert gave(("layer-unwatched",)) == gave(())


def test_a_name_that_no_message_has_is_an_error_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="no message is named 'plain-arrays'; .* 'plain-array'"):
        Advanced(ignore="plain-arrays")
    with pytest.raises(TypeError, match="ignore= takes names of messages, not int: 3"):
        Advanced(ignore=3)  # type: ignore[arg-type]
    assert Advanced(ignore="stale-graph").ignore == ("stale-graph",)  # of a framework not loaded


def _unnamed(node: ast.AST, texts: Collection[str] = ()) -> bool:
    """Tell whether an expression is a text that no message gives."""
    match node:
        case ast.Constant(value=str(text)):
            return bool(text)
        case ast.JoinedStr():
            calls = [x.func for x in ast.walk(node) if isinstance(x, ast.Call)]
            return not any(ast.unparse(call).rpartition(".")[2].isupper() for call in calls)
        case ast.Name(id=name):
            return name in texts
        case ast.Call(func=ast.Attribute(value=inner, attr="format")):
            return _unnamed(inner, texts)
    return False


ADDS = (".say", ".remark", ".mention", ".add_note", "notes.append")


def _notes(tree: ast.Module) -> Iterator[ast.expr]:
    """Walk what a file adds to the notes of an event or an exception, or to those of a tracker."""
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        said = ast.unparse(node.func)
        if said == "warn" or said.endswith(ADDS):
            yield from node.args[:1]
        for key in node.keywords:
            if key.arg == "notes" and isinstance(key.value, ast.Tuple):
                yield from key.value.elts


def _texts(tree: ast.Module) -> set[str]:
    """Name what holds a text that no message gives."""
    assigned = [x for x in ast.walk(tree) if isinstance(x, ast.Assign) and _unnamed(x.value)]
    return {at.id for x in assigned for at in x.targets if isinstance(at, ast.Name)}


# Facts of a report, which nothing silences, and what only puts anynan's name before a message.
FACTS = ("also bad: ", "in batch ", "{line}; {times}", "anynan: {")


def test_no_note_is_without_a_name() -> None:
    root = Path(anynan.__file__).parent
    paths = [*root.glob("*.py"), *root.glob("_*/**/*.py"), *root.glob("[a-z]*/**/*.py")]
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = _texts(tree)
        unnamed = [ast.unparse(item) for item in _notes(tree) if _unnamed(item, texts)]
        assert all(said[1:].strip("'\"").startswith(FACTS) for said in unnamed), (path, unnamed)


def test_a_command_leaves_out_the_notes_that_are_ignored(tmp_path: Path, command: Any) -> None:
    np.save(tmp_path / "x.npy", np.asfortranarray(np.ones((2, 3))))
    assert command("scan", tmp_path)[1].endswith("[transposed]\n")
    assert "[transposed]" not in command("scan", "--ignore", "transposed", tmp_path)[1]
    assert "the nearest is 'transposed'" in command("scan", "--ignore", "transpose", tmp_path)[2]
