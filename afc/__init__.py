# SPDX-License-Identifier: Apache-2.0
"""afc: a compiler for attention.

    errors, options  ->  expr (scalar formulas)  ->  ir (Program, MaskPlan, TiledKernel, LaunchPlan)
        ->  frontend, passes, masks, schedule, reference, render  ->  api, cli
    build (toolchain, cache, artefact) and runtime (calls from Python) see text and files, never IR.

`docs/architecture.md` is the map.
"""

__version__ = "0.1.0"
