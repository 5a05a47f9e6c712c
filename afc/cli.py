# SPDX-License-Identifier: Apache-2.0
"""The command line: `afc compile | check | test | explain | viz | doctor | config | cache`.

Exit codes: 0 done, 1 the source is wrong, 2 the request is wrong, 3 a compiler is missing or failed, 70 a
fault of afc.
Nothing here imports torch; subcommands import what they need.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afc import __version__
from afc.errors import AfcError, Diagnostic, SourceError, ToolchainError, UsageError, render
from afc.errors import to_json as diagnostic_json

CODE_FORMS = ("cubin", "ptx")  # bytes for a file; the stages are texts
STAGES = ("ast", "program", "plan", "tiled", "cpp", "cu", "launch")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    parser = _parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # argparse prints usage and exits with 2
        return int(stop.code or 0)
    try:
        return int(args.run(args))
    except AfcError as error:
        _report(error, args)
        return error.exit_code
    except BrokenPipeError:
        return 0
    except Exception:  # the edge of the process: shown whole, and the exit code says that the fault is ours
        traceback.print_exc()
        print(
            f"error[E0900]: internal error of afc {__version__}; please report it with the text above",
            file=sys.stderr,
        )
        return 70


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="afc", description="A compiler for attention.")
    parser.add_argument("--version", action="version", version=f"afc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    compile_ = commands.add_parser("compile", help="compile a .attn file to an importable module")
    compile_.add_argument("file")
    compile_.add_argument("-o", "--output", help="the module to write, such as kernel.so")
    compile_.add_argument(
        "--emit", choices=(*STAGES, *CODE_FORMS), help="print a stage, or write GPU code, instead of building"
    )
    _build_options(compile_)
    compile_.add_argument(
        "--gate",
        choices=("warn", "fail", "off"),
        default="warn",
        help="GPU kernels that spill registers: try a smaller tile and warn, fail, or say nothing",
    )
    compile_.add_argument(
        "--cuda-compiler",
        choices=("nvcc", "nvrtc"),
        help="what compiles the GPU kernels (default: nvcc, and NVRTC where there is no nvcc)",
    )
    compile_.add_argument(
        "--no-python", action="store_true", help="leave the Python part out: for C programs"
    )
    compile_.add_argument("--header", metavar="FILE.h", help="write a C header of the module's functions")
    compile_.add_argument("--depfile", metavar="FILE.d", help="write which files the module depends on")
    compile_.add_argument("-j", "--jobs", type=int, help="compilers at once")
    compile_.add_argument("-v", "--verbose", action="store_true", help="say what was built")
    compile_.add_argument("--json", action="store_true", help="errors as JSON on stdout")
    compile_.set_defaults(run=_compile)

    check = commands.add_parser("check", help="check files and run their examples")
    check.add_argument("files", nargs="+")
    check.add_argument("--json", action="store_true", help="findings as JSON on stdout")
    check.set_defaults(run=_check)

    test = commands.add_parser("test", help="run the example lines of files")
    test.add_argument("files", nargs="+")
    test.set_defaults(run=_test)

    explain = commands.add_parser(
        "explain", help="say what an error code means, or what a file becomes and which tiles it visits"
    )
    explain.add_argument("what", metavar="CODE|FILE")
    explain.add_argument("--seq", type=int, default=4096, help="queries and keys (default: 4096)")
    explain.add_argument("--kernels", action="store_true", help="compile GPU kernels and show their figures")
    _build_options(explain)
    explain.set_defaults(run=_explain)

    viz = commands.add_parser("viz", help="draw the mask of a file: elements and tiles")
    viz.add_argument("file")
    viz.add_argument("--seq", type=int, default=512, help="queries and keys (default: 512)")
    viz.add_argument("-o", "--output", help="the SVG file to write (default: text in the terminal)")
    viz.add_argument("--attention", help="one attention of the file (default: all)")
    _build_options(viz)
    viz.set_defaults(run=_viz)

    doctor = commands.add_parser("doctor", help="say what was found, where, and what mends what is missing")
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(run=_doctor)

    config = commands.add_parser("config", help="print a folder: of the CMake package, or of the C headers")
    config.add_argument("what", choices=("cmake", "include"))
    config.set_defaults(run=_config)

    cache = commands.add_parser("cache", help="the cache of compiled modules")
    cache.add_argument("action", choices=("dir", "ls", "clean"))
    cache.set_defaults(run=_cache)
    return parser


def _build_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", help="cpu, cuda or cpu,cuda (default: cpu, and cuda where a CUDA compiler is found)"
    )
    parser.add_argument(
        "--arch",
        help="GPU architectures, such as sm_80,sm_90, or compute_80 for PTX that the driver compiles "
        "(default: sm_80,sm_86,sm_90,sm_120,compute_80)",
    )
    parser.add_argument(
        "--dtype", help="storage types, such as bf16,fp16 (default: float32 on the CPU, bfloat16 on CUDA)"
    )
    parser.add_argument(
        "-D",
        dest="defines",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="head size (D=64,128, or Dqk=192 with Dv=128), or a run-time parameter to fix (w=1024)",
    )
    parser.add_argument("--no-backward", action="store_true", help="leave the backward pass out")


def _options(args: argparse.Namespace) -> Any:
    from afc import options as opt

    heads: dict[str, tuple[int, ...]] = {}
    constants: dict[str, opt.Constant] = {}
    for item in args.defines:
        name, equals, value = item.partition("=")
        if not equals or not name or not value:
            raise UsageError.of("E0617", f"-D {item}: expected NAME=VALUE")
        if name in ("D", "Dqk", "Dv"):
            heads[name] = _integers(name, value)
        else:
            constants[name] = opt.parse_constant(value)
    return opt.Options(
        opt.backend_names(args.backend.split(",")) if args.backend else _default_backends(args),
        opt.head_pairs(heads),
        tuple(opt.dtype_name(d) for d in args.dtype.split(",")) if args.dtype else (),
        _archs(args.arch) if args.arch else opt.DEFAULT_ARCHS,
        tuple(sorted(constants.items())),
        not args.no_backward,
    )


def _integers(name: str, value: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise UsageError.of("E0617", f"-D {name}={value}: expected ints") from None


def _archs(text: str) -> tuple[str, ...]:
    from afc.build import Arch

    for part in text.split(","):
        try:
            arch = Arch.parse(part)
        except ValueError as error:
            raise UsageError.of(
                "E0618",
                f"--arch {part}: {error}",
                hint="for example sm_90, compute_86:sm_90, or compute_80 for PTX",
            ) from None
        if arch.virtual_capability < 80:
            raise UsageError.of(
                "E0618", f"--arch {part}: the GPU kernels need compute capability 8.0 or later"
            )
    return tuple(text.split(","))


def _default_backends(args: argparse.Namespace) -> tuple[str, ...]:
    """The CPU; for a build also CUDA, where its compiler is found."""
    if args.command != "compile" or args.emit:
        return ("cpu",)
    from afc.build import find_cuda

    try:
        find_cuda(args.cuda_compiler)
    except ToolchainError:
        return ("cpu",)
    return ("cpu", "cuda")


def _compile(args: argparse.Namespace) -> int:
    from afc import api
    from afc.build.artifact import write_file
    from afc.frontend import check_file

    options = _options(args)
    if args.emit in CODE_FORMS:
        if not args.output:
            hint = f"-o {Path(args.file).stem}.{args.emit}"
            raise UsageError.of("E0619", "where should the GPU code go?", hint=hint)
        code, gpus, notes = api.emit_code(
            args.file, args.emit, options, cuda_compiler=args.cuda_compiler, gate=args.gate
        )
        write_file(code, Path(args.output))
        print(f"{args.output}: tiles of {gpus}", file=sys.stderr)
        for note in notes:
            print(render(note), file=sys.stderr)
        return 0
    if args.emit:
        print(api.emit(args.file, args.emit, options), end="")
        return 0
    if not args.output:
        raise UsageError.of(
            "E0619", "where should the module go?", hint="-o kernel.so, or --emit to print a stage"
        )
    for note in check_file(args.file).notes:
        print(render(note), file=sys.stderr)
    report = api.compile_file(
        args.file,
        args.output,
        options,
        gate=args.gate,
        jobs=args.jobs,
        cuda_compiler=args.cuda_compiler,
        python=not args.no_python,
        header=args.header,
        depfile=args.depfile,
    )
    for note in report.notes:
        print(render(note), file=sys.stderr)
    if args.verbose:
        print(f"{report.path}: {report.units} unit(s), {report.hits} from the cache", file=sys.stderr)
        for cubin in report.cubins:
            for kernel in cubin.kernels:
                print(
                    f"  {kernel.name} {cubin.arch}: {kernel.registers} registers, "
                    f"{kernel.spill_bytes} bytes spilled",
                    file=sys.stderr,
                )
    return 0


def _check(args: argparse.Namespace) -> int:
    from afc.frontend import check_file

    findings: list[Diagnostic] = []
    examples = 0
    code = 0
    for path in args.files:
        try:
            checked = check_file(path)
        except SourceError as error:
            code = max(code, error.exit_code)
            findings += error.diagnostics
            if not args.json:
                _report(error, args)
            continue
        findings += checked.notes
        examples += len(checked.outcomes)
        if not args.json:
            for note in checked.notes:
                print(render(note), file=sys.stderr)
            names = ", ".join(p.name for p in checked.programs) or "no attention"
            print(f"{path}: {names}; {len(checked.outcomes)} example(s) hold")
    if args.json:
        print(
            json.dumps(
                {
                    "schema": 1,
                    "exit_code": code,
                    "examples": examples,
                    "diagnostics": [diagnostic_json(d) for d in findings],
                }
            )
        )
    return code


def _test(args: argparse.Namespace) -> int:
    """A line per example. A file that is wrong in other ways is reported as by `check`."""
    from afc.frontend.parser import parse

    code = 0
    for path in args.files:
        failures, text = _example_failures(path, args)
        code = max(code, 1 if failures is None or failures else 0)
        if failures is None:
            continue
        lines = text.split("\n")
        for example in parse(text, path).examples:
            span = example.span
            shown = " ".join(" ".join(lines[span.line - 1 : span.end_line]).split())
            wrong = [d.message for d in failures if d.span and span.line <= d.span.line <= span.end_line]
            why = "; ".join(wrong).removeprefix("this example does not hold: ")
            verdict = f"wrong  {shown}   ({why})" if wrong else f"ok     {shown}"
            print(f"{path}:{span.line}: {verdict}")
    return code


def _example_failures(path: str, args: argparse.Namespace) -> tuple[list[Diagnostic] | None, str]:
    """Findings in example lines, and the file's text; None after other mistakes, which are reported."""
    from afc.frontend import check_file
    from afc.frontend.parser import parse

    try:
        return [], check_file(path).text
    except SourceError as error:
        wrong = [d for d in error.diagnostics if d.level == "error"]
        text = error.texts.get(path)
        spans = [] if text is None else [e.span for e in parse(text, path).examples]
        inside = all(
            d.span and d.span.file == path and any(s.line <= d.span.line <= s.end_line for s in spans)
            for d in wrong
        )
        if text is not None and inside:
            return wrong, text
        _report(error, args)
        return None, ""


