"""What the benchmarks share: a table, JSON, and the machine's load beside every figure."""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fadefed.config import TomlFile
from fadefed.federation import Federation
from fadefed.learning.export import export_task


def options(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser


def show(title: str, rows: list[dict[str, Any]], path: Path | None = None) -> None:
    """Print `rows` ({what, value, target}) as a table, and write them as JSON."""
    print(f"\n{title} (load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores)")
    width = max(len(row["what"]) for row in rows)
    for row in rows:
        value = row["value"]
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        print(f"  {row['what']:{width}}  {text:>12}  {row.get('target', '')}")
    if path is not None:
        path.write_text(json.dumps({"title": title, "load": os.getloadavg()[0], "rows": rows}, indent=2) + "\n")


def median(values: list[float]) -> float:
    return float(statistics.median(values))


def federation(text: str) -> Federation:
    return Federation.from_file(TomlFile.parse(text, "benchmark.toml"))


@contextmanager
def lab_folder(fed: Federation) -> Iterator[tuple[Path, Path]]:
    """A temporary folder, and in it the federation's graphs."""
    with tempfile.TemporaryDirectory() as folder:
        graphs = Path(folder) / "graphs"
        export_task(fed.task, graphs)
        yield Path(folder), graphs
