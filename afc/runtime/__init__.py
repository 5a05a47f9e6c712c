# SPDX-License-Identifier: Apache-2.0
"""Calls from Python: gives a built module one callable per attention.

    describe     what a module says of its entries
    attention    the callable: argument checks, choice of entry
    torch_glue   torch operators and autograd; imported once torch is
    late         how that is noticed

A module imports this package when it is itself imported; nothing here imports torch before it is needed.
"""

from __future__ import annotations

from typing import Any

from afc.runtime.describe import ABI_VERSION, ModuleInfo, read_module

__all__ = ["ABI_VERSION", "ModuleInfo", "attach", "read_module"]


def attach(module: Any) -> None:
    """Add one callable per attention to a module.

    Raises ImportError for a module of another call interface.
    """
    from afc.runtime.attention import Attention
    from afc.runtime.late import after_torch
    from afc.runtime.loading import KernelModule

    info = read_module(module)
    for name in info.attentions:
        attention = Attention(module, info, name)
        setattr(module, name, attention)
        after_torch(attention.prepare)
    module.__doc__ = info.doc
    module.__all__ = list(info.attentions)
    module.__class__ = KernelModule
