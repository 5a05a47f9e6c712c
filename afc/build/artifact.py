# SPDX-License-Identifier: Apache-2.0
"""Linking an artefact: one shared object that Python imports and C calls.

It holds the objects of the kernels' CPU or launch code, the GPU images as read-only data, the host objects
(runtime/host, compiled once per interpreter and compiler), and a generated stub with the table of entries and
the initialisation function. It needs neither torch, nor a Python library, nor the CUDA runtime.
"""

from __future__ import annotations

import importlib.machinery
import json
import keyword
import os
import re
import secrets
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from afc import paths
from afc.build.cache import Cache
from afc.build.compile import COMPILE_SECONDS, CppUnit, CubinResult, compile_cpp, run_parallel, run_tool
from afc.build.toolchain import Arch, Toolchain, find_python_headers
from afc.errors import Diagnostic, ToolchainError, UsageError

HOST_FLAGS = ("-O1",)  # of a first build they take a share, of a call next to nothing
EXPORTED_SYMBOLS = ("afc_abi_version", "afc_describe", "afc_last_error")

LINK_FLAGS = (
    "-shared",
    "-fPIC",
    "-std=c++17",
    "-O2",
    "-fvisibility=hidden",
    "-Wl,-Bsymbolic",  # two modules in one process never call into each other
    "-Wl,-z,noexecstack",
    "-Wl,-z,relro",
    "-Wl,--build-id=sha1",
    "-Wl,--as-needed",
    "-Wl,--unresolved-symbols=report-all",
    # Python's symbols are there at run time only; all others that are missing are errors, see _unresolved.
    "-Wl,--warn-unresolved-symbols",
)
_LIBRARIES = ("-fopenmp", "-lpthread", "-ldl")
_LITERAL_WIDTH = 100
_UNRESOLVED = re.compile(r"undefined reference to [`']([^']+)'")
_PYTHON_SYMBOL = re.compile(r"_?Py\w+")


@dataclass(frozen=True)
class Image:
    """One compiled GPU image: a cubin, or PTX text for the driver's compiler, as `arch` says.

    `toolkit` is the version of CUDA that made it (13000 for 13.0), 0 if it is not known.
    """

    arch: Arch
    data: bytes
    toolkit: int = 0

    @classmethod
    def of(cls, result: CubinResult) -> Image:
        """The image of a compiled unit."""
        return cls(result.arch, result.cubin, result.toolkit)


@dataclass(frozen=True)
class Variant:
    """An entry's functions for one class of GPUs: their C symbols, as in `ModuleEntry`; the image table that
    they launch from; and the shared memory of a block that GPUs of the class have at least.
    """

    forward: str
    backward: str | None
    workspace: str
    images: str
    shared_bytes: int


@dataclass(frozen=True)
class ModuleEntry:
    """One (attention, dtype, target) configuration of a module.

    `name` is the attention's name and becomes the Python name; `description` is JSON. `forward`, `backward`
    and `workspace` are the C symbols (extern "C") of functions with the signatures in afc_entry; None where
    there is none. `isa` is the instruction set that CPU code needs (a key of ISA_FLAGS), checked at each
    call.

    With `variants`, the best first, the stub defines the functions: each call goes to the variant that suits
    its device.
    """

    name: str
    description: str
    forward: str
    backward: str | None = None
    workspace: str | None = None
    isa: str = "generic"
    variants: tuple[Variant, ...] = ()

    def __post_init__(self) -> None:
        json.loads(self.description)
        symbols = [self.forward, self.backward, self.workspace]
        for variant in self.variants:
            symbols += [variant.forward, variant.backward, variant.workspace, variant.images]
        for symbol in symbols:
            if symbol is not None and not re.fullmatch(r"[A-Za-z_]\w*", symbol):
                raise ValueError(f"entry {self.name}: {symbol!r} is no C symbol")


