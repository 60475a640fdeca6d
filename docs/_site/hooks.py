"""What `mkdocs.yml` cannot say: notebooks, figures outside docs/, formulas, no remote requests."""

from __future__ import annotations

import base64
import html
import html.parser
import json
import pathlib
import re
from typing import Any

import latex2mathml.converter
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = pathlib.Path(__file__).parents[2]
# Links of pages to files of the project that are not in docs/, as GitHub resolves them.
OUTSIDE = re.compile(r"(\]\()\.\./([\w/.-]+\.png\))")


# Links to notebooks, which become pages.
NOTEBOOK = re.compile(r"(\]\([\w/.-]*)\.ipynb\)")


def page_of_notebook(path: pathlib.Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and the figures among its outputs by file name."""
    parts, images = [], {}
    for number, cell in enumerate(json.loads(path.read_text("utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(f"```{{.text .output}}\n{''.join(output['text'])}```")
            else:
                name = f"{path.stem}-{number}.png"
                images[name] = base64.b64decode(output["data"]["image/png"])
                parts.append(f"![What the program drew]({name})")
    parts.append(f'This page is a <a href="{path.name}" download>notebook</a>.')
    return "\n\n".join(parts), images


def on_files(files: Files, config: Any) -> Files:
    """Adds the notebooks as pages and to download, and the figures that lie in other folders."""
    for path in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")):
        markdown, images = page_of_notebook(path)
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=markdown))
        for name, content in {**images, path.name: path.read_bytes()}.items():
            old = files.get_file_from_path(f"tutorials/{name}")
            if old is not None:
                files.remove(old)
            added = File.generated(config, f"tutorials/{name}", content=content)
            added.inclusion = InclusionLevel.INCLUDED
            files.append(added)
    for page in list(files.documentation_pages()):
        for _, path in OUTSIDE.findall(page.content_string):
            name = path.rstrip(")")
            if f"project/{name}" not in files.src_uris:
                content = (ROOT / name).read_bytes()
                files.append(File.generated(config, f"project/{name}", content=content))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Points links to these figures and to notebooks at what they have become."""
    return NOTEBOOK.sub(r"\1.md)", OUTSIDE.sub(r"\1project/\2", markdown))


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
