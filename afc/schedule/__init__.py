# SPDX-License-Identifier: Apache-2.0
"""Program to LaunchPlan for a target."""
