"""The site: its navigation has every page, its reference every public name, and figures are those of the suites."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import lightning_recsys
from lightning_recsys import errors

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGES = [x.name for x in pkgutil.walk_packages(lightning_recsys.__path__, "lightning_recsys.") if x.ispkg]
IN_REFERENCE = [
    name
    for page in sorted((DOCS / "reference").glob("*.md"))
    for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
]


def pages_of(navigation: Any) -> list[str]:
    """The pages that a navigation names, in its order."""
    if isinstance(navigation, str):
        return [navigation]
    inner = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for each in inner for page in pages_of(each)]


def test_navigation_then_every_page_has_one_place():
    navigation = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    assert [*navigation[0]] == ["Home"]
    assert [name for group in navigation[1:] for name in group] == ["Tutorials", "How-to", "Reference", "Explanation"]
    assert sorted(pages_of(navigation)) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def shown(name: str) -> Any:
    """What the reference shows under a name; where a file has the name as well, the file."""
    path = ROOT / name.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").exists():
        return None
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def test_public_names_then_the_reference_has_each_and_no_other():
    public = [
        f"{package}.{x}" for package in PACKAGES for x in getattr(importlib.import_module(package), "__all__", ())
    ]
    public += [f"lightning_recsys.errors.{x}" for x, y in vars(errors).items() if inspect.isclass(y)]
    values = {
        name: getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in public
    }
    reference = [shown(name) for name in IN_REFERENCE]
    missing = [name for name in public if not any(values[name] is x for x in reference)]
    assert missing == [], (
        "write `::: NAME` on the room's page in docs/reference, or `::: ROOM.FILE.NAME` where the file is called so too"
    )
    known = [*values.values()]
    assert [name for name, x in zip(IN_REFERENCE, reference, strict=True) if not any(x is y for y in known)] == []
    assert len(IN_REFERENCE) == len({*IN_REFERENCE})


BENCHMARKS = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
FIGURES = re.findall(r"^\| (.*) \| (.*) \| \[(\w+)\]\(results/\3\.md\) \|$", BENCHMARKS, flags=re.MULTILINE)


def result(suite: str) -> str:
    return (DOCS / "results" / f"{suite}.md").read_text(encoding="utf-8")


def numbers(text: str) -> set[str]:
    """Those with a decimal point or a comma, which are measured."""
    return set(re.findall(r"\d+[.,]\d+", text))


def test_figures_then_there_are_ten_and_their_suites_measured_them():
    assert len(FIGURES) == 10
    for about, figure, suite in FIGURES:
        assert numbers(figure), figure
        assert numbers(about) | numbers(figure) <= numbers(result(suite)), (
            f"{figure} is not what suite={suite} has measured"
        )


def test_bars_when_they_are_missed_then_the_page_says_where():
    (said,) = re.findall(r"^Bars are missed at present .*?\n\n", BENCHMARKS, flags=re.DOTALL | re.MULTILINE)
    missed = {page.stem for page in (DOCS / "results").glob("*.md") if "| FAIL |" in page.read_text(encoding="utf-8")}
    assert set(re.findall(r"results/(\w+)\.md", said)) == missed


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_first_page_then_its_figures_are_those_of_the_suite(page):
    (said,) = re.findall(
        r"^On one thread .*?\n\n", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    assert numbers(said)
    assert numbers(said) <= numbers(result("single"))


DRAWINGS = ["strategies", "steps", "slow-links", "shadowsync", "het", "hierarchical", "async_ps", "des"]


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawing_then_light_and_dark_differ_in_colours_alone(name):
    light, dark = ((DOCS / "images" / f"{name}-{look}.svg").read_text(encoding="utf-8") for look in ("light", "dark"))
    assert light != dark
    assert re.sub(r"#\w{6}", "", light) == re.sub(r"#\w{6}", "", dark)


@pytest.mark.parametrize(("name", "suite"), [("steps", "single"), ("slow-links", "het")])
def test_chart_then_its_figures_are_those_of_the_suite_and_bars_are_as_long(name, suite):
    chart = (DOCS / "images" / f"{name}-light.svg").read_text(encoding="utf-8")
    bars = re.findall(r'width="([\d.]+)" height="28".*\n<text class="value"[^>]*>([\d,]+)<', chart)
    assert len(bars) >= 6
    page = set(re.findall(r"[\d,]+", result(suite)))
    scale = float(bars[0][0]) / int(bars[0][1].replace(",", ""))
    for width, figure in bars:
        assert figure in page
        assert float(width) == pytest.approx(scale * int(figure.replace(",", "")), abs=0.1)


@pytest.fixture
def as_markdown(monkeypatch):
    pytest.importorskip("griffe")
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "site"))
    yield importlib.import_module("docstrings_as_markdown").as_markdown
    sys.modules.pop("docstrings_as_markdown")


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("One :math:`a_1` of :class:`~a.b.C`, by :meth:`go`.", "One $a_1$ of `C`, by `go`."),
        ("Rule.\n\n.. math:: a \\\\\n    b\n\nEnd.", "Rule.\n\n\n$$\na \\\\ b\n$$\n\nEnd."),
        (">>> f(\n...     :x:`y`)\n1\n\nEnd.", "```pycon\n>>> f(\n...     :x:`y`)\n1\n```\n\nEnd."),
        ("As so::\n\n    code", "As so:\n\n    code"),
        ("Nothing `` of `` that.", "Nothing `` of `` that."),
    ],
)
def test_docstring_when_shown_on_the_site_then_is_markdown(as_markdown, docstring, expected):
    assert as_markdown(docstring) == expected


def test_formula_when_shown_on_the_site_then_is_mathml(monkeypatch):
    pytest.importorskip("latex2mathml")
    markdown = pytest.importorskip("markdown")
    pytest.importorskip("pymdownx")
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "site"))
    options = {"pymdownx.arithmatex": {"generic": True}}
    page = markdown.markdown(
        "| a |\n| - |\n| $x^2$ |\n\n$$\n\\frac{1}{n}\n$$",
        extensions=["tables", *options, "mathml"],
        extension_configs=options,
    )
    sys.modules.pop("mathml")
    assert page.count("<math") == 2
    assert "<msup>" in page
    assert 'display="block"' in page
    assert "\\" not in page
