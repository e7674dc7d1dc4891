"""Recorded trials of tuning, read from JSON lines of `kvkit tune` or from a document of results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkit.kernels.tuning import trials
from kvkit.kernels.tuning.configs import KernelConfig, ProblemBucket
from kvkit.settings import CommandError


class RecordingError(CommandError):
    """A file without recorded trials. Names the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Recorded times of the configurations of one problem on one device.

    Args:
        device: name of the device.
        problem: name of the problem.
        bucket: bucket of the problem; None: it was not recorded.
        source: digest of the kernel's source; "" if it was not recorded.
        samples: seconds of each run of each configuration that ran, the default first.
    """

    device: str
    problem: str
    bucket: ProblemBucket | None
    source: str
    samples: Mapping[KernelConfig, tuple[float, ...]]

    @property
    def space(self) -> tuple[KernelConfig, ...]:
        """Configurations with times, the default first."""
        return tuple(self.samples)

    @property
    def best(self) -> KernelConfig:
        """Configuration with the least median time."""
        return min(self.samples, key=self.seconds)

    def seconds(self, config: KernelConfig) -> float:
        """Return the median of the recorded seconds of a configuration."""
        return statistics.median(self.samples[config])

    def regret(self, config: KernelConfig) -> float:
        """Return the share by which a configuration takes longer than the best recorded one."""
        return self.seconds(config) / self.seconds(self.best) - 1


def read_recordings(path: Path) -> list[Recording]:
    """Read the recordings of a file: the last search of each problem whose default ran.

    Args:
        path: JSON lines, as `kvkit tune` writes beside its tables; or a document of `benchmarks/results`
            with steps "tune".

    Raises:
        RecordingError: the file cannot be read, or has no trials.
    """
    try:
        document = _document(path)
        recordings = list(_of_lines(trials.read(path)) if document is None else _of_document(document))
    except (OSError, UnicodeDecodeError) as error:
        raise RecordingError(str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordingError(f"{path}: no trials of kvkit tune: {type(error).__name__}: {error}") from error
    if not recordings:
        raise RecordingError(f"{path}: has no trials that ran; want a file that kvkit tune or make gpu wrote")
    return recordings


def _document(path: Path) -> Mapping[str, Any] | None:
    """Return the document in a file, None if it has several lines of JSON, or one that is a trial."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return None
    return document if "results" in document else None


def _of_document(document: Mapping[str, Any]) -> Iterator[Recording]:
    machine = document["machine"]
    device = machine["gpu"] or f"{machine['cpu']} {machine['cores']} cores"
    for entry in document["results"]:
        if entry.get("step") == "tune" and entry.get("trials"):
            default_us = entry.get("default_us", entry["trials"][0]["us"])
            ran = [trial for trial in entry["trials"] if trial["us"] is not None]
            if ran and ran[0]["us"] == default_us:
                yield _recording(device, entry["what"], entry, ran)


def _of_lines(lines: Sequence[trials.Line]) -> Iterator[Recording]:
    problems: dict[tuple[str, str], list[trials.Line]] = {}
    for line in lines:
        problems.setdefault((line["device"], line["problem"]), []).append(line)
    for (device, problem), found in problems.items():
        ran = [line for line in found if line["us"] is not None]
        if ran and ran[0]["default"]:
            yield _recording(device, problem, ran[0], ran)


def _recording(
    device: str, problem: str, about: Mapping[str, Any], ran: Sequence[Mapping[str, Any]]
) -> Recording:
    bucket = ProblemBucket(about["op"], about["form"], tuple(about["sizes"])) if "form" in about else None
    samples = {
        KernelConfig.parse(trial["config"]): tuple(
            us * 1e-6 for us in trial.get("samples_us") or (trial["us"],)
        )
        for trial in ran
    }
    return Recording(device, problem, bucket, about.get("source", ""), samples)
