"""Commands `kvkit tune replay` and `kvkit tune regret`, which study recorded trials of tuning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvkit.kernels.tuning.strategies import STRATEGIES, strategy_named
from kvkit.lab.files import check_folders
from kvkit.lab.tuning import regret, replay_report
from kvkit.lab.tuning.recordings import Recording, read_recordings
from kvkit.lab.tuning.replay import replay_all
from kvkit.observe.terminal import print_text, show
from kvkit.settings import CommandError


def show_replays(
    files: Sequence[Path],
    strategies: str,
    seeds: int,
    csv: Path | None,
    picture: Path | None,
    json_path: Path | None,
) -> None:
    """Replay strategies over recordings; print a table for each device, and write the files asked for.

    Args:
        files: files of recorded trials.
        strategies: names with commas between; "": all of kvkit's.
        seeds: number of seeds.
        csv, picture, json_path: files to write; None: not.

    Raises:
        CommandError: a strategy or a folder does not exist, or a file cannot be read or written.
    """
    check_folders(csv, picture, json_path)
    names = [name.strip() for name in strategies.split(",") if name.strip()] or list(STRATEGIES)
    try:
        chosen = {name: strategy_named(name) for name in names}
    except ValueError as error:
        raise CommandError(f"--strategies {error}") from error
    replays = replay_all(_recordings(files), chosen, seeds)
    for table in replay_report.tables(replays):
        show(table)
    for path, write in (
        (csv, replay_report.write_csv),
        (picture, replay_report.plot),
        (json_path, replay_report.write_json),
    ):
        if path is not None:
            try:
                write(path, replays)
            except (OSError, ValueError) as error:
                raise CommandError(f"{path}: {error}") from error
            print_text(f"written: {path}")


def show_regret(files: Sequence[Path]) -> None:
    """Print for each device the regret of each rule that guesses configurations.

    Raises:
        CommandError: a file cannot be read, or no problem of theirs is known.
    """
    found = regret.identified(_recordings(files))
    if not found:
        raise CommandError("none of these problems is kvkit's, or was recorded with its bucket")
    for table in regret.tables(found):
        show(table)


def _recordings(files: Sequence[Path]) -> list[Recording]:
    return [recording for path in files for recording in read_recordings(path)]
