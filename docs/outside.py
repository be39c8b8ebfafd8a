"""Makes the files of the repository that pages link to, such as ../bench/results/serve.json, part of the site. A link
to a file that is not there stays as it is, and `mkdocs build --strict` refuses it. A hook of mkdocs: see mkdocs.yml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(\.\./([^)#\s]+)")  # of a page in docs/ to what is beside it
INSIDE = re.compile(r"\]\(docs/")  # of a file of the repository, such as CONTRIBUTING.md, to a page
BESIDE = re.compile(r"\]\(([\w.-]+\.md)")  # of such a file to another one


def on_files(files: Files, config: Any) -> Files:
    pages = [page.content_string for page in files.documentation_pages()]
    linked = {path for page in pages for path in LINK.findall(page) if (ROOT / path).is_file()}
    texts = [(ROOT / path).read_text(encoding="utf-8") for path in linked if path.endswith(".md")]
    linked |= {path for text in texts for path in BESIDE.findall(text) if (ROOT / path).is_file()}
    for path in sorted(linked):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    if page.file.generated_by:
        return INSIDE.sub("](", markdown)
    return LINK.sub(lambda link: f"]({link[1]}" if (ROOT / link[1]).is_file() else link[0], markdown)
