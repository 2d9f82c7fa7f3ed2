"""The pages of the documentation are short, their sentences too, and a reader can find each."""

import re
from pathlib import Path

import pytest

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
def test_a_page_is_at_most_200_lines(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= LINES


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_the_sentences_of_a_page_are_short(page: Path) -> None:
    words = [len(sentence.split()) for sentence in sentences(page.read_text(encoding="utf-8"))]
    assert sum(words) <= WORDS * len(words)


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


def test_how_it_works_takes_five_minutes() -> None:
    text = FENCE.sub("", (DOCS / "how-it-works.md").read_text(encoding="utf-8"))
    assert len(text.split()) <= 900
