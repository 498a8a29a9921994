"""Writes the uniform gate wrappers and the symbol tables from the CUDA headers found at build time.

Handover is only right if every driver call that could touch a GPU waits at the gate, so the list of wrappers is
derived from cuda.h and never kept by hand. Functions that the interposer answers itself are marked `WF_HOOK(name, …)`
in its sources and are left out here. This script must never invent a signature: whatever it cannot read is an error.

    generate.py --compiler g++ --include DIR --output DIR source.cpp…

It writes symbols.inc (every driver function: name, what the gate does with it), gated.inc (the wrappers), writes.inc
(the functions that may write memory, as far as is known here) and versions.inc (which exported function each version of
a name is, for cuGetProcAddress).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Calls that neither touch a GPU nor change driver state, or that must work while the gate is closed: text lookups,
# symbol resolution, and the checkpoint functions, which are meant for other processes.
UNGATED = re.compile(r"^cu(GetError(String|Name)|DriverGetVersion|CheckpointProcess\w+)$")
# Counted for the survey.
LAUNCH = re.compile(r"^cu(Launch(Kernel|KernelEx|CooperativeKernel\w*|Grid|GridAsync)?|GraphLaunch)(_ptsz)?$")

# Calls that cannot change the contents of memory that the interposer owns, by what their documentation says: they look,
# make, map, load, configure, wait, or write the driver's own memory (arrays, pools, managed memory, module variables).
# A function that no line matches counts as one that may write anything (shadow_install.cpp). Names are matched whole,
# so that a new function of a known family is not taken for harmless.
HARMLESS = re.compile(
    r"""^cu(
    Init|DriverGetVersion|GetError(Name|String)|GetProcAddress|GetExportTable|
    (Mipmapped)?Array(3D)?(Create|Destroy|Get\w+)|
    CheckpointProcess\w+|Coredump\w+|Logs\w+|Profiler\w+|Occupancy\w+|UserObject(Create|Release|Retain)|
    ThreadExchangeStreamCaptureMode|FlushGPUDirectRDMAWrites|
    Ctx(Attach|Create|Destroy|Detach|Get\w+|Set\w+|PopCurrent|PushCurrent|Synchronize|WaitEvent|RecordEvent|FromGreenCtx|
        ResetPersistingL2Cache|(En|Dis)ablePeerAccess)|
    Device(Get\w*|CanAccessPeer|ComputeCapability|PrimaryCtx\w+|TotalMem|SetMemPool|SetGraphMemAttribute|GraphMemTrim|
        (Un)?[Rr]egisterAsyncNotification)|
    DevSmResource\w+|DevResource\w+|GreenCtx\w+|
    Event(Create|Destroy|ElapsedTime|Query|Record|RecordWithFlags|Synchronize)|
    Ipc(Close|Get|Open)(Mem|Event)Handle|
    Func(Get\w+|Set\w+|IsLoaded|Load)|Kernel(Get|Set)\w+|ParamSet\w+|
    Library(Enumerate|Get|Load)\w+|LibraryUnload|Module(Enumerate|Get|Load)\w*|ModuleUnload|Link\w+|
    (Tex|Surf)(Ref|Object)\w+|TensorMap(Encode|Replace)\w+|
    Graphics\w+|(Import|Destroy)External\w+|ExternalMemory\w+|(Signal|Wait)ExternalSemaphoresAsync|
    Pointer(Get|Set)Attributes?|
    Mem(Alloc(Async|FromPoolAsync|Host|Managed|Pitch)?|Free(Async|Host)?)|
    MemHost(Alloc|GetDevicePointer|GetFlags|Register|Unregister)|
    MemGet(AddressRange|Info|Access|AllocationGranularity|AllocationPropertiesFromHandle|MemPool|DefaultMemPool)|
    MemAddress(Reserve|Free)|Mem(Create|Release|RetainAllocationHandle|Map|Unmap|SetAccess|SetMemPool|MapArrayAsync)|
    Mem(Import|Export)(From|To)ShareableHandle|MemPool\w+|MemAdvise|MemPrefetch(Batch)?Async|MemRangeGetAttributes?|
    Stream(AddCallback|AttachMemAsync|BeginCapture(ToGraph)?|CopyAttributes|Create|CreateWithPriority|Destroy|EndCapture|
        Get\w+|IsCapturing|Query|SetAttribute|Synchronize|UpdateCaptureDependencies|WaitEvent|WaitValue(32|64))|
    LaunchHostFunc|
    Graph(Add\w+|Clone|ConditionalHandleCreate|Create|DebugDotPrint|Destroy|DestroyNode|Get\w+|Release\w+|Remove\w+|
        Retain\w+|Upload|ExecGet\w+)|
    Graph(?!Exec)\w*Node(Get|Set|Copy|FindInClone)\w*|
    GraphExec(Host|EventRecord|EventWait|ExternalSemaphoresSignal|ExternalSemaphoresWait)NodeSet(Params|Event)|
    (EGL|GL|VDPAU|D3D)\w+|MulticastGetGranularity
    )(_v[0-9]+)?(_ptds|_ptsz)?$""",
    re.VERBOSE,
)

PROTOTYPE = re.compile(r"\bCUresult\s+(cu[A-Z]\w*)\s*\(([^()]*)\)\s*(?:__attribute__\s*\(\([^;]*\)\))?\s*;")
TYPEDEF = re.compile(r"\(\s*\*\s*PFN_(cu[A-Z]\w*?)_v(\d+)(_ptds|_ptsz)?\s*\)")
HOOK = re.compile(r"^WF_HOOK\(\s*(cu[A-Z]\w*)\b", re.MULTILINE)
VARIANT = re.compile(r"^(cu[A-Z]\w*?)(?:_v(\d+))?(_ptds|_ptsz)?$")

HEADER = "// Written by native/interpose/generate.py from the CUDA headers; not to be edited.\n"
SOURCE = """#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#if __has_include(<cudaProfiler.h>)
#include <cudaProfiler.h>
#endif
#include <cudaTypedefs.h>
"""


@dataclass(frozen=True)
class Function:
    name: str
    parameters: str
    arguments: str


def preprocess(compiler: str, include: Path) -> str:
    """The headers with every version of every function declared, macros resolved."""
    command = [compiler, "-E", "-P", "-x", "c++", "-std=c++20", f"-I{include}", "-"]
    done = subprocess.run(command, input=SOURCE, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"generate.py: {compiler} cannot preprocess the headers in {include}:\n{done.stderr}")
    return done.stdout


def argument_names(name: str, parameters: str) -> str:
    if parameters.strip() in ("", "void"):
        return ""
    names = []
    for parameter in parameters.split(","):
        match = re.search(r"(\w+)\s*(?:\[\w*\])?\s*$", parameter)
        if match is None or len(parameter.split()) < 2:
            raise SystemExit(f"generate.py: cannot read the parameter {parameter.strip()!r} of {name}")
        names.append(match.group(1))
    return ", ".join(names)


def functions(text: str) -> list[Function]:
    found: dict[str, Function] = {}
    for match in PROTOTYPE.finditer(text):
        name, parameters = match.group(1), " ".join(match.group(2).split())
        found.setdefault(name, Function(name, parameters, argument_names(name, parameters)))
    # A change of the header's style would otherwise pass as "few functions"; cuda.h of 12.0 declares more than 500.
    if len(found) < 400:
        raise SystemExit(f"generate.py: only {len(found)} functions found in cuda.h; the header cannot be read")
    return [found[name] for name in sorted(found)]


def versions(text: str, names: set[str]) -> list[tuple[str, int, str, str]]:
    """(name, version, flag, exported function) for each typedef of cudaTypedefs.h.

    The n-th version of a name is its n-th exported variant, counted from the newest. The C++ side drops an entry whose
    types differ, so a wrong count can leave a function unhooked but never hook it wrongly.
    """
    variants: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for name in names:
        match = VARIANT.match(name)
        if match:
            key = (match.group(1), match.group(3) or "")
            variants.setdefault(key, []).append((int(match.group(2) or 1), name))
    introduced: dict[tuple[str, str], set[int]] = {}
    for match in TYPEDEF.finditer(text):
        introduced.setdefault((match.group(1), match.group(3) or ""), set()).add(int(match.group(2)))
    rows = []
    for (base, suffix), points in sorted(introduced.items()):
        newest_first = sorted(variants.get((base, suffix), []), reverse=True)
        for point, (_, name) in zip(sorted(points, reverse=True), newest_first, strict=False):
            rows.append((base, point, suffix, name))
    return rows


def write_if_changed(path: Path, text: str) -> None:
    """Leaves the file's time alone when nothing changed, so that nothing is compiled again."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--include", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("sources", type=Path, nargs="*")
    options = parser.parse_args(arguments)

    text = preprocess(options.compiler, options.include)
    known = functions(text)
    names = {function.name for function in known}
    hooked: set[str] = set()
    for source in options.sources:
        hooked.update(HOOK.findall(source.read_text(encoding="utf-8")))

    symbols, gated, writes = [HEADER], [HEADER], [HEADER]
    for function in known:
        symbols.append(f"WF_SYMBOL({function.name})\n")
        if not HARMLESS.match(function.name):
            writes.append(f"WF_WRITES({function.name})\n")
        if function.name in hooked:
            continue
        scope = (
            "ensure_driver();"
            if UNGATED.match(function.name)
            else f"{'LaunchScope' if LAUNCH.match(function.name) else 'GateScope'} gate_scope(Symbol::{function.name});"
        )
        gated.append(
            f"WF_EXPORT CUresult {function.name}({function.parameters}) {{\n"
            f"    {scope}\n    return WF_REAL({function.name})({function.arguments});\n}}\n"
        )
    table = [HEADER]
    for base, point, suffix, name in versions(text, names):
        table.append(f'WF_VERSION("{base}", {point}, {1 if suffix else 0}, PFN_{base}_v{point}{suffix}, {name})\n')

    options.output.mkdir(parents=True, exist_ok=True)
    files = {"symbols.inc": symbols, "gated.inc": gated, "versions.inc": table, "writes.inc": writes}
    for filename, lines in files.items():
        write_if_changed(options.output / filename, "".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
