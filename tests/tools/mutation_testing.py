"""Mutation testing of the pure core: changes one thing in a function, and asks whether a test notices.

python tests/tools/mutation_testing.py [--survivors] [--json FILE] [MODULE...]. `[tool.mutants]` of
pyproject.toml has the modules and the tests of each. Mutants are those of mutmut's operators; each is tried
in a fork of a pytest that has collected, by the tests that enter its function. Verdicts are kept in
.mutants/, so a run that was interrupted goes on; they count as long as module and tests are unchanged. With
`--survivors`, those of killed mutants count although tests have changed. `tests/tools/mutants.txt` explains
survivors that no test can kill.

Left out, as in mutmut: what a module does when it is imported, defaults of parameters, type annotations.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import os
import resource
import signal
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from cProfile import Profile
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import libcst as cst
import pytest
from _pytest.runner import runtestprotocol
from mutmut.mutation.mutators import mutation_operators

from kvkit.environment import version_of
from kvkit.lab.files import about, commit

ROOT = Path(__file__).parent.parent.parent
KEPT = ROOT / ".mutants"
EXPLAINED = Path(__file__).with_name("mutants.txt")
PYTEST = ("-q", "--no-header", "--hypothesis-profile=mutants", "-p", "no:cacheprovider", "--timeout=0")
PATIENCE_S = 600
"""For what waits for good: it uses no time of a core."""
MEMORY = 4 << 30
"""Bytes that a mutant may allocate beyond what it begins with."""


@dataclass(frozen=True)
class Mutation:
    """A function, and its source before and after one thing is changed in it.

    `name` has function, line before and line after, so that it outlives edits elsewhere.
    """

    function: str
    name: str
    before: str
    after: str


def mutants_of(source: str) -> Iterator[Mutation]:
    """Every mutant of the functions of a module and of the methods of its classes."""
    tree, seen = cst.parse_module(source), Counter[str]()
    for function, definition in _definitions(tree):
        whole = tree.code_for_node(definition)
        for node in _nodes(definition):
            for kind, operator in mutation_operators:
                for changed in operator(node) if isinstance(node, kind) else ():
                    mutated = tree.code_for_node(definition.deep_replace(node, changed))  # type: ignore[arg-type]
                    name = f"{function}: {_difference(whole, mutated)}"
                    seen[name] += 1
                    name = name if seen[name] == 1 else f"{name} ({seen[name]})"
                    yield Mutation(function, name, whole, mutated)


def _definitions(tree: cst.Module) -> Iterator[tuple[str, cst.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, cst.FunctionDef):
            yield node.name.value, node
        elif isinstance(node, cst.ClassDef):
            methods = (child for child in node.body.body if isinstance(child, cst.FunctionDef))
            yield from ((f"{node.name.value}.{method.name.value}", method) for method in methods)


def _nodes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """What mutmut mutates below a node."""
    circuit_open = isinstance(node, cst.Annotation | cst.Decorator | cst.Param) or (
        isinstance(node, cst.Call) and getattr(node.func, "value", None) in ("len", "isinstance")
    )
    if not circuit_open:
        yield node
        for child in node.children:
            yield from _nodes(child)


def _difference(before: str, after: str) -> str:
    """The lines that differ: "before => after"."""
    old, new = before.splitlines(), after.splitlines()
    same = next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new))
    )
    old, new = old[same:][::-1], new[same:][::-1]
    same = next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new))
    )
    told = (" ".join(line.strip() for line in lines[same:][::-1]) for lines in (old, new))
    return " => ".join(told)


def code_of(source: str, function: FunctionType) -> CodeType | None:
    """What a function's source compiles to in the place of `function`; None: it does not."""
    try:
        module = compile(
            f"from __future__ import annotations\n{source}", function.__code__.co_filename, "exec"
        )
    except SyntaxError:
        return None
    found = [c for c in module.co_consts if isinstance(c, CodeType) and c.co_name == function.__name__]
    return found[0].replace(
        co_qualname=function.__qualname__, co_firstlineno=function.__code__.co_firstlineno
    )


def functions_of(module: Any) -> dict[str, list[FunctionType]]:
    """The live functions of a module by their qualified name: whoever imported one has the same."""
    found: dict[str, list[FunctionType]] = {}
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename == module.__file__:
            found.setdefault(thing.__code__.co_qualname, []).append(thing)
    return found


