"""The pages of the documentation are short, their sentences too, and a reader can find each."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import anynan
from anynan._base.messages import known

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
LINES = 200
WORDS = 25
FENCE = re.compile(r"^(```|~~~).*?^\1$", re.MULTILINE | re.DOTALL)
# A paragraph, a point of a list, a heading, a row of a table or a definition.
BLOCK = re.compile(r"\n\s*\n|\n(?=\s*[-*] |\s*\d+\. |#|\||: )")


def sentences(page: str) -> list[str]:
    """Find the sentences of the running text: code, tables and headings are none."""
    text = re.sub(r"<!--.*?-->|<[^>]+>", "", FENCE.sub("\n\n", page), flags=re.DOTALL)
    found: list[str] = []
    for block in map(str.strip, BLOCK.split(text)):
        if not block or block[0] in "#|":
            continue
        plain = re.sub(r"\]\([^)]*\)", "]", block)  # the words of a link, not its address
        plain = re.sub(r"`[^`]*`", "code", plain)
        plain = re.sub(r"^(?:[-*:]|\d+\.) ", "", plain)
        found += re.split(r"(?<=[.!?])(?:\*\*)?\s+", " ".join(plain.split()))
    return [sentence for sentence in found if len(sentence.split()) > 1]


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_page_is_short_and_so_are_its_sentences(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    words = [len(sentence.split()) for sentence in sentences(text)]
    assert len(text.splitlines()) <= LINES
    assert sum(words) <= WORDS * len(words)


# Readers had to read these twice. Say who does what: "anynan names the line".
STUMBLES = re.compile(
    r"\b(?:(?:is|are|was|were|be|being) (?:only )?(?:told|said|meant|noted)|said of|tells? of"
    r"|told (?:of|in|as|by|at)|looked at|put down to|in the place of|all the same|c[ao]mes? of"
    r"|goes on|go on with|what (?:it|they|one) holds?|doors?|by way of)\b"
)
# Kept for those who work on anynan; the rest is for users.
INSIDE = {
    *("decisions.md", "defects.md", "proof.md", "proof-scripts.md", "proof-which.md"),
    *("releasing.md", "versions.md"),
}


def _for_users() -> Iterator[tuple[str, str]]:
    """Walk what a user reads, by where it is: pages, messages, docstrings of public names."""
    for page in PAGES:
        if page.name not in INSIDE:
            yield _name(page), FENCE.sub("", page.read_text(encoding="utf-8"))
    yield from known().items()
    rooms = [anynan, *(importlib.import_module(f"anynan.{room}") for room in anynan._ROOMS)]
    for room in rooms:
        for name in getattr(room, "__all__", ()):
            yield name, inspect.getdoc(getattr(room, name)) or ""


def test_nothing_that_a_user_reads_has_a_phrase_that_readers_stumbled_over() -> None:
    found = [
        f"{where}: {text[max(match.start() - 40, 0) : match.end() + 20]}"
        for where, text in _for_users()
        for match in STUMBLES.finditer(text)
    ]
    assert found == []
    assert STUMBLES.search("it is told down to the line")


def test_the_glossary_has_words_that_users_meet() -> None:
    page = (DOCS / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^(\S.*)\n: ", page, re.MULTILINE)
    pages = [x.read_text(encoding="utf-8") for x in PAGES if x.name not in (*INSIDE, "glossary.md")]
    read = "\n".join(pages).lower()
    assert len(terms) > 20
    assert [t for term in terms for t in term.lower().split(", ") if t not in read] == []


def test_long_sentences_are_seen() -> None:
    page = "# Title\n\nOne two. Three four\nfive!\n\n- `a b c` is [it](there)\n\n```\nno\n```\n"
    assert sentences(page) == ["One two.", "Three four five!", "code is [it]"]


def test_each_page_is_in_one_place_of_the_table_of_contents() -> None:
    listed: list[str] = []
    for page in DOCS.rglob("*.md"):
        for tree in re.findall(r"```\{toctree\}\n([^`]*)```", page.read_text(encoding="utf-8")):
            listed += tree.split("\n\n", 1)[1].split()
    pages = [page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted(set(pages) - {"index"})


def test_each_framework_begins_with_its_limits() -> None:
    for page in (DOCS / "frameworks").glob("*.md"):
        headings = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert headings[0] == "Known limits", page.name


def test_the_changelog_of_the_first_release_is_at_most_60_lines() -> None:
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 60
