# SPDX-License-Identifier: Apache-2.0
"""`python -m afc` is the command line."""

import sys

from afc.cli import main

sys.exit(main())
