"""docs/cheat_sheet.pdf, printed from its Markdown by Chromium: two sides of A4, landscape.

The PDF's title ends with a fingerprint of the source, so that a stale one is found without a
browser.
"""

import re
import subprocess
import tempfile
from pathlib import Path

from workshop.versions import ROOT

SOURCE = ROOT / "docs" / "cheat_sheet.md"
STYLE = """
@page { size: A4 landscape; margin: 7mm }
body { font: 8.5pt/1.22 "DejaVu Sans", Arial, sans-serif; margin: 0 }
h2 { font-size: 11pt; margin: 0 0 1.5mm }
section + section { break-before: page }
section:first-of-type { columns: 2; column-gap: 6mm }
section:first-of-type h2 { column-span: all }
p { margin: 0 0 1.5mm }
table { border-collapse: collapse; width: 100%; margin-bottom: 2mm; break-inside: avoid }
th, td { border: 0.2mm solid #999; padding: 0.6mm 1mm; text-align: left; vertical-align: top }
th { background: #e8eef4 }
code { font: 7.8pt "DejaVu Sans Mono", monospace }
code i { font-style: normal; white-space: nowrap }
"""


def html(title: str) -> str:
    """The page to print: a section a side, without the heading and links."""
    from markdown_it import MarkdownIt

    text = MarkdownIt("commonmark").enable("table").render(SOURCE.read_text(encoding="utf-8"))
    whole_words = re.sub("<code>(.*?)</code>", lambda m: _whole_words(m[1]), text)
    _, *sides = re.split("(?=<h2>)", re.sub("</?a[^>]*>", "", whole_words))
    body = "".join(f"<section>{side}</section>" for side in sides)
    head = f"<meta charset='utf-8'><title>{title}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>"


def _whole_words(command: str) -> str:
    """A command that is broken between two words alone, not at a hyphen."""
    words = " ".join(f"<i>{word}</i>" for word in command.split(" "))
    return f"<code>{words}</code>"


def write(path: Path, title: str, browser: list[str]) -> None:
    """Prints it to a PDF of this title."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        page.write_text(html(title), encoding="utf-8")
        own = (f"--user-data-dir={folder}/profile", "--no-pdf-header-footer")
        subprocess.run([*browser, *own, f"--print-to-pdf={path}", page.as_uri()], check=True,
                       capture_output=True)  # fmt: skip
