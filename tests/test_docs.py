"""Every example in a docstring and every ``>>>`` block of a page runs and prints what it says."""

import doctest
import importlib
import pathlib
import pkgutil
import re

import jax
import pytest

import boostax

ROOT = pathlib.Path(__file__).resolve().parents[1]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
FENCE = re.compile(
    r"^(?P<fence>`{3,}|:{3,})[^\n]*\n(?P<code>.*?)^(?P=fence)\s*$", re.DOTALL | re.MULTILINE
)

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(boostax.__path__, "boostax.")
    if not module.name.endswith("__main__")
)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.fixture(autouse=True)
def _as_a_reader_would():
    # The suite forbids rank promotion; an example may write x @ kernel + bias.
    with jax.numpy_rank_promotion("allow"):
        yield


def run(test: doctest.DocTest) -> None:
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=report.append)
    assert result.failed == 0, "".join(report)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    module = importlib.import_module(name)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        if test.examples:
            run(test)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages(page):
    # The blocks of a page share their names, in order; other blocks are not run.
    text = page.read_text(encoding="utf-8")
    blocks = [block for block in FENCE.finditer(text) if ">>>" in block["code"]]
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        line = text.count("\n", 0, block.start("code"))
        test = doctest.DocTestParser().get_doctest(
            block["code"], names, f"{page.name}:{line}", str(page), line
        )
        report: list[str] = []
        runner = doctest.DocTestRunner(optionflags=OPTIONS)
        assert runner.run(test, out=report.append, clear_globs=False).failed == 0, "".join(report)
        names = test.globs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target or target.startswith(("#", "mailto:")):
            continue
        assert (page.parent / target.split("#")[0]).exists(), f"{page.name}: {target} is not there"


def test_every_technique_page_has_the_same_parts():
    parts = [
        "What it is",
        "How to use",
        "Details",
        "Suggested settings",
        "Measured",
        "When not to use",
        "API",
    ]
    pages = [p for p in (ROOT / "docs" / "techniques").glob("*.md") if p.name != "index.md"]
    index = (ROOT / "docs" / "techniques" / "index.md").read_text(encoding="utf-8")
    assert pages
    for page in pages:
        headings = re.findall(r"^## (.+?)\s*$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert [h for h in headings if h in parts] == parts, f"{page.name}: {headings}"
        assert re.search(rf"^{page.stem}$", index, re.MULTILINE), f"{page.stem}: not in the index"
