"""Writes launch/grafana: `python -m docs.dashboards`."""

from __future__ import annotations

import json
from pathlib import Path

from docs.dashboards import cache, node, tenants

FOLDER = Path(__file__).parents[2] / "launch" / "grafana"


def files() -> dict[Path, str]:
    """Each dashboard's file and its text."""
    made = {"node": node.DASHBOARD, "tenants": tenants.DASHBOARD, "cache": cache.DASHBOARD}
    return {
        FOLDER / f"{name}.json": json.dumps(dashboard, indent=1, ensure_ascii=False) + "\n"
        for name, dashboard in made.items()
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
