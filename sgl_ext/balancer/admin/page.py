"""The page at `/` and `/sgl_ext/ui`, which shows the live state.

Its files are in `sgl_ext/balancer/ui` and hold no data: what they show comes from `state.py`,
with the rules of access that hold there. They load nothing from elsewhere, and their policy
makes the browser refuse it: a client's text that became a script could not run, or send anything.
"""

from functools import cache
from pathlib import Path

from aiohttp import web

from sgl_ext.protocols.routes import UI

_FOLDER = Path(__file__).parents[1] / "ui"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
    "vary": "accept",
}


async def root(request: web.Request) -> web.Response:
    """The page for a browser. Other clients request this first to see whether a server answers."""
    if "text/html" in request.headers.get("accept", ""):
        return _file("index.html")
    return web.Response(text="sgl-ext balancer\n", headers={"vary": "accept"})


async def show(_: web.Request) -> web.Response:
    return _file("index.html")


async def show_file(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    if name not in _files():
        raise web.HTTPNotFound
    return _file(name)


def _file(name: str) -> web.Response:
    headers = {**_HEADERS, "content-type": _TYPES[Path(name).suffix]}
    return web.Response(body=_files()[name], headers=headers)


@cache
def _files() -> dict[str, bytes]:
    """All files, read once."""
    return {each.name: each.read_bytes() for each in _FOLDER.iterdir() if each.suffix in _TYPES}


ROUTES = (
    web.get("/", root),
    web.get(UI, show),
    web.get(f"{UI}/{{name}}", show_file),
)
