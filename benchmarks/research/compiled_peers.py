"""What compilers make of attention's inner loop, kvkit's beside others', for an H100 that need not be here.

    python -m benchmarks.research.compiled_peers --lmcache FOLDER --json FILE

FOLDER has LMCache's sources, such as its unpacked wheel. FlexAttention is the installed PyTorch's template,
filled in as its compiler does, with its default tile on an H100.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any

import torch
from jinja2 import Environment

from kvkit.environment import DISTRIBUTION, version_of
from kvkit.kernels.attention.problems import ATTENTIONS, LLAMA_8B
from kvkit.kernels.tuning.cases import Work
from kvkit.kernels.tuning.compiling import compile_for
from kvkit.kernels.tuning.configs import KernelConfig, Launch
from kvkit.kernels.tuning.problems import every_problem
from kvkit.lab.compiling.prediction import RATES, predict
from kvkit.lab.files import about

TARGET = "sm_90"
ROWS, KEYS, BLOCK = 1280, 8192, 128
FLEX = 128, 64, 8, 3
"""PyTorch's h100_default_flex_config for bfloat16 and heads of 128: rows, keys, warps, stages."""
SIZE, HEADS, KV_HEADS = LLAMA_8B.size, LLAMA_8B.query_heads, LLAMA_8B.heads


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def kvkit() -> Iterator[tuple[str, Launch, tuple[int, int]]]:
    """`blend_attention` over pages of 16 tokens and over one block: its default, and FlexAttention's tile."""
    theirs = KernelConfig((("TILE_ROWS", FLEX[0]), ("TILE_KEYS", FLEX[1])), FLEX[2], FLEX[3])
    for spec in (ATTENTIONS[1], next(spec for spec in ATTENTIONS if spec.block_tokens is None)):
        (problem,) = (problem for problem in every_problem() if problem.name == spec.name)
        case = problem.make(torch.device("cpu"), False)
        for config in dict.fromkeys((problem.space[0], theirs)):
            launches = case.launches(config)
            (launch,) = (
                one for one in launches if isinstance(one, Launch) and one.kernel.__name__ == "attend"
            )
            tiles = dict(config.tiles)
            pages = f"pages of {spec.block_tokens}" if spec.block_tokens else "one block"
            yield (
                f"kvkit {version_of(DISTRIBUTION)}, {pages}",
                launch,
                (tiles["TILE_ROWS"], tiles["TILE_KEYS"]),
            )


