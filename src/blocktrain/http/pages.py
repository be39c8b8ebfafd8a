"""The coordinator's dashboard: the routes of its files. What the page shows it asks of the API, with a token that only
its own script sees. Next: page/dashboard.js; swarm/coordinator/routes.py, the API."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Annotated, Any

from fastapi import FastAPI, Header
from starlette.responses import Response

PLOTLY = "plotly.min.js"
FILES = {
    "/": ("index.html", "text/html"),
    "/page/dashboard.js": ("dashboard.js", "text/javascript"),
    "/page/view.js": ("view.js", "text/javascript"),
    "/page/words.js": ("words.js", "text/javascript"),
    "/page/charts.js": ("charts.js", "text/javascript"),
    "/page/dashboard.css": ("dashboard.css", "text/css"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    f"/page/{PLOTLY}": (PLOTLY, "text/javascript"),
}
DAY_S = 86_400
HEADERS = {  # plotly brings styles of its own, other ones with each version: they can load nothing from elsewhere
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Vary": "Accept-Encoding",
}


def add_dashboard(service: FastAPI) -> None:
    for path, (name, media_type) in FILES.items():
        service.add_api_route(path, _file(name, media_type), include_in_schema=False)


def _file(name: str, media_type: str) -> Callable[..., Any]:
    """Ours are asked after each time, and may have changed with a new version of BlockTrain; plotly is large, and kept
    for a day."""
    caching = f"public, max-age={DAY_S}" if name == PLOTLY else "no-cache"
    common = {**HEADERS, "Cache-Control": caching}

    def file(accept_encoding: Annotated[str, Header()] = "", if_none_match: Annotated[str, Header()] = "") -> Response:
        packed, tag = _packed(name)
        headers = {**common, "ETag": tag}
        if if_none_match == tag:
            return Response(status_code=304, headers=headers)
        if "gzip" not in accept_encoding:
            return Response(gzip.decompress(packed), headers=headers, media_type=media_type)
        return Response(packed, headers={**headers, "Content-Encoding": "gzip"}, media_type=media_type)

    return file


@cache
def _packed(name: str) -> tuple[bytes, str]:
    """Made when it is first asked for: a coordinator without watchers never reads it."""
    folder = "plotly" if name == PLOTLY else __package__
    data = resources.files(folder).joinpath("package_data" if name == PLOTLY else "static/dashboard", name).read_bytes()
    return gzip.compress(data, mtime=0), f'"{hashlib.sha256(data).hexdigest()[:32]}"'
