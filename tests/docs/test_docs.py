"""The pages are true: snippets print what the pages say, links lead somewhere, what is named exists."""

import re
from pathlib import Path

import pytest
from snippets import PAGES, PROJECT, Snippet, run, snippets_of

import torch_remat

SNIPPETS = [snippet for page in PAGES if page.exists() for snippet in snippets_of(page)]
EXISTING = [page for page in PAGES if page.exists()]


def by_page(page: Path) -> str:
    return str(page.relative_to(PROJECT))


@pytest.mark.parametrize("snippet", SNIPPETS, ids=str)
def test_snippet(snippet: Snippet):
    printed, ended = run(snippet)
    if snippet.output is None:
        assert ended, f"{snippet} raises:\n{printed}"
        assert printed == "", f"{snippet} prints and shows no output block"
    else:
        assert printed == snippet.output


@pytest.mark.parametrize("page", EXISTING, ids=by_page)
def test_every_link_leads_to_a_file_and_a_heading(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_blocks(page.read_text(encoding="utf-8"))):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{by_page(page)}: {target}"
        if anchor:
            assert anchor in _anchors(file), f"{by_page(page)}: {target}"


@pytest.mark.parametrize("page", EXISTING, ids=by_page)
def test_every_block_names_its_language(page: Path):
    fences = re.findall(r"^```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) % 2 == 0
    assert set(fences[::2]) <= {"python", "text", "console", "toml"}
    assert set(fences[1::2]) <= {""}


def test_readme_links_every_page():
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    for page in (PROJECT / "docs").glob("*.md"):
        assert f"(docs/{page.name})" in text, page.name


def test_readme_overhead_table_is_that_of_the_benchmarks():
    """Each case with its ratio stands in the page on the benchmarks as well."""
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    rows = _rows(readme.partition("<!-- overhead-table -->")[2].partition("<!-- /overhead-table -->")[0])
    measured = {(row[0], row[2]) for row in _rows((PROJECT / "docs" / "benchmarks.md").read_text(encoding="utf-8"))}
    assert len(rows) > 5
    assert {(row[0], row[1]) for row in rows[1:]} <= measured


def test_readme_quick_start_is_short_and_declares_nothing():
    first = snippets_of(PROJECT / "README.md")[0]
    assert len(first.code.splitlines()) <= 15
    assert first.output
    assert "recompute_needs_tensor" not in first.code


def test_trees_name_what_exists_and_every_module_of_the_runtime():
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    paths = _tree(readme)
    assert len(paths) > 10
    for path in paths:
        assert (PROJECT / path).exists(), path
    runtime = (PROJECT / "torch_remat" / "runtime" / "README.md").read_text(encoding="utf-8")
    for module in (PROJECT / "torch_remat").rglob("*.py"):
        if module.parent.name == "runtime":
            assert module.name == "__init__.py" or f"`{module.name}`" in runtime, module.name
        elif module.name != "__init__.py":
            assert str(module.relative_to(PROJECT)) in paths, module.name


def test_every_error_class_has_its_section():
    text = (PROJECT / "docs" / "errors.md").read_text(encoding="utf-8")
    for name in torch_remat.errors.__all__:
        if name.endswith("Error"):
            assert re.search(rf"^#+ .*\b{name}\b", text, re.MULTILINE), name


def test_every_public_name_is_explained_in_some_page():
    text = "".join(page.read_text(encoding="utf-8") for page in EXISTING)
    for name in torch_remat.__all__:
        assert f"`{name}" in text or f"remat.{name}" in text, name


def test_every_feature_tested_binding_says_what_is_lost_without_it():
    page = (PROJECT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in (PROJECT / "torch_remat").rglob("*.py"))
    tested = set(re.findall(r"getattr\(\s*(?:torch\._C[\w.]*|_engine),\s*\"(\w+)\"", sources))
    assert len(tested) > 4
    table = page.partition("| binding |")[2].partition("\n\n")[0]
    assert tested == set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


def test_a_wrong_output_block_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("snippets.PROJECT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n\n```python\nraise ValueError('no')\n```\n")
    first, second = snippets_of(page)
    assert (first.line, first.output, run(first)) == (1, "3\n", ("2\n", True))
    assert (second.output, run(second)) == (None, ("ValueError: no\n", False))


def _without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def _rows(text: str) -> list[list[str]]:
    """The cells of the lines of tables, but for the line under a heading."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|") and "--" not in line]
    return [[cell.strip() for cell in line] + [""] * 3 for line in lines]


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _without_blocks(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _tree(text: str) -> list[str]:
    """The paths in the first block that draws a tree: two or four spaces a level, a folder ends with a slash."""
    block = re.search(r"^```text\n(torch_remat/.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert block, "the README draws no tree"
    folders: list[str] = []
    found = []
    for line in block[1].splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 4
        folders = folders[:depth]
        found.append("".join(folders) + name)
        if name.endswith("/"):
            folders.append(name)
    return found
