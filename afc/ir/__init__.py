# SPDX-License-Identifier: Apache-2.0
"""Structures between front end and text: Program, MaskPlan, TiledKernel, LaunchPlan."""
