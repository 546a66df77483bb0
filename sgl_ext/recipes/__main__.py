"""Lists, prints or copies the recipes that come with sgl-ext.

sgl-ext recipes                  their names and where they are
sgl-ext recipes gpu.toml         prints one
sgl-ext recipes --write launch   copies all into a folder
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sgl_ext.recipes.catalog import NoSuchRecipe, recipe, recipes, write_recipes


def run(argv: Sequence[str]) -> int:
    """Prints what the arguments name and returns the exit code: 2 if it is not possible."""
    parser = argparse.ArgumentParser(
        prog="sgl-ext recipes",
        allow_abbrev=False,
        description="Settings, alerts, dashboards, manifests and units that come with sgl-ext.",
    )
    parser.add_argument("name", nargs="?", help="print this one, such as gpu.toml")
    parser.add_argument("--write", metavar="FOLDER", type=Path, help="copy all into this folder")
    flags = parser.parse_args(argv)
    if flags.name is not None and flags.write is not None:
        parser.error("give a name or --write")
    try:
        if flags.write is not None:
            print(*write_recipes(flags.write), sep="\n")
        elif flags.name is not None:
            sys.stdout.write(recipe(flags.name).read_text())
        else:
            width = max(map(len, recipes()))
            for name, path in recipes().items():
                print(f"{name:{width}}  {path}")
    except (NoSuchRecipe, OSError) as error:
        print(f"sgl-ext recipes: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
