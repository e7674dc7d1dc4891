"""Make the report: figures and data out of benchmark results, then paper/build/kvkit.pdf. For `make paper`.

python -m paper.build [results folder] [output folder]

The text is in *.typ and holds no measured number: it reads data.json, which this writes next to the PDF.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typst

from kvkit.blend import gate, plan
from kvkit.format import names, record
from kvkit.kernels.pages.reference import LARGEST
from kvkit.lab.demo import conversation as demo
from kvkit.tiers import health
from kvkit.transfer import precision
from kvkit.transfer import read_pipeline as reads
from paper import plots
from paper.derived import derive
from paper.sources import Benchmarks, PaperError, explained, read

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "benchmarks" / "results"
OUT = HERE / "build"
TEXT = HERE / "kvkit.typ"


def build(results: Path = RESULTS, out: Path = OUT) -> Path:
    """Write figures, data.json and kvkit.pdf into `out`, which is made; returns the PDF's path.

    Raises:
        PaperError: results are missing, or the text does not compile.
    """
    data = collect(results)
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "data.json").write_text(json.dumps(data, indent=1) + "\n")
    plots.draw(data, out / "reuse.svg")
    plots.draw_blend(data["made"]["boards"], out / "blend.svg")
    plots.draw_frontier(data["made"]["frontier"]["cells"], out / "frontier.svg")
    plots.draw_timeline(data["timeline"]["events"], out / "timeline.svg")
    pdf = out / "kvkit.pdf"
    try:
        # the root is that of the file system: text and data may lie anywhere
        _, warnings = typst.compile_with_warnings(
            str(TEXT),
            str(pdf),
            root="/",
            sys_inputs={"out": str(out)},
            font_paths=typst.Fonts(include_system_fonts=False),
        )
    except typst.TypstError as error:
        raise PaperError(explained(error.diagnostic or error.message, results, data["slug"])) from error
    for warning in warnings:
        print(warning.diagnostic or warning.message, file=sys.stderr)
    return pdf


def collect(folder: Path) -> dict[str, Any]:
    """All that the text says in numbers: results of one machine, what is made of them, constants of the code.

    That machine is the one with the most results of benchmarks.

    Raises:
        PaperError: files are missing, or lack a figure that is derived from.
    """
    if not folder.is_dir():
        raise PaperError(f"{folder} is no folder: `make bench` makes it")
    found = [(path, json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    # other tables lie there, too: only those of benchmarks have names
    documents = [
        (p, d)
        for p, d in found
        if d.get("results") is not None and all("name" in entry for entry in d["results"])
    ]
    if not documents:
        raise PaperError(f"{folder} holds no results: run `make bench`")
    path, document = max(documents, key=lambda found: len(found[1]["results"]))
    sources = read(folder, path.stem)
    return {
        "slug": path.stem,
        "machine": document["machine"],
        "versions": document["versions"],
        "results": Benchmarks(document, path),
        **sources,
        "made": derive(sources),
        "constants": {
            "align": record.ALIGN,
            "high_bits": names.HIGH_BITS,
            "low_bits": names.LOW_BITS,
            "in_flight": reads.MAX_IN_FLIGHT,
            "failures": health.FAILURES_TO_PAUSE,
            "first_pause_s": health.PAUSES_S[0],
            "longest_pause_s": health.PAUSES_S[-1],
            "demo_chunk_tokens": demo.CHUNK_TOKENS,
            "demo_answer_tokens": demo.ANSWER_TOKENS,
            "demo_document_tokens": demo.DOCUMENT_TOKENS,
            "largest": LARGEST,
            "gate_kl": gate.MAX_KL,
            "gate_of_naive": gate.MAX_OF_NAIVE,
            "precision_kl": precision.MAX_KL,
            "precision_top1": precision.MIN_TOP1,
            "ratio": plan.Selection().ratio,
            "first_n": plan.Selection().first_n,
        },
    }


def main() -> None:
    """Build from the command line's folders."""
    folders = [Path(argument) for argument in sys.argv[1:3]]
    try:
        pdf = build(*folders)
    except PaperError as error:
        sys.exit(str(error))
    print(pdf)


if __name__ == "__main__":
    main()