@dataclass
class MutationRun:
    """A plugin of pytest that tries the mutants of one module instead of running the tests once."""

    module: str
    mutants: Sequence[Mutation]
    note: Callable[[Mutation, str], None]
    items: list[pytest.Item] = field(default_factory=list)
    seconds: dict[int, float] = field(default_factory=dict)
    entered: dict[int, list[str]] = field(default_factory=dict)
    kills: Counter[tuple[str, int]] = field(default_factory=Counter)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("the tests cannot be collected")
        self.items = session.items
        gc.unfreeze()
        self.functions = functions_of(importlib.import_module(self.module))
        gc.collect()
        gc.freeze()  # forks share what is there
        told = in_child(self.watch)
        if isinstance(told, str) or told["failed"]:
            raise session.Interrupted(f"tests fail without a mutant: {told}")
        self.seconds = dict(enumerate(told["seconds"]))
        self.entered = dict(enumerate(told["entered"]))
        for mutant in self.mutants:
            self.note(mutant, self.verdict(mutant))
        return True

    def watch(self) -> dict[str, Any]:
        """Run every test once: what it takes, and which functions of the module it enters."""
        names = {code.__code__: name for name, found in self.functions.items() for code in found}
        seconds, entered, failed = [], [], []
        for i, item in enumerate(self.items):
            begun, profile = time.process_time(), Profile(subcalls=False, builtins=False)
            passed = profile.runcall(self.passes, i)
            seconds.append(time.process_time() - begun)
            entered.append(sorted({names[entry.code] for entry in profile.getstats() if entry.code in names}))
            failed += [] if passed else [item.nodeid]
        return {"seconds": seconds, "entered": entered, "failed": failed}

    def passes(self, i: int) -> bool:
        reports = runtestprotocol(self.items[i], log=False, nextitem=None)
        return not any(report.failed for report in reports)

    def verdict(self, mutant: Mutation) -> str:
        """What becomes of it: killed, survived, timeout; same where the code is, or there is none."""
        live = self.functions.get(mutant.function, [])
        code = code_of(mutant.after, live[0]) if live else None
        if code is None or code == code_of(mutant.before, live[0]):
            return "same"
        tests = [i for i, entered in self.entered.items() if mutant.function in entered]
        tests.sort(key=lambda i: (-self.kills[mutant.function, i], self.seconds[i]))

        def finds(i: int) -> bool:
            signal.setitimer(signal.ITIMER_PROF, 1 + 10 * self.seconds[i])  # of a core; it ends the process
            return not self.passes(i)

        def work() -> int:
            for function in live:
                function.__code__ = code
            return next((i for i in tests if finds(i)), -1)

        told = in_child(work)
        if isinstance(told, int):
            self.kills[mutant.function, told] += 1
            return "survived" if told < 0 else "killed"
        return told


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` gives in a fork of this process; "timeout" if a signal ends it, "killed" if it dies."""
    ear, mouth = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(ear)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
            signal.alarm(PATIENCE_S)
            os.write(mouth, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(mouth)
    with os.fdopen(ear) as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if told:
        return json.loads(told)
    return "timeout" if os.WIFSIGNALED(status) else "killed"


def explained(module: str) -> dict[str, str]:
    """The mutants of a module that no test can kill, with the reason."""
    found, here = {}, ""
    for line in EXPLAINED.read_text().splitlines():
        if line.startswith("["):
            here = line.strip("[]")
        elif line and not line.startswith("#") and here == module:
            name, _, why = line.rpartition("  # ")
            found[name] = why
    return found


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def run(module: str, files: Sequence[str], survivors: bool) -> dict[str, str]:
    """The verdict of every mutant of a module, by name."""
    path = Path(str(importlib.import_module(module).__file__))
    source, made = path.read_text(), list(mutants_of(path.read_text()))
    tests = [(ROOT / "tests" / file.partition("::")[0]).read_text() for file in files]
    kept = KEPT / f"{module}.jsonl"
    stamp = [digest(source), "" if survivors else digest(*tests, *files)]
    verdicts: dict[str, str] = {}
    if kept.exists():
        head, *lines = map(json.loads, kept.read_text().splitlines())
        if head[0] == stamp[0] and (survivors or head[1] == stamp[1]):
            verdicts = {name: verdict for name, verdict in lines if not survivors or verdict != "survived"}
    with kept.open("w") as file:
        for line in (stamp, *verdicts.items()):
            print(json.dumps(line), file=file)
    to_try = [mutant for mutant in made if mutant.name not in verdicts]
    with kept.open("a") as file, os.fdopen(os.dup(2), "w") as screen:

        def note(mutant: Mutation, verdict: str) -> None:
            verdicts[mutant.name] = verdict
            print(json.dumps((mutant.name, verdict)), file=file, flush=True)
            print(f"\r{module}: {len(verdicts)} of {len(made)}", end="", file=screen, flush=True)

        if to_try:
            chosen = [str(ROOT / "tests" / name) for name in files]
            status = pytest.main([*PYTEST, *chosen], plugins=[MutationRun(module, to_try, note)])
            print(file=screen)
            if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                raise SystemExit(f"{module}: pytest ended with {status!r}")
    return {mutant.name: verdicts[mutant.name] for mutant in made}


def report(module: str, verdicts: dict[str, str]) -> dict[str, Any]:
    """Counts of one module; prints the survivors that nothing explains, and what explains none."""
    known = explained(module)
    alive = [name for name, verdict in verdicts.items() if verdict == "survived"]
    for name in alive:
        if name not in known:
            print(f"survived  {name}")
    for name in known.keys() - set(alive):
        print(f"explained, but no survivor  {name}")
    counts = Counter(verdict for verdict in verdicts.values() if verdict != "same")
    same = sum(name in known for name in alive)
    total, dead = counts.total(), counts["killed"] + counts["timeout"]
    found = {"module": module, "mutants": total, "killed": counts["killed"], "timed_out": counts["timeout"]}
    score = round(100 * dead / max(1, total - same), 1)
    found |= {"survived": counts["survived"], "explained": same, "score_percent": score}
    return found | {"commit": commit()}


def main() -> None:
    modules: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutants"]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("module", nargs="*", help="default: all of pyproject.toml")
    parser.add_argument("--survivors", action="store_true", help="try again only what survived")
    parser.add_argument("--json", type=Path, help="write the counts here, beside those of other modules")
    given = parser.parse_args()
    KEPT.mkdir(exist_ok=True)
    rows = {}
    for module in given.module or modules:
        rows[module] = report(module, run(module, modules[module], given.survivors))
        print(" ".join(f"{name}={value}" for name, value in rows[module].items()), flush=True)
    if given.json:
        before = json.loads(given.json.read_text())["modules"] if given.json.exists() else []
        rows = {row["module"]: row for row in before} | rows
        versions = {name: version_of(name) for name in ("mutmut", "libcst", "pytest", "hypothesis")}
        ordered = [rows[module] for module in modules if module in rows]
        content = about("make mutants", **versions) | {"modules": ordered}
        given.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
