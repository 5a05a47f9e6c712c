# SPDX-License-Identifier: Apache-2.0
"""Targets as data: limits, tile candidates, spellings. Nothing here asks the machine what it is."""