@dataclass(frozen=True)
class ModuleContent:
    """All that an artefact is linked from.

    `objects` are object files; `images` maps a C symbol to the images in it (declared by launch code as
    `extern "C" const afc_gpu_images <symbol>;`); `metadata` is JSON.
    """

    entries: tuple[ModuleEntry, ...]
    metadata: str
    objects: tuple[bytes, ...] = ()
    images: Mapping[str, tuple[Image, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        json.loads(self.metadata)


def module_stem(destination: Path) -> str:
    """The module name of a file such as `kernel.so` or `kernel.cpython-311-x86_64-linux-gnu.so`.

    Raises UsageError E0520 if Python could not import the file under its name.
    """
    stem, dot, rest = destination.name.partition(".")
    if dot + rest not in importlib.machinery.EXTENSION_SUFFIXES:
        raise UsageError.of(
            "E0520", f"output '{destination}': expected a file name that ends in .so", hint="-o kernel.so"
        )
    if not (stem.isascii() and stem.isidentifier()) or keyword.iskeyword(stem):
        better = re.sub(r"\W", "_", stem, flags=re.ASCII) or "kernel"
        if better[0].isdigit() or keyword.iskeyword(better):
            better = f"kernel_{better}"
        raise UsageError.of(
            "E0520",
            f"output '{destination}': '{stem}' cannot be the name of a Python module",
            hint=f"name it by letters, digits and underscores: -o {better}.so",
        )
    return stem


def check_destination(destination: Path) -> str:
    """The module name of an output file, if it can be imported and its folder can be written.

    Raises UsageError E0520 for a bad name, E0521 for a bad folder.
    """
    stem = module_stem(destination)
    folder = destination.parent
    if not folder.is_dir():
        raise UsageError.of("E0521", f"output '{destination}': there is no folder '{folder}'")
    if destination.is_dir():
        raise UsageError.of("E0521", f"output '{destination}' is a folder, expected a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError.of("E0521", f"output '{destination}': the folder '{folder}' cannot be written")
    return stem


# ---- the stub ------------------------------------------------------------------------------------


def c_string(text: str) -> str:
    """C string literal of a text in UTF-8, split over lines."""
    escaped = []
    for byte in text.encode():
        character = chr(byte)
        if character in '"\\':
            escaped.append("\\" + character)
        elif 32 <= byte < 127 and character != "?":
            escaped.append(character)
        else:
            escaped.append(
                f"\\{byte:03o}"
            )  # always three digits: the next character cannot join; ? avoids trigraphs
    lines, line = [], ""
    for piece in escaped:
        if len(line) + len(piece) > _LITERAL_WIDTH:
            lines.append(line)
            line = ""
        line += piece
    return "\n    ".join(f'"{part}"' for part in (*lines, line))


def _banner(title: str) -> str:
    return f"// ---- {title} ".ljust(100, "-")


def _data_name(symbol: str, number: int) -> str:
    return f"{symbol}_data_{number}"


def _image_row(symbol: str, number: int, image: Image) -> str:
    suffix = f"'{image.arch.suffix}'" if image.arch.suffix else "0"
    form = "true" if image.arch.ptx else "false"
    name = _data_name(symbol, number)
    arch = f"{image.arch.capability}, {image.arch.virtual_capability}, {suffix}"
    return f"    {{{arch}, {form}, {image.toolkit}, {name}, {len(image.data)}}},  // {image.arch}"


def _image_data(symbol: str, number: int, image: Image) -> list[str]:
    name = _data_name(symbol, number)
    terminator = ["    .byte 0"] if image.arch.ptx else []
    lines = [
        '    .section .rodata.afc_images, "a", @progbits',
        "    .balign 64",
        f"    .globl {name}",
        f"    .hidden {name}",
        f"{name}:",
        f'    .incbin "{name}"',
        *terminator,
        "    .previous",
    ]
    body = "\n".join('    "' + line.replace('"', '\\"') + '\\n"' for line in lines)
    return [f"asm(\n{body});", f'extern "C" const unsigned char {name}[];']


def _images_text(symbol: str, images: Sequence[Image]) -> str:
    parts = [line for number, image in enumerate(images) for line in _image_data(symbol, number, image)]
    parts.append(f"static const afc_gpu_image {symbol}_rows[] = {{")
    parts += [_image_row(symbol, number, image) for number, image in enumerate(images)]
    parts.append("};")
    parts.append(f'extern "C" const afc_gpu_images {symbol};')
    parts.append(f"const afc_gpu_images {symbol} = {{{symbol}_rows, {len(images)}}};")
    return "\n".join(parts)


def _declarations(entries: Sequence[ModuleEntry]) -> str:
    lines = {}
    for entry in entries:
        rows: tuple[ModuleEntry | Variant, ...] = (entry, *entry.variants)
        for functions in rows:
            for symbol in (functions.forward, functions.backward):
                if symbol:
                    lines[symbol] = f'extern "C" int {symbol}(const afc_args *args);'
            if functions.workspace:
                lines[functions.workspace] = (
                    f'extern "C" int64_t {functions.workspace}(const afc_args *args, int backward);'
                )
        if len(entry.variants) > 1:
            lines |= {v.images: f'extern "C" const afc_gpu_images {v.images};' for v in entry.variants}
    return "\n".join(lines.values())


def _choices(number: int, entry: ModuleEntry) -> list[str]:
    """The functions of an entry that has variants: each calls that of the variant for the call's device."""
    table, lines = f"variants_{number}", []
    several = len(entry.variants) > 1
    if several:  # a single one needs no device to be found, and names what it lacks itself
        rows = "\n".join(f"    {{&{v.images}, {v.shared_bytes}}}," for v in entry.variants)
        lines.append(f"static const afc_gpu_variant {table}[] = {{  // the best first\n{rows}\n}};")
    calls = [(entry.forward, [v.forward for v in entry.variants])]
    if entry.backward is not None:
        calls.append((entry.backward, [v.backward or "nullptr" for v in entry.variants]))
    for name, targets in calls:
        lines.append(_chosen("int", name, targets, "const afc_args *args", "args", "status", table))
    if entry.workspace is not None:
        targets = [v.workspace for v in entry.variants]
        parameters, values = "const afc_args *args, int backward", "args, backward"
        lines.append(_chosen("int64_t", entry.workspace, targets, parameters, values, "-1", table))
    return lines


def _chosen(
    kind: str, name: str, targets: Sequence[str], parameters: str, values: str, failed: str, table: str
) -> str:
    """A function that calls one of `targets`, by the device of the call."""
    body = [f"  return {targets[0]}({values});"]
    if len(targets) > 1:
        choose = f"afc_gpu_choose({table}, {len(targets)}, args->device, &chosen)"
        body = [
            "  int chosen = 0;",
            f"  if (int status = {choose}) return {failed};",
            f"  {kind} (*const of_class[])({parameters}) = {{{', '.join(targets)}}};",
            f"  return of_class[chosen]({values});",
        ]
    return "\n".join([f'extern "C" {kind} {name}({parameters}) {{', *body, "}"])


def _guard(function: str, symbol: str, isa: str) -> str:
    lines = [f"static int {function}(const afc_args *args) {{"]
    if isa != "generic":
        message = f"this processor lacks the instruction set {isa} that the module was built for"
        lines.append(f'  if (!__builtin_cpu_supports("{isa}")) {{')
        lines.append("    return afc_fail(AFC_NO_KERNEL_FOR_DEVICE,")
        lines.append(f'                    "{message}");')
        lines.append("  }")
    lines += [f"  return afc_call({symbol}, args);", "}"]
    return "\n".join(lines)


def _entry_functions(number: int, entry: ModuleEntry) -> list[str]:
    lines = [_guard(f"forward_{number}", entry.forward, entry.isa)]
    if entry.backward:
        lines.append(_guard(f"backward_{number}", entry.backward, entry.isa))
    symbol = entry.workspace or "nullptr"
    lines.append(
        f"static int64_t workspace_{number}(const afc_args *args, int backward) {{\n"
        f"  return afc_call_workspace({symbol}, args, backward);\n}}"
    )
    return lines


def _entry_row(number: int, entry: ModuleEntry) -> str:
    backward = f"backward_{number}" if entry.backward else "nullptr"
    description = c_string(entry.description)
    return (
        f"    {{{c_string(entry.name)},\n    {description},\n"
        f"     workspace_{number}, forward_{number}, {backward}}},"
    )


def _includes(gpu: bool, python: bool) -> str:
    names = ["abi/afc_abi.h", "host/status.h"]
    names += ["host/driver.h"] if gpu else []
    names += ["host/module.h"] if python else []
    return "\n".join(f'#include "{name}"' for name in names)


def _table(content: ModuleContent) -> list[str]:
    rows = "\n".join(_entry_row(number, entry) for number, entry in enumerate(content.entries))
    metadata = c_string(content.metadata)
    return [
        f"static const afc_entry entries[] = {{\n{rows}\n}};",
        f"static const afc_module table = {{\n    AFC_ABI_VERSION, {len(content.entries)}, entries,\n"
        f"    {metadata}}};",
    ]


def _c_functions(stem: str, entries: Sequence[ModuleEntry]) -> list[tuple[str, str]]:
    """(name, definition) of what C programs link against. The module's name is part of each: of two modules
    that a program links, neither's function is taken for the other's.
    """
    found = [
        (f"{stem}_module", f"const afc_module *{stem}_module(void) {{ return &table; }}"),
        (f"{stem}_last_error", f"const char *{stem}_last_error(void) {{ return afc_last_error(); }}"),
    ]
    for number, entry in enumerate(entries):
        name = f"{stem}_{entry.forward.removesuffix('_forward')}"
        call = "(const afc_args *args)"
        found.append((f"{name}_forward", f"int {name}_forward{call} {{ return forward_{number}(args); }}"))
        if entry.backward:
            body = f"return backward_{number}(args);"
            found.append((f"{name}_backward", f"int {name}_backward{call} {{ {body} }}"))
        parameters = "(const afc_args *args, int backward)"
        body = f"return workspace_{number}(args, backward);"
        found.append((f"{name}_workspace", f"int64_t {name}_workspace{parameters} {{ {body} }}"))
    return found


def _exports(stem: str, entries: Sequence[ModuleEntry], python: bool) -> list[str]:
    parts = [
        '#define AFC_EXPORT extern "C" __attribute__((visibility("default")))',
        "AFC_EXPORT uint32_t afc_abi_version(void) { return AFC_ABI_VERSION; }",
        "AFC_EXPORT const afc_module *afc_describe(void) { return &table; }",
        *(f"AFC_EXPORT {definition}" for _, definition in _c_functions(stem, entries)),
    ]
    if python:
        body = f'return afc_host_init(&table, "{stem}");'
        parts.append(f"AFC_EXPORT struct _object *PyInit_{stem}(void) {{ {body} }}")
    return parts


def stub_text(stem: str, content: ModuleContent, *, python: bool = True) -> str:
    """C++ text of the stub: images, guarded entry functions, the table, and what the module exports."""
    parts = [f"// Module {stem}: table of entries and GPU images. Generated by afc."]
    chooses = any(len(entry.variants) > 1 for entry in content.entries)
    parts.append(_includes(bool(content.images) or chooses, python))
    if content.images:
        parts.append(_banner("GPU images"))
        parts += [_images_text(symbol, images) for symbol, images in sorted(content.images.items())]
    parts += [_banner("entries"), _declarations(content.entries)]
    for number, entry in enumerate(content.entries):
        parts += _choices(number, entry) if entry.variants else []
        parts += _entry_functions(number, entry)
    parts += [*_table(content), _banner("exports"), *_exports(stem, content.entries, python)]
    return "\n\n".join(parts) + "\n"


def _version_script(stem: str, entries: Sequence[ModuleEntry], python: bool) -> str:
    names = [*EXPORTED_SYMBOLS, *(name for name, _ in _c_functions(stem, entries))]
    names += [f"PyInit_{stem}"] if python else []
    return "{ global: " + " ".join(f"{name};" for name in names) + " local: *; };\n"


# ---- linking -------------------------------------------------------------------------------------


def host_units(*, python: bool, gpu: bool) -> list[CppUnit]:
    """The host sources that a module needs.

    Raises ToolchainError E0503 if the headers of Python or pybind11 are missing.
    """
    folder = paths.runtime() / "host"
    names = ["status", *(["driver"] if gpu else [])]
    units = [
        CppUnit(name, (folder / f"{name}.cpp").read_text(encoding="utf-8"), "generic", flags=HOST_FLAGS)
        for name in names
    ]
    if python:
        headers = find_python_headers()
        text = (folder / "module.cpp").read_text(encoding="utf-8")
        folders, salt = headers.include_dirs, headers.identity
        units.append(CppUnit("module", text, "generic", folders, HOST_FLAGS, salt))
    return units


def host_objects(toolchain: Toolchain, cache: Cache, *, python: bool, gpu: bool) -> list[bytes]:
    """Objects of the host sources; compiled on first use, then from the cache."""
    units = host_units(python=python, gpu=gpu)
    return [result.data for result in run_parallel(lambda unit: compile_cpp(unit, toolchain, cache), units)]


def _write_inputs(
    folder: Path, stem: str, content: ModuleContent, objects: Iterable[bytes], python: bool
) -> list[str]:
    """Writes all that the linker reads; returns the names of the object files."""
    names = []
    for number, data in enumerate(objects):
        names.append(f"object{number}.o")
        (folder / names[-1]).write_bytes(data)
    for symbol, images in content.images.items():
        for number, image in enumerate(images):
            (folder / _data_name(symbol, number)).write_bytes(image.data)
    (folder / "stub.cpp").write_text(stub_text(stem, content, python=python), encoding="utf-8")
    (folder / "exports.map").write_text(_version_script(stem, content.entries, python), encoding="utf-8")
    (folder / "include").symlink_to(paths.runtime(), target_is_directory=True)
    return names


def _unresolved(log: str, python: bool) -> list[str]:
    """Symbols that nothing defines; Python's own are there when the module is imported."""
    missing = dict.fromkeys(_UNRESOLVED.findall(log))
    return [name for name in missing if not (python and _PYTHON_SYMBOL.fullmatch(name))]


def _fail_link(
    stem: str, reason: str, command: Sequence[str], log: str, stub: str, cache: Cache
) -> ToolchainError:
    files = {"stub.cpp": stub, "command.txt": " ".join(command) + "\n", "log.txt": log}
    kept = cache.keep_failure(stem, files)
    message = f"module {stem} cannot be linked: {reason}"
    diagnostic = Diagnostic("E0513", "error", message, notes=(f"stub, command and log are kept in {kept}",))
    return ToolchainError(diagnostic, command=command, log=log)


def _link_in(
    folder: Path, stem: str, names: Sequence[str], toolchain: Toolchain, cache: Cache, python: bool
) -> bytes:
    output = f"{stem}.so"
    # programs that link the module look for it under its file name, not where it lay then
    inputs = (
        f"-Wl,-soname,{output}",
        "-I",
        "include",
        "stub.cpp",
        *names,
        "-o",
        output,
        "-Wl,--version-script=exports.map",
    )
    command = (*toolchain.cxx.command, *LINK_FLAGS, *inputs, *_LIBRARIES)
    stub = (folder / "stub.cpp").read_text(encoding="utf-8")
    try:
        status, log = run_tool(command, folder, COMPILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _fail_link(stem, str(error), command, "", stub, cache) from error
    missing = _unresolved(log, python)
    if missing:
        raise _fail_link(stem, f"nothing defines {', '.join(missing)}", command, log, stub, cache)
    if status != 0:
        raise _fail_link(stem, f"the linker failed (exit status {status})", command, log, stub, cache)
    return (folder / output).read_bytes()


def link_module(
    stem: str, content: ModuleContent, toolchain: Toolchain, cache: Cache, *, python: bool = True
) -> bytes:
    """The shared object of a module named `stem`. With python=False it has no Python part and only C can use
    it.

    Raises ToolchainError E0513 if it cannot be linked, E0503 if headers for the Python part are missing, and
    what `compile_cpp` raises.
    """
    host = host_objects(toolchain, cache, python=python, gpu=bool(content.images))
    with tempfile.TemporaryDirectory(prefix="afc-link-") as temporary:
        folder = Path(temporary)
        names = _write_inputs(folder, stem, content, (*content.objects, *host), python)
        return _link_in(folder, stem, names, toolchain, cache, python)


def write_file(data: bytes, destination: Path, *, executable: bool = False) -> None:
    """Writes a file at once: whole under its name, or not at all; a module that is loaded from there is not
    disturbed.

    Raises UsageError E0521 if the folder cannot be written.
    """
    mode = 0o777 if executable else 0o666
    temporary = destination.parent / f".{destination.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, destination)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError.of("E0521", f"output '{destination}' cannot be written: {error.strerror}") from error
