# SPDX-License-Identifier: Apache-2.0
"""Scalar formulas and their interpreters: evaluate, differentiate, bound, print."""
