# SPDX-License-Identifier: Apache-2.0
"""Two oracles that need no compiler: the formulas, dense in float64, and the schedule, tile by tile."""

from afc.reference.dense import Call, Gradients, Result, backward, forward
from afc.reference.tiled import run_backward, run_forward

__all__ = ["Call", "Gradients", "Result", "backward", "forward", "run_backward", "run_forward"]