def _explain(args: argparse.Namespace) -> int:
    from afc import explain

    if explain.CODE.fullmatch(args.what) and not Path(args.what).exists():
        print(explain.explain_code(args.what), end="")
    else:
        print(explain.explain_file(args.what, _options(args), args.seq, kernels=args.kernels), end="")
    return 0


def _viz(args: argparse.Namespace) -> int:
    from afc import viz

    pictures = viz.maps(args.file, _options(args), args.seq, args.attention)
    if args.output is None:
        print(viz.text(pictures), end="")
        return 0
    try:
        Path(args.output).write_text(viz.svg(pictures), encoding="utf-8")
    except OSError as error:
        raise UsageError.of("E0521", f"output '{args.output}' cannot be written: {error.strerror}") from None
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from afc import doctor

    findings = doctor.examine()
    print(json.dumps(doctor.as_json(findings)) if args.json else doctor.report(findings))
    return 3 if any(finding.bad for finding in findings) else 0


def _config(args: argparse.Namespace) -> int:
    from afc import paths

    print(paths.cmake() if args.what == "cmake" else paths.runtime())
    return 0


def _cache(args: argparse.Namespace) -> int:
    from afc.build import Cache

    cache = Cache()
    if args.action == "dir":
        print(cache.root)
    elif args.action == "ls":
        for entry in cache.entries():
            print(entry)
    else:
        print(f"removed {cache.clean()} entries")
    return 0


def _report(error: AfcError, args: argparse.Namespace) -> None:
    if getattr(args, "json", False):
        print(json.dumps(error.to_json()))
        return
    texts = dict(getattr(error, "texts", {}))
    for diagnostic in error.diagnostics:
        name = diagnostic.span.file if diagnostic.span else None
        if name is not None and name not in texts and Path(name).is_file():
            texts[name] = Path(name).read_text(encoding="utf-8", errors="replace")
        print(render(diagnostic, texts.get(name) if name else None), file=sys.stderr)
    if isinstance(error, ToolchainError):
        for place in error.searched:
            print(f"searched: {place}", file=sys.stderr)
        if error.log_tail:
            print(error.log_tail, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
