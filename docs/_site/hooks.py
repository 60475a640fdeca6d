"""What `mkdocs.yml` cannot say: figures outside docs/, formulas, no requests to other hosts."""

from __future__ import annotations

import html
import html.parser
import pathlib
import re
from typing import Any

import latex2mathml.converter
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parents[2]
# Links of pages to files of the project that are not in docs/, as GitHub resolves them.
OUTSIDE = re.compile(r"(\]\()\.\./([\w/.-]+\.png\))")


def on_files(files: Files, config: Any) -> Files:
    """Adds the figures that pages show from other folders."""
    for page in list(files.documentation_pages()):
        for _, path in OUTSIDE.findall(pathlib.Path(page.abs_src_path).read_text("utf-8")):
            name = path.rstrip(")")
            if f"project/{name}" not in files.src_uris:
                content = (ROOT / name).read_bytes()
                files.append(File.generated(config, f"project/{name}", content=content))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Points links to these figures at their copies."""
    return OUTSIDE.sub(r"\1project/\2", markdown)


def on_page_content(content: str, **kwargs: Any) -> str:
    r"""Turns what `pymdownx.arithmatex` marked as `\(...\)` and `\[...\]` into MathML."""

    def formula(found: re.Match[str]) -> str:
        latex = html.unescape(found["latex"])
        block = found["open"] == r"\["
        return latex2mathml.converter.convert(latex, display="block" if block else "inline")

    pattern = r'<(span|div) class="arithmatex">(?P<open>\\[(\[])(?P<latex>.*?)\\[)\]]</\1>'
    return re.sub(pattern, formula, content, flags=re.S)


class Loads(html.parser.HTMLParser):
    """Collects the addresses that a browser fetches by itself when it opens a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Of a link only what it loads counts: stylesheets and icons, not where it leads."""
        of = {name: value or "" for name, value in attrs}
        loads = {"link": "href"}.get(tag, "src")
        if loads in of and not (tag == "link" and of.get("rel") in ("canonical", "prev", "next")):
            self.addresses.append(of[loads])


def on_post_build(config: Any) -> None:
    """Fails if a page would load something from another host, which would tell it who reads."""
    site = pathlib.Path(config["site_dir"])
    for page in sorted(site.rglob("*.html")):
        parser = Loads()
        parser.feed(page.read_text("utf-8"))
        remote = [a for a in parser.addresses if re.match(r"(?:\w+:)?//", a)]
        if remote:
            raise PluginError(f"{page.relative_to(site)} loads from other hosts: {remote}")
    fetched = re.compile(r"url\(['\"]?(?:https?:)?//[^)]+|@import[^;]+//[^;]+")
    for sheet in sorted(site.rglob("*.css")):
        remote = fetched.findall(sheet.read_text("utf-8"))
        if remote:
            raise PluginError(f"{sheet.relative_to(site)} loads from other hosts: {remote}")
