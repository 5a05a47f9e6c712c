# SPDX-License-Identifier: Apache-2.0
"""Running the emitted CUDA of the sm_80 family on the CPU, without a GPU.

The text of a unit is compiled by the C++ compiler against the headers of `include/` instead of CUDA's and of
`runtime/ptx`; the module that comes out is called like any other, with CPU tensors, and runs the kernels that
its launch code starts: the threads of a block are fibers, and mma.sync, ldmatrix, shuffles and barriers are
where they meet. What a GPU forgives or leaves undefined is an error or a NaN here:

- shared memory is NaN before each block, and its bounds and alignment are checked; so is what lies behind it;
- an asynchronous copy makes its destination NaN when it is started and fills it when it is waited for;
- fibers run in an order that a seed shuffles (AFC_EMULATOR_SEED), so that a missing barrier is seen;
- lanes of a warp that meet at different operations, and threads that wait for ever, are reported.

It says nothing about registers, speed or memory order; blocks run one after another.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

from afc.api import module_spec
from afc.build import Cache, CppUnit, ModuleSpec, Toolchain, cached_module
from afc.frontend import check_file
from afc.options import Options
from afc.runtime.attention import Attention
from afc.runtime.loading import import_module

INCLUDE = Path(__file__).parent / "include"
ISA = "x86-64-v3"
# Without -O3: kernels are long, and run once.
FLAGS = ("-O1", "-Wno-unknown-pragmas", "-Wno-attributes")


def emulated(spec: ModuleSpec) -> ModuleSpec:
    """The module of a CUDA spec with kernels that run on the CPU; its first architecture is taken."""
    core = (INCLUDE / "emulator.cpp").read_text(encoding="utf-8")
    units = [*spec.cpp, CppUnit("emulator", core, ISA, (INCLUDE,), FLAGS)]
    for symbol, group in spec.cuda.items():
        text = group[0].text
        units.append(CppUnit(group[0].name, _kernels(symbol, text), ISA, (INCLUDE,), FLAGS))
    return ModuleSpec(spec.entries, _renamed(spec), tuple(units), {})


def _kernels(symbol: str, text: str) -> str:
    """The text, with a table of its kernels in the place of the images."""
    marker = 'extern "C" __global__ void '
    names = [part.partition("(const")[0].split()[-1] for part in text.split(marker)[1:]]
    rows = "\n".join(f'    {{"{name}", {name}}},' for name in names)
    return (
        f'#include "emulator.hpp"\n{text}\n'
        f"static const emulator::Kernel emulated_kernels[] = {{\n{rows}\n}};\n"
        f'extern "C" const emulator::Kernels {symbol} = {{emulated_kernels, {len(names)}}};\n'
    )


def _renamed(spec: ModuleSpec) -> str:
    """Metadata with torch operators of their own, by the texts: a GPU may run the same program here too."""
    texts = "".join(group[0].text for group in spec.cuda.values())
    data = json.loads(spec.metadata)
    for item in data["attentions"].values():
        item["key"] = hashlib.sha256(f"emulated {item['key']} {texts}".encode()).hexdigest()[:16]
    return json.dumps(data)


def load(path: str | Path, *, arch: str = "sm_86", **options: Any) -> ModuleType:
    """What `afc.load(path, backend="cuda", **options)` gives, for CPU tensors. Options: D, Dqk, Dv, dtype."""
    head = options.pop("D", 64)
    heads = (options.pop("Dqk", head), options.pop("Dv", head))
    dtype = options.pop("dtype", "bfloat16")
    chosen = Options(("cuda",), (heads,), (dtype,), (arch,), tuple(sorted(options.items())), True)
    spec = emulated(module_spec(check_file(path), chosen))
    stem = f"emulated_{Path(path).stem}"
    return for_cpu_tensors(import_module(cached_module(stem, spec, Toolchain.find(cuda=False), Cache())))


def for_cpu_tensors(module: ModuleType) -> ModuleType:
    """The module, with its CUDA entries chosen for tensors of the CPU."""
    for item in vars(module).values():
        if isinstance(item, Attention):
            for (_, *key), entry in list(item.entries.items()):
                item.entries[("cpu", *key)] = entry  # type: ignore[index]
    return module
