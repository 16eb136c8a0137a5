"""Every link of a page leads to a file, and to a heading of it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.S | re.M)
LISTED = subprocess.run(
    ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
).stdout.split()
PAGES = sorted(LISTED) or sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))


def anchors(page: Path) -> set[str]:
    """Headings as GitHub names them in addresses."""
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    bare = (re.sub(r"[^\w\s-]", "", heading.strip().lower()) for heading in re.findall(r"^#+\s+(.*)$", text, re.M))
    return {re.sub(r"\s", "-", heading) for heading in bare}


def broken(page: Path) -> list[str]:
    found = []
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_of(page: str) -> None:
    assert broken(ROOT / page) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`\n[a](#one-two) [b](#three) [c](gone.md) [d](https://example.org)\n```\n[e](no.md)\n```\n"
    )
    assert broken(page) == ["#three", "gone.md"]


def test_the_tour_leads_to_every_page() -> None:
    """Whatever lies under docs/ is found from README within two links."""
    seen, edge = {ROOT / "README.md"}, [ROOT / "README.md"]
    for _ in range(2):
        links = [(page, link) for page in edge for link in LINK.findall(page.read_text(encoding="utf-8"))]
        edge = [(page.parent / link.partition("#")[0]).resolve() for page, link in links if "://" not in link]
        edge = [page for page in edge if page.suffix == ".md" and page.is_file()]
        seen.update(edge)
    assert {path for path in (ROOT / "docs").rglob("*.md")} <= seen


def test_every_picture_is_shown_somewhere() -> None:
    shown = {(ROOT / page).parent.joinpath(link).resolve() for page in PAGES for link in LINK.findall(read(page))}
    pictures = set((ROOT / "docs" / "images").iterdir())
    assert pictures and pictures <= shown


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")
