# SPDX-License-Identifier: Apache-2.0
"""LaunchPlan to text: contexts are decided here, the skeletons are in `templates/`."""
