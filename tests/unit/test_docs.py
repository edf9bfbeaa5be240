"""The pages' links lead somewhere: to files, to headings of them, to pictures; and every picture is shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import lightning_recsys

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "lightning_recsys", "recipes")
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md")))]


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a heading is called in links, as GitHub does it; the second of a name gets ``-1``."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} (.*)$", prose(page), flags=re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.append(re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-"))
    return {f"{name}-{found[:i].count(name)}" if name in found[:i] else name for i, name in enumerate(found)}


def links(page: Path) -> list[tuple[Path, str]]:
    """Files of this repository that a page links to, each with the heading in it."""
    targets = re.findall(r"(?:\]\(|src=\"|srcset=\")([^)\s\"]+)", prose(page))
    parts = [target.partition("#") for target in targets if not re.match(r"[a-z]+:", target)]
    return [((page.parent / name).resolve() if name else page, anchor) for name, _, anchor in parts]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_when_followed_then_file_and_heading_are_there(page):
    for target, anchor in links(page):
        assert target.exists(), f"{target} is not there"
        shows = anchor in ("gh-light-mode-only", "gh-dark-mode-only")  # the look in which GitHub and the site show it
        assert not anchor or shows or anchor in anchors(target), f"{target.name} has no heading #{anchor}"


def test_pictures_when_they_are_kept_then_a_page_shows_each():
    shown = {target for page in PAGES for target, _ in links(page)}
    kept = [*(ROOT / "docs" / "images").iterdir(), *(ROOT / "docs" / "results" / "images").iterdir()]
    assert {picture.name for picture in kept if picture not in shown} == set()


DOCS = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
LONGEST = 1500  # words of a page, without its blocks of code and its tables
NOUNS = "Of what|Of which|Of whom|What|Whatever|Whatsoever|Who|Whoever|Whose|Which|As long as"


def text_of(page: Path) -> list[str]:
    """Lines of a page without blocks of code, tables and headings."""
    return [line for line in prose(page).splitlines() if not line.lstrip().startswith(("|", "#"))]


def stands_in_for_a_noun(text: str) -> list[str]:
    """Openings of sentences by a pronoun that a reader has to look for the noun of; questions may open so."""
    starts = rf"(?:^|[.!?:]\)? |\*\* |[-*] |\d\. )[*`(]*((?:{NOUNS})\b[^.?|]*[.?|]?)"
    return [found for line in text.splitlines() for found in re.findall(starts, line) if not found.endswith("?")]


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_when_its_words_are_counted_then_it_is_not_too_long(page):
    assert sum(len(line.split()) for line in text_of(page)) <= LONGEST, "make two pages of it"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_when_they_open_then_not_with_a_word_in_place_of_a_noun(page):
    assert stands_in_for_a_noun("\n".join(text_of(page))) == [], "begin with the subject"


def test_docstrings_when_they_open_then_with_their_subject():
    opening = re.compile(r'^\s*r?"""(?:What|Of|As)\b.*', flags=re.MULTILINE)
    modules = sorted((ROOT / "lightning_recsys").rglob("*.py"))
    assert len(modules) > 100
    assert [f"{x.name}: {found.strip()}" for x in modules for found in opening.findall(x.read_text())] == []


def test_openings_when_they_stand_for_a_noun_then_found():
    assert stands_in_for_a_noun("Rows move. What is left stays.") == ["What is left stays."]
    assert stands_in_for_a_noun("* Whoever asks waits.") == ["Whoever asks waits."]
    assert stands_in_for_a_noun("What does it cost? It says what it costs.") == []


def test_readme_then_it_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_headings_when_two_have_a_name_then_the_second_is_counted(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A `b`: c\n```\n# no heading\n```\n## Runs\n## Runs\n")
    assert anchors(page) == {"a-b-c", "runs", "runs-1"}


def test_citation_then_its_version_is_the_package_s():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == lightning_recsys.__version__
    assert len(citation["references"]) == 5  # a paper for each system
