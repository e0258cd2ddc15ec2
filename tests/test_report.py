"""The HTML page of an analysis: self-contained, well-formed, the same numbers and bytes each time."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hybridstate import api
from hybridstate.cli.main import app
from hybridstate.figures import figure_names
from hybridstate.report import REPORT_FILE, PageTable, analysis_page

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Checks nesting, collects references and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.alternatives: list[str | None] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        named = dict(attrs)
        self.references += [str(named[k]) for k in ("src", "href") if named.get(k)]
        self.ids += [str(named["id"])] if named.get("id") else []
        if tag == "img":
            self.alternatives.append(named.get("alt"))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.mark.parametrize("model", ["tiny_gdn", "tiny_kda"])
def test_report_is_one_page_that_asks_for_nothing(
    tmp_path: Path, model: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(model)
    options = ("--tp", "2", "--balance", "hybrid", "--budget", "1MiB", "--concurrency", "2")
    made = run("analyze", folder, *options, "--report", tmp_path / "r", "--json")
    assert made.exit_code == 0, made.output
    document = json.loads(made.stdout)
    assert document["result"]["report"] == str(tmp_path / "r" / REPORT_FILE)
    assert [p.name for p in (tmp_path / "r").iterdir()] == [REPORT_FILE]
    text = (tmp_path / "r" / REPORT_FILE).read_text()
    page = Page(text)
    assert "http" not in text
    assert "<script" not in text
    inner = [r for r in page.references if r.startswith("#")]
    images = [r for r in page.references if r.startswith("data:image/png;base64,")]
    assert len(inner) + len(images) == len(page.references)
    assert {r[1:] for r in inner} == set(page.ids)
    unit = document["result"]["model"]["unit"]
    assert len(images) == len(figure_names(unit, 2)) == len(page.alternatives)
    assert all(page.alternatives)
    for cutoff in document["result"]["cutoffs"]:
        assert f"{cutoff['ragged_bytes']:,}" in page.words
    for state in document["result"]["capacity"]["states"]:
        assert f"{state['full_bytes']:,}" in page.words


def test_two_pages_are_equal_to_the_byte_and_escape_what_they_show(tiny_kda: Path) -> None:
    analysis = api.analyze(tiny_kda)
    table = PageTable("a < b", ("<i>",), (("&",),), "x > y", (False,))
    pages = [analysis_page(analysis, [table, "1 < 2"], warnings=["<b>"]) for _ in range(2)]
    assert pages[0] == pages[1]
    for text in ("a &lt; b", "&lt;i&gt;", ">&amp;<", "x &gt; y", "1 &lt; 2", "&lt;b&gt;"):
        assert text in pages[0]
    Page(pages[0])


def test_report_folder_is_checked_before_the_work(tmp_path: Path, tiny_kda: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine")
    assert run("analyze", tiny_kda, "--report", taken).exit_code == 2
    assert [p.name for p in taken.iterdir()] == ["mine.txt"]
    dry = run("analyze", tiny_kda, "--report", tmp_path / "r", "--dry-run", "--json")
    assert json.loads(dry.stdout)["result"]["writes"] == [str(tmp_path / "r" / REPORT_FILE)]
    assert not (tmp_path / "r").exists()
