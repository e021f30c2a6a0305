"""The page in a real browser: nothing is cut off or lies over anything else, and all is printed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hetero.reporting.page import make_page
from tests.support.run_records import make_record

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FOUND = next((path for name in NAMES if (path := shutil.which(name))), None)

pytestmark = [
    pytest.mark.extra,
    pytest.mark.skipif(
        FOUND is None,
        reason=f"none of {', '.join(NAMES)} is installed; apt-get install chromium-headless-shell",
    ),
]

# What the page is asked for: texts of charts that leave their chart, or lie over one another, the
# page's own width, and whatever it has fetched.
PROBE = """
<script>
const out = {cut: [], over: [], broken: [], texts: 0};
for (const label of document.querySelectorAll("th")) {
  const range = document.createRange(), words = label.firstChild;
  for (const word of words.data.matchAll(/[^ ]+/g)) {
    range.setStart(words, word.index);
    range.setEnd(words, word.index + word[0].length);
    if (range.getClientRects().length > 1) out.broken.push(word[0]);
  }
}
for (const svg of document.querySelectorAll("svg")) {
  const frame = svg.getBoundingClientRect(), seen = [];
  for (const text of svg.querySelectorAll("text")) {
    const box = text.getBoundingClientRect(), words = text.textContent;
    out.texts += 1;
    if (box.left < frame.left - 1 || box.right > frame.right + 1 ||
        box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
      out.cut.push(words);
    for (const [other, its] of seen) {
      const x = Math.min(box.right, its.right) - Math.max(box.left, its.left);
      const y = Math.min(box.bottom, its.bottom) - Math.max(box.top, its.top);
      if (x > 1 && y > 0.35 * Math.min(box.height, its.height)) out.over.push([other, words]);
    }
    seen.push([words, box]);
  }
}
out.wide = document.documentElement.scrollWidth - window.innerWidth;
out.fetched = performance.getEntriesByType("resource").map(e => e.name);
document.body.innerHTML = "<pre id=found>" + btoa(unescape(encodeURIComponent(
  JSON.stringify(out)))) + "</pre>";
</script>
"""


def browse(page: Path, *options: str) -> str:
    """What the browser prints; it may look up no name on any network."""
    assert FOUND is not None
    alone = ("--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking")
    quiet = ("--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--headless", *alone)
    # Its profile, caches and sockets go where the test's files go.
    home = page.parent / "browser"
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        [FOUND, *quiet, f"--user-data-dir={home}", *options, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HOME": str(home)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def found_in(page: Path, width: int) -> dict[str, Any]:
    import base64

    text = page.read_text().replace("</body>", f"{PROBE}</body>")
    probe = page.with_name("probe.html")
    probe.write_text(text)
    dom = browse(probe, f"--window-size={width},900", "--dump-dom")
    answer = re.search(r"<pre id=\"?found\"?>([^<]+)</pre>", dom)
    assert answer is not None, dom[-2000:]
    found: dict[str, Any] = json.loads(base64.b64decode(answer[1]))
    return found


@pytest.mark.parametrize("width", [1280, 800, 420])
def test_charts_are_whole_and_texts_apart(tmp_path: Path, width: int) -> None:
    page = tmp_path / "run.html"
    page.write_text(make_page(make_record()))
    found = found_in(page, width)
    assert found["texts"] > 60
    assert found["cut"] == []
    assert found["over"] == []
    assert found["broken"] == []
    assert found["wide"] <= 0
    assert found["fetched"] == []


def test_it_prints_on_few_pages(tmp_path: Path) -> None:
    page, pdf = tmp_path / "run.html", tmp_path / "run.pdf"
    page.write_text(make_page(make_record()))
    browse(page, "--no-pdf-header-footer", f"--print-to-pdf={pdf}")
    sheets = len(re.findall(rb"/Type\s*/Page\b", pdf.read_bytes()))
    assert 2 <= sheets <= 4
