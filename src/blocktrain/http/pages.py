"""The web pages of the coordinator (dashboard, leaderboard) and the gateway (playground): one route per file, with
ETag, gzip, cache and security headers. The pages get what they show from the API; an access token, where one is needed,
is known to their scripts alone.
Next: static/dashboard/dashboard.js, static/playground/playground.js."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

PLOTLY = "plotly.min.js"
DAY_S = 86_400
MEDIA_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


def security_headers(styles: str = "'self'") -> dict[str, str]:
    """The browser loads nothing from another host, and no other page may embed this one."""
    return {
        "Content-Security-Policy": f"default-src 'none'; script-src 'self'; style-src {styles}; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


@dataclass(frozen=True)
class WebPage:
    folder: str  # in static/
    at: str = "/"
    plotly: bool = False  # it sets inline styles, which differ from version to version

    def files(self) -> dict[str, tuple[str, str]]:
        """For the path of each route, the package and the path of its file."""
        folder = f"static/{self.folder}"
        names = sorted(file.name for file in resources.files(__package__).joinpath(folder).iterdir())
        ours = {
            self.at if name == "index.html" else f"/page/{name}": (__package__, f"{folder}/{name}") for name in names
        }
        return {**ours, f"/page/{PLOTLY}": ("plotly", f"package_data/{PLOTLY}")} if self.plotly else ours


DASHBOARD, PLAYGROUND = WebPage("dashboard", plotly=True), WebPage("playground")
LEADERBOARD = WebPage("leaderboard", at="/leaderboard")  # beside the dashboard, whose style and words it uses


def add_page(app: FastAPI, page: WebPage) -> None:
    headers = security_headers("'self' 'unsafe-inline'" if page.plotly else "'self'")
    for route, (package, path) in page.files().items():
        app.add_route(route, _file_route(package, path, headers), include_in_schema=False)


def _file_route(package: str, path: str, security: dict[str, str]) -> Callable[..., Any]:
    """Browsers ask each time whether one of our files has changed. Plotly is large, and they keep it for a day."""
    caching = "no-cache" if package == __package__ else f"public, max-age={DAY_S}"
    media_type = MEDIA_TYPES[path.rpartition(".")[2]]
    common = {**security, "Vary": "Accept-Encoding", "Cache-Control": caching}

    def answer(request: Request) -> Response:
        data, tag = _packed(package, path)
        headers = {**common, "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(gzip.decompress(data), headers=headers, media_type=media_type)
        return Response(data, headers={**headers, "Content-Encoding": "gzip"}, media_type=media_type)

    return answer


@cache
def _packed(package: str, path: str) -> tuple[bytes, str]:
    """The compressed file and its ETag, made at the first request: without visitors, no file is read."""
    data = resources.files(package).joinpath(path).read_bytes()
    return gzip.compress(data, mtime=0), f'"{hashlib.sha256(data).hexdigest()[:32]}"'
