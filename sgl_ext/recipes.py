"""The recipes that come with sgl-ext: settings, alerts, dashboards, manifests, units, documents.

    sgl-ext recipes                  their names and where they are
    sgl-ext recipes gpu.toml         prints one
    sgl-ext recipes --write launch   copies all into a folder

They are the files of `launch/`, and the pages of `docs/`, which messages name. A wheel holds them
in `recipe_files/`.
"""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path, PurePosixPath

from sgl_ext.arguments import Arguments


def run(argv: Sequence[str]) -> int:
    """Prints what the arguments name and returns the exit code: 2 if it is not possible."""
    parser = Arguments(
        prog="sgl-ext recipes",
        allow_abbrev=False,
        description="Settings, alerts, manifests, units and documents that come with sgl-ext.",
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


_INSTALLED = Path(__file__).parent / "recipe_files"
_CHECKOUT = Path(__file__).parents[1]
# Pages and what they show. A wheel needs no program of docs/.
_OF_PAGES = (".md", ".patch", ".svg", ".webp")
# A wheel needs no program of a checkout.
_NOT_RECIPES = ("cpu/sgl_ext_cpu", "cpu/pyproject.toml", "cpu/README.md")


class NoSuchRecipe(Exception):
    """No recipe has this name. The message suggests the nearest."""


def recipes() -> dict[str, Path]:
    """Each recipe's file by its name: its path within `launch/`, such as `gpu.toml`, or that of a
    document, such as `docs/index.md`."""
    if _INSTALLED.is_dir():
        return dict(sorted(_files_below(_INSTALLED).items()))
    return of_checkout(_CHECKOUT)


def of_checkout(root: Path) -> dict[str, Path]:
    """The recipes of a checkout, which a wheel of it holds."""
    pages = _files_below(root / "docs").items()
    documents = {f"docs/{name}": path for name, path in pages if path.suffix in _OF_PAGES}
    return dict(sorted((_files_below(root / "launch") | documents).items()))


def _files_below(home: Path) -> dict[str, Path]:
    found = ((path.relative_to(home), path) for path in home.rglob("*") if path.is_file())
    return {
        name.as_posix(): path for name, path in found if _is_recipe(PurePosixPath(name.as_posix()))
    }


def settings_file(name: str) -> str:
    """The settings that `--config NAME` means: the file NAME, or else the recipe NAME.toml.

    A name that is neither comes back unchanged.
    """
    if Path(name).exists():
        return name
    recipe = recipes().get(f"{name}.toml")
    return name if recipe is None else str(recipe)


def recipe(name: str) -> Path:
    """The file of one recipe; `gpu` is short for `gpu.toml`. Raises NoSuchRecipe."""
    known = recipes()
    path = known.get(name) or known.get(f"{name}.toml")
    if path is None:
        near = get_close_matches(name, known, 1)
        hint = f", but {near[0]!r} is" if near else ""
        raise NoSuchRecipe(f"no recipe is called {name!r}{hint}; `sgl-ext recipes` lists them")
    return path


def write_recipes(folder: Path) -> list[Path]:
    """Copies all recipes into a folder and returns what was written.

    Raises FileExistsError, and writes nothing, if one of them is there and differs.
    """
    known = recipes()
    for name, path in known.items():
        target = folder / name
        if target.exists() and target.read_bytes() != path.read_bytes():
            raise FileExistsError(f"{target} exists and differs; give another folder")
    written = []
    for name, path in known.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
        target.chmod(path.stat().st_mode & 0o777 | 0o200)
        written.append(target)
    return written


def _is_recipe(name: PurePosixPath) -> bool:
    hidden = any(part.startswith(".") or part == "__pycache__" for part in name.parts)
    return not (hidden or name.suffix == ".py" or str(name).startswith(_NOT_RECIPES))


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
