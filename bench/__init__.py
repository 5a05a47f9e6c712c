# SPDX-License-Identifier: Apache-2.0
"""Time afc's kernels beside others: ``python -m bench --group plain --systems ours,fa2``.

In the order data passes through it:

==========  =============================================================================
cells       what is timed: named shapes, grouped
inputs      random tensors of a cell, in as many sets as it takes to leave the L2 cache
ours        a cell's callable from afc
peers       the same from SDPA, FlexAttention, FA3 and FA4, with RoPE outside
check       each callable against dense float64 attention, once, before any timing
protocol    when each callable runs and for how long: two regimes, random order
sampler     SM clock, power and temperature while it runs (read only)
run         one cell after the other, under a deadline
report      the JSON file and the table
==========  =============================================================================
"""
