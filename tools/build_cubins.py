"""Compile every kernel.cu for the architectures that the wheel ships cubins for, and write them with their manifest.

python tools/build_cubins.py [--check]

Needs cuda-bindings and nvidia-cuda-nvrtc, no GPU and no torch. The same sources and the same NVRTC give the same bytes.
With --check nothing is written: exit 1, naming each file, when one is stale, damaged, missing or of no source.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from sglang_sm120.kernels.cuda import build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when something is stale")
    if parser.parse_args().check:
        problems = check()
        for problem in problems:
            print(problem)
        print(f"{len(build.sources())} sources, {len(problems)} problems")
        sys.exit(bool(problems))
    write()


def check() -> list[str]:
    """What is wrong with the stored cubins, without compiling: a line for each."""
    problems = []
    wanted = set()
    for source in build.sources():
        for arch in build.PREBUILT_ARCHS:
            wanted.add(build.cubin_name(source, arch))
            cubin, reason = build.prebuilt_cubin(source, arch)
            if cubin is None:
                problems.append(f"{build.op_name(source)}: {reason}")
    stored = {path.name for path in build.CUBINS.glob("*.cubin.xz")} | build.read_manifest().keys()
    return problems + [f"{name}: no source has it" for name in sorted(stored - wanted)]


def write() -> None:
    manifest = {}
    for source in build.sources():
        for arch in build.PREBUILT_ARCHS:
            name = build.cubin_name(source, arch)
            source_hash = build.source_hash(source)
            cubin = build.compile_cubin(source, arch)
            again = build.compile_cubin(source, arch)
            if source_hash != build.source_hash(source):
                sys.exit(f"{name}: the source or a header was changed meanwhile; run this again")
            if cubin != again:
                sys.exit(f"{name}: compiling it twice gave different bytes")
            build.write_atomic(build.CUBINS / name, build.pack_cubin(cubin))
            manifest[name] = {
                "sha256": hashlib.sha256(cubin).hexdigest(),
                "source_hash": source_hash,
                "nvrtc": build.nvrtc_version(),
                "options": build.options(arch),
            }
            print(f"{name}: {len(cubin):,} bytes, {(build.CUBINS / name).stat().st_size:,} stored")
    for path in build.CUBINS.glob("*.cubin.xz"):
        if path.name not in manifest:
            path.unlink()
            print(f"{path.name}: removed, no source has it")
    build.write_atomic(build.CUBINS / build.MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