def flex_attention(folder: Path) -> tuple[str, Launch, tuple[int, int]]:
    """FlexAttention of rows at positions, with a block mask; its source is written to `folder`."""
    tile_rows, tile_keys, warps, stages = FLEX
    tables = {"KV_NUM_BLKS": (1, 1, ROWS // BLOCK), "KV_IDX": (1, 1, ROWS // BLOCK, KEYS // BLOCK)}
    tensors = {
        "Q": _tensor(1, HEADS, ROWS, SIZE),
        "K": _tensor(1, KV_HEADS, KEYS, SIZE),
        "V": _tensor(1, KV_HEADS, KEYS, SIZE),
        "LSE": _tensor(1, HEADS, ROWS, dtype=torch.float32),
        "MAX": _tensor(0, dtype=torch.float32),
        **{name: _tensor(*shape, dtype=torch.int32) for name, shape in tables.items()},
        **{f"FULL_{name}": _tensor(*shape, dtype=torch.int32) for name, shape in tables.items()},
        "POSITIONS": _tensor(ROWS, dtype=torch.int32),
        "OUT": _tensor(1, HEADS, ROWS, SIZE),
    }
    constants: dict[str, Any] = {
        **dict.fromkeys(("IS_DIVISIBLE", "SAFE_HEAD_DIM", "HAS_FULL_BLOCKS", "OUTPUT_LOGSUMEXP"), True),
        **dict.fromkeys(
            ("PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "OUTPUT_MAX"), False
        ),
        **dict.fromkeys(("QK_HEAD_DIM", "QK_HEAD_DIM_ROUNDED", "V_HEAD_DIM", "V_HEAD_DIM_ROUNDED"), SIZE),
        "SPARSE_Q_BLOCK_SIZE": BLOCK,
        "SPARSE_KV_BLOCK_SIZE": BLOCK,
        "BLOCK_M": tile_rows,
        "BLOCK_N": tile_keys,
        "GQA_SHARED_HEADS": HEADS // KV_HEADS,
        "SM_SCALE": SIZE**-0.5,
        "FLOAT32_PRECISION": "ieee",
    }
    defines = "\n".join(f"{name}: tl.constexpr = {value!r}" for name, value in constants.items())
    defines += "\nINDEX_DTYPE: tl.constexpr = tl.int32"
    names = ", ".join(f"arg_{name}" for name in tensors)
    inputs = "\n".join(f"{name} = arg_{name}" for name in tensors)

    def modification(subgraph_number: int, output_name: str, **given: Any) -> str:
        mask = f"{given['n']} <= tl.load(arg_POSITIONS + {given['m']})"
        return f"{output_name} = {mask if subgraph_number else given['score']}"

    def stride(name: str, axis: int | None = None) -> object:
        strides = tensors[name].stride()
        return strides[axis] if axis is not None else ", ".join(map(str, strides))

    def store_output(indices: tuple[str, ...], value: str, mask: str, **_: Any) -> str:
        offset = " + ".join(f"{i} * {n}" for i, n in zip(indices, tensors["OUT"].stride(), strict=True))
        return f"tl.store(arg_OUT + {offset}, {value}, mask={mask})"

    environment = Environment()  # of source code, not of a page: nothing is escaped
    environment.filters["indent_except_first"] = lambda text, levels: text.replace(
        "\n", "\n" + "    " * levels
    )
    templates = Path(torch.__path__[0]) / "_inductor" / "kernel" / "flex" / "templates"
    parts = ("flex_attention", "utilities", "common")
    text = "\n".join((templates / f"{part}.py.jinja").read_text() for part in parts)
    head = f"import triton\nimport triton.language as tl\n\n@triton.jit\ndef flex_attention({names}):\n"
    body = environment.from_string(text).render(
        def_kernel=lambda *_: head + indent(f"{defines}\n{inputs}", "    "),
        gen_argdefs=lambda: names,
        gen_defines=lambda: defines,
        size=lambda name, axis: tensors[name].shape[axis],
        stride=stride,
        modification=modification,
        store_output=store_output,
        **constants,
        USE_TMA=False,
    )
    path = folder / "flex_attention.py"
    path.write_text(body)
    grid = (ROWS // tile_rows, 1, HEADS)
    arguments = {f"arg_{name}": tensor for name, tensor in tensors.items()}
    launch = Launch(_loaded(path).flex_attention, grid, arguments, KernelConfig((), warps, stages))
    return f"FlexAttention, PyTorch {torch.__version__.partition('+')[0]}", launch, (tile_rows, tile_keys)


def lmcache(folder: Path) -> Iterator[tuple[str, Launch, tuple[int, int]]]:
    """LMCache's block-sparse attention at the block that its backend takes, and at its function's default."""
    kernels = folder / "lmcache" / "v1" / "compute" / "attention" / "triton_kernels"
    kernel = _loaded(kernels / "block_sparse_attention.py")._block_sparse_attn_fwd_kernel
    (version,) = (path.name.split("-")[1] for path in folder.glob("lmcache-*"))
    q, k = _tensor(ROWS, HEADS, SIZE), _tensor(KEYS, KV_HEADS, SIZE)
    lse = _tensor(ROWS, HEADS, dtype=torch.float32)
    ids = _tensor(KEYS, dtype=torch.int32)
    for block in (32, 64):
        tensors = {"Q_ptr": q, "K_ptr": k, "V_ptr": k, "O_ptr": q, "LSE_ptr": lse}
        tables = {"block_indices_ptr": ids, "block_indptr_ptr": ids}
        sides = {"q": q, "k": k, "v": k, "o": q}
        strides = {f"stride_{n}{axis}": t.stride(i) for n, t in sides.items() for i, axis in enumerate("mhd")}
        strides |= {"stride_lm": lse.stride(0), "stride_lh": lse.stride(1)}
        sizes = {"sm_scale": SIZE**-0.5, "seq_len_q": ROWS, "seq_len_k": KEYS, "NUM_HEADS": HEADS}
        sizes |= {
            "num_csr_rows": ROWS // block,
            "NUM_KV_HEADS": KV_HEADS,
            "HEAD_DIM": SIZE,
            "BLOCK_M": block,
            "BLOCK_N": block,
        }
        config = KernelConfig((), warps=4, stages=3)  # Triton's defaults: the launch names none
        launch = Launch(kernel, (ROWS // block, HEADS), tensors | tables | strides | sizes, config)
        yield f"LMCache {version}, blocks of {block}", launch, (block, block)


def measured(name: str, launch: Launch, tile: tuple[int, int]) -> dict[str, Any]:
    """What is in the table: figures of the compiled loop, none of a run."""
    done = compile_for(launch, TARGET)
    work = Work(1, 4 * tile[0] * tile[1] * SIZE, 1)  # of one turn of the loop
    return {
        "kernel": name,
        "tile": f"{tile[0]} x {tile[1]}",
        "warps": launch.config.warps,
        "stages": launch.config.stages,
        "registers": done.registers,
        "spill_bytes": done.spill_bytes,
        "instructions": done.instructions,
        "per_mma": round(predict(work, done, launch.config.warps, 1, RATES[TARGET]).per_mma or 0, 2),
        "waits": done.waits,
        "in_flight": done.in_flight,
        "blocks_per_sm": done.blocks_per_sm,
    }


def main() -> None:
    """Compile all of them, print what came of it, and write it to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.research.compiled_peers")
    parser.add_argument("--lmcache", type=Path, help="folder with LMCache's sources; left out without")
    parser.add_argument("--json", type=Path, required=True, help="write the table to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [*kvkit(), flex_attention(Path(folder))]
        if arguments.lmcache:
            found += lmcache(arguments.lmcache)
        kernels = [measured(*one) for one in found]
    for kernel in kernels:
        print(*kernel.values(), sep=" | ")
    lines = ",\n".join(f"  {json.dumps(kernel)}" for kernel in kernels)
    told = about("python -m benchmarks.research.compiled_peers") | {"target": TARGET}
    head = json.dumps(told | {"triton": version_of("triton")}, indent=1).removesuffix("\n}")
    arguments.json.write_text(f'{head},\n "kernels": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
