"""Every kernel has tuning problems, whose small ones are correct in the interpreter."""

from __future__ import annotations

import pytest
import torch

from kvkit.kernels.attention import problems as attention
from kvkit.kernels.attention.problems import ATTENTIONS, SCATTERS
from kvkit.kernels.tuning.cases import Problem
from kvkit.kernels.tuning.configs import Launch
from kvkit.kernels.tuning.problems import every_problem
from kvkit.lab.testbed.small_problems import SMALL, small_attention, small_scatter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("problem", SMALL, ids=lambda problem: problem.name)
def test_the_default_is_right_and_nothing_else_is(problem: Problem) -> None:
    case = problem.make(DEVICE, True)
    case.poison()
    assert case.fault(), "what was never written passes"
    case.run(problem.space[0])
    assert case.fault() == ""
    first = [output.clone() for output in case.outputs]
    case.poison()
    assert not any(map(equal_bits, first, case.outputs)), "an output is not what is written"
    assert case.fault(), "what was written before vouches for what was not"


@pytest.mark.parametrize(
    ("problem", "kernel", "names"),
    [
        (small_attention(ATTENTIONS[0]), "attend", ("out", "lse")),
        (small_attention(ATTENTIONS[-1]), "weigh", ("out",)),
        (small_scatter(SCATTERS[1]), "scatter_rows", ("out", "k_pages", "v_pages", "deviation")),
        (attention.deviation_problem(37, 2, 16), "measure", ("out",)),
    ],
)
def test_a_wrong_number_is_found(problem: Problem, kernel: str, names: tuple[str, ...]) -> None:
    case = problem.make(DEVICE, True)
    launches = {launch.kernel.__name__: launch for launch in case.launches(problem.space[0])}
    for name in names:
        case.poison()
        case.run(problem.space[0])
        assert case.fault() == ""
        tensor = launches[kernel].arguments[name]
        tensor[(0,) * tensor.ndim] += 1
        assert case.fault()


def test_names_and_buckets_are_unique() -> None:
    every = every_problem()
    assert len({problem.name for problem in every}) == len(every)
    assert len({problem.bucket for problem in every}) == len(every)


def test_every_kernel_has_a_problem() -> None:
    """All that an `api` starts; merge comes with the attention."""
    assert {problem.bucket.op for problem in every_problem()} == {
        *("copy_rows", "decode_rows", "encode_rows", "pages_to_host", "host_to_pages"),
        *("attend", "attend_hopper", "weigh", "scatter_rows", "measure"),
    }


@pytest.mark.parametrize("problem", every_problem(), ids=lambda problem: problem.name)
def test_a_space_has_the_default_first_and_nothing_twice(problem: Problem) -> None:
    assert len(set(problem.space)) == len(problem.space) > 1
    every = problem.make(torch.device("cpu"), False).launches(None)
    launch = next(launch for launch in every if isinstance(launch, Launch))
    if not torch.cuda.is_available():
        assert launch.config == problem.space[0] or launch.kernel.__name__ != problem.bucket.op


@pytest.mark.parametrize("problem", every_problem(), ids=lambda problem: problem.name)
def test_work_counts_what_cannot_be_avoided(problem: Problem) -> None:
    works = [problem.work(config) for config in problem.space]
    assert all(work.moved_bytes == works[0].moved_bytes > 1 << 20 for work in works)
    assert all(
        (work.flops > 0) == (problem.bucket.op in ("attend", "attend_hopper", "weigh")) for work in works
    )


def test_the_work_of_an_attention_is_that_of_its_visible_keys() -> None:
    """Llama-3.1-8B at 8k: 2 products of 128 channels for 32 heads; tiles take more, but not much."""
    (problem,) = (p for p in every_problem() if p.name == "attention Llama-3.1-8B, 8192 keys")
    rows = attention._rows(ATTENTIONS[1], torch.device("cpu"))
    visible = int((rows.positions + 1).sum()) * 32 * 4 * 128
    fewest = min(problem.space, key=lambda config: dict(config.tiles)["TILE_ROWS"])
    default, small = (problem.work(config).flops for config in (problem.space[0], fewest))
    assert visible < small < default < 1.1 * visible
