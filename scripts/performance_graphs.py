"""Draw the graphs of docs/performance.md from the tables of benchmarks/README.md.

    python -m scripts.performance_graphs

After a change of the tables, run it again; a test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS, PEER = "#3f6fd8", "#b8c0cc"
WIDTH, LEFT, RIGHT, BAR, GAP, HEAD = 760, 250, 110, 20, 7, 46  # pixels

Row = Mapping[str, str]  # by the column's head; a repeated head is preceded by that of the column before


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    text: str
    is_ours: bool


@dataclass(frozen=True, slots=True)
class Graph:
    """Horizontal bars; each group stands a little apart."""

    name: str
    title: str
    groups: tuple[tuple[Bar, ...], ...]


def tables(markdown: str) -> list[list[Row]]:
    """Return the tables of a page, each a list of its rows."""
    found: list[list[Row]] = []
    head: list[str] = []
    for line in markdown.splitlines():
        if not line.startswith("|"):
            head = []
            continue
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if not head:
            head = [f"{cells[k - 1]}, {cell}" if cell in cells[:k] else cell for k, cell in enumerate(cells)]
            found.append([])
        elif not set(cells[-1]) <= set("-: "):
            found[-1].append(dict(zip(head, cells, strict=True)))
    return found


def number(cell: str) -> float:
    """Return the first figure of a cell: 1207.0 of `1,207, 88 ms`."""
    return float(cell.split(", ")[0].replace(",", "").split()[0])


def graphs(markdown: str) -> list[Graph]:
    """Return the graphs with their figures.

    Raises:
        StopIteration: A table or a row of a graph is missing on the page.
    """
    every = tables(markdown)
    return [
        Graph(
            "recovery",
            "Seconds from kill -9 of one of 4 workers to the others' next step (less is better)",
            (_recovery(every),),
        ),
        Graph("training", "DeepFM, 1 worker, 1 parameter server: samples per second", (_training(every),)),
        Graph("allreduce", "Data parallel PyTorch on 2 cores: samples per second", _against_ddp(every)),
        Graph("collectives", "AllReduce of 2 processes on one machine: speed over Gloo", (_collectives(every),)),
        Graph("reading", "Reading records of 100 bytes: records per second", (_reading(every),)),
    ]


def _table(every: list[list[Row]], *columns: str) -> list[Row]:
    return next(rows for rows in every if rows and set(columns) <= set(rows[0]))


def _row(rows: list[Row], beginning: str) -> Row:
    return next(row for row in rows if row[""].startswith(beginning))


def _recovery(every: list[list[Row]]) -> tuple[Bar, ...]:
    column = "next step, median and longest"
    after_kill = _table(every, "", column)
    return tuple(
        Bar(
            label,
            seconds := number(_row(after_kill, f"{name}, SIGKILL")[column]),
            f"{seconds:g} s",
            name == "elasticdl",
        )
        for name, label in (("elasticdl", "ElasticDL"), ("torchrun", "torchrun"))
    )


def _training(every: list[list[Row]]) -> tuple[Bar, ...]:
    click_log = _table(every, "elasticdl, steady", "ParameterServerStrategy", "model.fit")[0]
    return tuple(
        Bar(label, number(click_log[column]), f"{number(click_log[column]):,.0f}/s", column.startswith("elasticdl"))
        for column, label in (
            ("elasticdl, steady", "ElasticDL"),
            ("ParameterServerStrategy", "tf ParameterServerStrategy"),
            ("model.fit", "Keras model.fit"),
        )
    )


def _against_ddp(every: list[list[Row]]) -> tuple[tuple[Bar, ...], ...]:
    """Return a group of bars for each model and number of processes."""
    groups = []
    previous = ""
    for found in _table(every, "", "elasticdl", "DistributedDataParallel"):
        model, _, processes = found[""].rpartition(", ")
        previous = previous if model == "the same" else model.split(" of ")[0]
        groups.append(
            tuple(
                Bar(f"{previous}, {processes}: {label}", number(found[name]), f"{number(found[name]):,.0f}/s", is_ours)
                for name, label, is_ours in (
                    ("elasticdl", "ElasticDL", True),
                    ("DistributedDataParallel", "DDP", False),
                )
            )
        )
    return tuple(groups)


def _collectives(every: list[list[Row]]) -> tuple[Bar, ...]:
    return tuple(
        Bar(f"sum of {found['sum of']}", number(found["times"]), f"{number(found['times']):.1f} times Gloo", True)
        for found in _table(every, "sum of", "2 members", "times")
    )


def _reading(every: list[list[Row]]) -> tuple[Bar, ...]:
    column = "records per second"
    rows = _table(every, "", column)
    return tuple(
        Bar(label, rate := number(_row(rows, name)[column]), f"{rate / 1e6:.1f} M/s", is_ours)
        for name, label, is_ours in (
            ("RecordIO, equal lengths", "RecordIO", True),
            ("RecordIO, snappy", "RecordIO, compressed", True),
            ("RecordIO, equal lengths, made into", "RecordIO, as string tensors", True),
            ("tf.data.TFRecordDataset", "tf.data TFRecordDataset", False),
        )
    )


def draw(graph: Graph) -> str:
    """Return a graph as SVG."""
    largest = max(bar.value for group in graph.groups for bar in group)
    lines: list[str] = []
    y = HEAD
    for group in graph.groups:
        for bar in group:
            length = max(2.0, (WIDTH - LEFT - RIGHT) * bar.value / largest)
            color, middle = OURS if bar.is_ours else PEER, y + BAR - 6
            lines += [
                f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end">{escape(bar.label)}</text>',
                f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2" fill="{color}"/>',
                f'<text x="{LEFT + length + 6:.1f}" y="{middle}">{escape(bar.text)}</text>',
            ]
            y += BAR + GAP
        y += GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 4}" width="{WIDTH}" height="{y + 4}">\n'
        "<style>text{font:13px system-ui,sans-serif;fill:#57606a}.t{font-size:15px;font-weight:600}"
        "@media(prefers-color-scheme:dark){text{fill:#c9d1d9}}</style>\n"
        f'<text class="t" x="8" y="24">{escape(graph.title)}</text>\n' + "\n".join(lines) + "\n</svg>\n"
    )


def pictures() -> dict[str, str]:
    """Return each graph's file below docs/, and its SVG."""
    found = graphs((ROOT / "benchmarks" / "README.md").read_text())
    return {f"performance_{graph.name}.svg": draw(graph) for graph in found}


def main() -> None:
    for name, svg in pictures().items():
        (ROOT / "docs" / name).write_text(svg)


if __name__ == "__main__":
    main()
