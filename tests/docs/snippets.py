"""The python snippets of the pages: finds them, runs them, compares or rewrites the output block behind each.

A snippet is a block fenced as `python`. A block fenced as `text` right behind it holds what the snippet prints; when it
ends with an exception, its class and message stand there last, as at the end of a traceback. A snippet without such a
block must run to its end and may print nothing. Each snippet runs alone, in a namespace of its own, as a file named
`example.py`.

`python tests/docs/snippets.py [PAGE ...]` runs the snippets of the pages and rewrites the output blocks that are there.
"""

import contextlib
import gc
import io
import linecache
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PAGES = [
    PROJECT / "README.md",
    PROJECT / "CHANGELOG.md",
    *sorted((PROJECT / "docs").glob("*.md")),
    PROJECT / "torch_remat" / "runtime" / "README.md",
]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$(?:\s*^```text\n(?P<output>.*?)^```$)?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """One `python` block.

    Attributes:
        page: path relative to the project.
        line: of the opening fence in the page.
        code: the block's content.
        output: what the block behind it says; None where there is none.
    """

    page: str
    line: int
    code: str
    output: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets_of(path: Path) -> list[Snippet]:
    """The snippets of a page, in order."""
    text = path.read_text(encoding="utf-8")
    page = str(path.relative_to(PROJECT))
    return [
        Snippet(page, text.count("\n", 0, match.start()) + 1, match["code"], match["output"])
        for match in BLOCK.finditer(text)
    ]


def run(snippet: Snippet) -> tuple[str, bool]:
    """What `snippet` prints, an exception's last words included; whether it ended without one."""
    gc.collect()  # what an earlier snippet has left is not to be in this one's reports
    if "torch._dynamo.eval_frame" in sys.modules:  # and what it has compiled is not to change what this one does
        sys.modules["torch._dynamo"].reset()
    namespace = {"__name__": "example"}
    printed = io.StringIO()
    name = "example.py"
    linecache.cache[name] = (len(snippet.code), None, snippet.code.splitlines(keepends=True), name)
    ended = True
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(snippet.code, name, "exec"), namespace)
        except Exception as error:  # noqa: BLE001 - whatever it raises is what it shows
            ended = False
            print("".join(traceback.format_exception_only(error)), end="")
    linecache.cache.pop(name, None)
    # An output without a backward holds its body, whose globals hold the output: a circle through autograd's graph,
    # which no garbage collector follows.
    namespace.clear()
    return "".join(line.rstrip() + "\n" for line in printed.getvalue().splitlines()), ended


def rewrite(path: Path) -> int:
    """Put what the snippets of a page print into the output blocks that are there; returns how many changed."""
    text = path.read_text(encoding="utf-8")
    changed = 0
    for snippet, match in reversed(list(zip(snippets_of(path), BLOCK.finditer(text), strict=True))):
        printed, ended = run(snippet)
        if snippet.output is None:
            if printed or not ended:
                print(f"{snippet} has no output block and prints:\n{printed}")
        elif snippet.output != printed:
            text = text[: match.start("output")] + printed + text[match.end("output") :]
            changed += 1
    if changed:
        path.write_text(text, encoding="utf-8")
    return changed


if __name__ == "__main__":
    sys.path.insert(0, str(PROJECT))
    for page in [Path(argument).resolve() for argument in sys.argv[1:]] or PAGES:
        if page.exists():
            print(f"{page.relative_to(PROJECT)}: {rewrite(page)} output blocks rewritten")
