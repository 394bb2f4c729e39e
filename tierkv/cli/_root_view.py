"""What ``tierkv du`` shows on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tierkv.cli._console import Console
from tierkv.cli._words import OTHER, ago, counted, lying
from tierkv.sizes import format_size

_PIPED_WIDTH = 160


def show_usage(path: str, record: Mapping[str, Any]) -> None:
    """Tables of the record that ``--json`` prints."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    console.print(_sum(path, record), soft_wrap=True)
    if record["namespaces"]:
        console.print(_table("namespace", record["namespaces"], {}))
    if record["owners"]:
        columns = {
            "state": lambda owner: owner["state"],
            "pid": lambda owner: owner.get("pid", "-"),
            "heard": lambda owner: ago(owner["heartbeat_age_s"]) if owner.get("heartbeat_age_s") is not None else "-",
            "reserved": lambda owner: format_size(owner["reserved_nbytes"]) if "reserved_nbytes" in owner else "-",
        }
        console.print(_table("owner", record["owners"], columns))
    console.print(f"lock files and indexes: {format_size(record['lock_and_index_nbytes'])}")
    for what, sums in record["other"].items():
        why = OTHER[what] + " or of which no catalogue tells" * (what == "slab" and bool(record["unlisted"]))
        console.print(f"{lying(what, sums['n'])}, {format_size(sums['nbytes'])}: {why}", soft_wrap=True)
    for slab in record["unlisted"]:
        console.print(f"{slab['place']}: {slab['why']}", soft_wrap=True)


def _sum(path: str, record: Mapping[str, Any]) -> str:
    """What counts against the capacity, the capacity, and what the file system has left."""
    capacity, n_chunks = record["capacity_nbytes"], record["n_chunks"]
    chunks_nbytes = sum(part["nbytes"] for part in record["namespaces"].values())
    of = "; no living engine names a capacity" if capacity is None else f" of a capacity of {format_size(capacity)}"
    return (
        f"{path}: {format_size(record['nbytes'])} in use{of}; {counted(n_chunks, 'chunk')}, "
        f"{format_size(chunks_nbytes)}; {format_size(record['free_nbytes'])} free on the file system"
    )


def _table(title: str, rows: Mapping[str, Mapping[str, Any]], columns: Mapping[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column(title, overflow="fold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for column in ("chunks", "size", "newest", "oldest"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in rows.items():
        ages = [ago(row[age]) if age in row else "-" for age in ("newest_age_s", "oldest_age_s")]
        cells = [str(cell(row)) for cell in columns.values()]
        table.add_row(name, *cells, f"{row['n_chunks']:,}", format_size(row["nbytes"]), *ages)
    return table
