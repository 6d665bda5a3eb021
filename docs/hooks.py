"""Add to the site the files of the repository that its pages link to.

Pages link to README.md or to code by paths of the repository, so that the links also work in a
clone and on the page of the repository. These files are outside `docs`. The site gets a copy of
each file below `repository`, with Markdown files as pages, and the links refer to the copies.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside `docs` that pages link to, and the style of highlighted code."""
    style = HtmlFormatter(style="xcode").get_style_defs(".highlight")
    files.append(File.generated(config, "pygments.css", content=style))
    waiting = [file for file in files if file.is_documentation_page()]
    while waiting:
        file = waiting.pop()
        for _, link, _ in _LINK.findall(_CODE.sub("", Path(file.abs_src_path or "").read_text())):
            path = _repository_path(file.src_uri, link)
            uri = _site_path(path)
            if _is_external(link) or files.get_file_from_path(uri) or not (ROOT / path).is_file():
                continue
            added = File.generated(config, uri, abs_src_path=str(ROOT / path))
            files.append(added)
            if added.is_documentation_page():
                waiting.append(added)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the links to files of the repository by links to the copies."""
    here = page.file.src_uri

    def led(link: re.Match[str]) -> str:
        if _is_external(link[2]):
            return link[0]
        path = _site_path(_repository_path(here, link[2]))
        return f"{link[1]}{posixpath.relpath(path, posixpath.dirname(here) or '.')}{link[3]}"

    parts, end = [], 0
    for code in [*_CODE.finditer(markdown), None]:
        start = code.start() if code else len(markdown)
        parts.append(_LINK.sub(led, markdown[end:start]))
        if code:
            parts.append(code[0])
            end = code.end()
    return "".join(parts)


def _is_external(link: str) -> bool:
    return re.match(r"[a-z]+:", link) is not None


def _repository_path(page: str, link: str) -> str:
    """Return the path in the repository that a link of a page means."""
    in_repository = page.removeprefix("repository/")
    source = in_repository if in_repository != page else f"docs/{page}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _site_path(path: str) -> str:
    """Return the path in the site of a file of the repository."""
    in_docs = path.removeprefix("docs/")
    return in_docs if in_docs != path else f"repository/{path}"
