"""Shows and changes a fleet of engines on Ray: `python -m sgl_ext.fleet COMMAND`.

    show      the engines, and what is wanted
    scale N   adds engines, or drains the last ones and removes them
    restart   replaces the engines one after another, with the settings of the running launcher
    stop      ends the engines of a fleet that no launcher keeps

`scale` and `restart` tell the fleet's launcher what is wanted, and wait until it is so. Ctrl-C ends
the waiting alone.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress

from sgl_ext.membership.member import MembershipError
from sgl_ext.settings.fields import fields_of
from sgl_ext.settings.schema import LaunchSettings, SettingsError


def main(argv: Sequence[str]) -> None:
    """Raises SystemExit with the reason of a failure."""
    given = _parser().parse_args(argv)
    fields = fields_of(LaunchSettings)
    try:
        for name in ("ray_address", "ray_fleet"):
            fields[name].convert(getattr(given, name), fields[name].flag)
        from sgl_ext.integrations.ray.cluster import FleetError
        from sgl_ext.integrations.ray.operations import Operations
    except SettingsError as error:
        raise SystemExit(f"sgl-ext: {error}") from None
    except ModuleNotFoundError as missing:
        if missing.name != "ray":
            raise
        raise SystemExit("sgl-ext: ray is not installed: pip install 'sgl-ext[ray]'") from None

    async def run() -> None:
        operations = await Operations.connect(given.ray_address, given.ray_fleet)
        if given.command == "scale":
            await operations.scale(given.engines)
        else:
            await {
                "show": operations.show,
                "restart": operations.restart,
                "stop": operations.stop,
            }[given.command]()

    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(run())
    except (FleetError, MembershipError) as error:
        raise SystemExit(f"sgl-ext: {error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_ext.fleet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    fields = fields_of(LaunchSettings)
    parser.add_argument("--ray-address", default="auto", metavar=fields["ray_address"].metavar)
    fleet = fields["ray_fleet"]
    parser.add_argument("--ray-fleet", default=fleet.default, metavar=fleet.metavar)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in ("show", "restart", "stop"):
        commands.add_parser(name)
    scale = commands.add_parser("scale")
    scale.add_argument("engines", type=_count, metavar="N")
    return parser


def _count(text: str) -> int:
    return int(fields_of(LaunchSettings)["instances"].convert(text, "N", is_text=True))


if __name__ == "__main__":
    main(sys.argv[1:])
