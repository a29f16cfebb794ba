"""A plan for people: what fits, what a GPU holds, the picks and their commands. Made from `record` alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

from sglang_sm120.plan.gpus import GIB
from sglang_sm120.plan.record import at, named, shown_requests

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 140
"""Columns where the output is no terminal, so that a file of it does not depend on who wrote it."""

_KINDS = ("weights", "graphs", "workspace", "communication", "activations", "runtime", "margin")


def print_plan(record: dict[str, Any], file: IO[str] | None = None, whole: bool = False) -> None:
    """Print it.

    Args:
        record: what `record.record` made, or read back from JSON.
        file: where to; standard output if None.
        whole: also the splits that are impossible, and every component's detail.
    """
    console = _console(file)
    _say(console, *_head(record))
    shown = [split for split in record["splits"] if whole or not split["obstacles"]]
    if any(split["concurrency"] for split in shown):
        console.print(_fits_table(record, [split for split in shown if split["concurrency"]]))
        _say(console, *_legend(record))
    _say(console, *_left_out(record, whole))
    picks = [record[goal] for goal in ("latency", "throughput") if record[goal] is not None]
    if picks:
        console.print(_memory_table(record, picks, whole))
    _say(console, *_nothing_fits(record))
    same = len(picks) == 2 and picks[0]["commands"] == picks[1]["commands"]
    for goal in ("latency", "throughput"):
        if record[goal] is not None and not (same and goal == "throughput"):
            _print_pick(console, record, "latency and throughput" if same else goal, record[goal])
    _say(console, *_not_counted(record))


def print_catalogue(entries: Sequence[tuple[str, ...]], gpus: Sequence[tuple[str, ...]]) -> None:
    """Print the names that `plan` takes.

    Args:
        entries: name, architecture, layers, experts, source.
        gpus: name, title, GiB, P2P, source.
    """
    console = _console(None)
    for title, columns, rows in (
        ("Models", ("name", "architecture", "layers", "experts", "source"), entries),
        ("GPUs", ("name", "GPU", "GiB for CUDA", "P2P by the stock driver", "source"), gpus),
    ):
        table = _table(*columns, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def gib(number: int) -> str:
    """Bytes as GiB with one digit behind the point, two below 1."""
    return f"{number / GIB:.1f}" if number >= GIB else f"{number / GIB:.2f}"


def _head(record: dict[str, Any]) -> Iterator[str]:
    model, gpu = record["model"], record["gpu"]
    machine = f"{record['gpus']} x {gpu['title']}"
    machine = f"{record['nodes']} nodes of {machine}" if record["nodes"] > 1 else machine
    name = f"{model['name']} ({model['architecture']}, {model['num_layers']} layers)"
    yield f"{name} on {machine}, {gib(gpu['cuda_bytes'])} GiB each"
    if gpu["note"]:
        yield f"Note: {gpu['note']}."
    mtp = "with the MTP head" if record["mtp"] else "without MTP head"
    if not record["mtp"] and model["mtp_layers"]:
        mtp += " (it has one: --mtp)"
    asked = f"Context {record['context']:,} tokens, KV cache {record['kv_dtype']}, {mtp}."
    yield f"{asked} Counted, not measured; GiB = 2^30 bytes."
    yield ""


def _fits_table(record: dict[str, Any], splits: Sequence[dict[str, Any]]) -> Table:
    columns = ("split", "weights", "other", "KV tokens", "requests", *(f"{n:,} at once" for n in record["concurrency"]))
    table = _table(*columns, title="What fits (GiB of the fullest GPU; KV tokens over all GPUs)", right=columns[1:])
    total = record["gpus"] * record["nodes"]
    for split in splits:
        shown = at(split, shown_requests(record))
        cells = [
            "fits" if one["fits"] else f"{one['tokens_each']:,} each" if one["all_kv_tokens"] else "no"
            for one in split["concurrency"]
        ]
        part = "" if split["gpus"] == total else f" ({split['gpus']} of {total} GPUs)"
        table.add_row(
            split["label"] + part, gib(shown["weight_bytes"]), gib(shown["fixed_bytes"] - shown["weight_bytes"]),
            f"{shown['all_kv_tokens']:,}", f"{shown['most_requests']:,}", *cells,
            style="" if split["holds_one"] else "dim",
        )  # fmt: skip
    return table


def _legend(record: dict[str, Any]) -> Iterator[str]:
    shown = f"Middle columns: at {shown_requests(record):,} at once"
    yield (
        f"{shown}; requests: how many of {record['context']:,} tokens each have room. "
        "fits: all of them do. N each: tokens on average, if so many run at once; longer ones wait."
    )
    yield ""


def _left_out(record: dict[str, Any], whole: bool) -> Iterator[str]:
    too_large = [split for split in record["splits"] if split["concurrency"] and not split["holds_one"]]
    for split in too_large:
        yield f"{split['label']} does not fit: {split['concurrency'][0]['why']}"
    impossible = [split for split in record["splits"] if split["obstacles"]]
    if whole:
        for split in impossible:
            yield f"{split['label']} is impossible: {'; '.join(split['obstacles'])}"
    elif impossible:
        splits = "split is" if len(impossible) == 1 else "splits are"
        yield f"{len(impossible)} more {splits} impossible for this model; --all says why."
    if too_large or impossible:
        yield ""


def _memory_table(record: dict[str, Any], picks: Sequence[dict[str, Any]], whole: bool) -> Table:
    """Components of the picks side by side, each at the number of requests that it is for."""
    columns_of = dict.fromkeys((pick["split"], pick["requests"]) for pick in picks)
    labels = [f"{split}\n{requests:,} at once" for split, requests in columns_of]
    fits = [at(named(record, split), requests) for split, requests in columns_of]
    names = list(dict.fromkeys((part["name"], part["kind"]) for one in fits for part in one["components"]))
    columns = ("component", "kind", *labels, *(("how it was counted",) if whole else ()))
    table = _table(*columns, title="GiB of the fullest GPU", right=labels)
    for name, kind in sorted(names, key=lambda pair: _KINDS.index(pair[1]) if pair[1] in _KINDS else len(_KINDS)):
        found = [next((part for part in one["components"] if part["name"] == name), None) for one in fits]
        cells = ["" if part is None else gib(part["bytes"]) for part in found]
        detail = next(part["detail"] for part in reversed(found) if part is not None)
        table.add_row(name, kind, *cells, *((detail,) if whole else ()))
    kv = [one["kv_tokens"] * one["kv_bytes_per_token"] for one in fits]
    table.add_row("KV cache", "kv", *map(gib, kv), *(("what --mem-fraction-static leaves",) if whole else ()))
    sums = [gib(one["fixed_bytes"] + held) for one, held in zip(fits, kv, strict=True)]
    table.add_row("sum", "", *sums, *(("",) if whole else ()), style="bold")
    return table


def _print_pick(console: Console, record: dict[str, Any], goal: str, pick: dict[str, Any]) -> None:
    requests = f"{pick['requests']:,} request{'' if pick['requests'] == 1 else 's'} at once"
    total = record["gpus"] * record["nodes"]
    part = "" if pick["gpus"] == total else f", {pick['gpus']} of {total} GPUs"
    console.print(f"For {goal}: {pick['split']}{part} ({requests})", style="bold")
    _say(console, *(f"- {reason}" for reason in pick["reasons"]), "")
    for rank, command in enumerate(pick["commands"]):
        if len(pick["commands"]) > 1:
            _say(console, f"Node {rank}:")
        _say(console, *("    " + line for line in command.splitlines()), "")
    if pick["ray"] is not None:
        _say(console, "Or by Ray, on its head node:", *("    " + line for line in pick["ray"].splitlines()), "")
    table = _table("flag or variable", "reason")
    for one in (*pick["environment"], *pick["flags"]):
        name = (
            f"{one['name']}={one['value']}"
            if one in pick["environment"]
            else " ".join(filter(None, (one["name"], one["value"])))
        )
        table.add_row(name, one["reason"])
    console.print(table)
    _say(console, *(f"- {note}" for note in pick["notes"]), "")


def _nothing_fits(record: dict[str, Any]) -> Iterator[str]:
    if record["latency"] is not None:
        return
    yield f"Nothing fits: no split holds one request of {record['context']:,} tokens."
    if record["larger"] is not None:
        larger = record["larger"]
        machine = f"{larger['nodes']} nodes of {larger['gpus']}" if larger["nodes"] > 1 else f"{larger['gpus']}"
        yield f"It would fit on {machine} of these GPUs ({larger['split']})."
    else:
        yield "More of these GPUs would not help, as far as was looked."
    if record["smaller_context"] is not None:
        yield f"Here it would fit with --context {record['smaller_context']}."
    else:
        yield "A shorter context would not help."
    yield ""


def _not_counted(record: dict[str, Any]) -> Iterator[str]:
    if record["model"]["not_counted"]:
        yield "Not counted, since the config does not tell or this version does not know it:"
        yield from (f"- {what}" for what in record["model"]["not_counted"])


def _console(file: IO[str] | None) -> Console:
    from rich.console import Console

    console = Console(file=file, highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(file=file, highlight=False, width=WIDTH, color_system=None)


def _table(*columns: str, title: str | None = None, right: Sequence[str] = ()) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def _say(console: Console, *lines: str) -> None:
    """Print text as it is: no markup, no numbers in colour; commands are not broken at the edge."""
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
