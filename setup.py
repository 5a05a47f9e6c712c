# SPDX-License-Identifier: Apache-2.0
"""Packages the top-level data folders beside the code, under afc/_data: grammar, templates, runtime, cmake,
docs.
"""

from pathlib import Path

from setuptools import find_packages, setup

DATA = ("grammar", "templates", "runtime", "cmake")  # with all their folders; of docs the pages alone
ROOT = Path(__file__).parent

folders = [p for name in DATA for p in (ROOT / name, *sorted((ROOT / name).rglob("*"))) if p.is_dir()]
folders.append(ROOT / "docs")
data = {f"afc._data.{'.'.join(p.relative_to(ROOT).parts)}": str(p.relative_to(ROOT)) for p in folders}

setup(
    packages=[*find_packages(include=["afc", "afc.*"]), *data],
    package_dir=data,
    package_data={
        "afc": ["py.typed"],
        **{
            package: ["*.lark", "*.attn", "*.j2", "*.h", "*.hpp", "*.cuh", "*.cpp", "*.md", "*.cmake"]
            for package in data
        },
    },
)
