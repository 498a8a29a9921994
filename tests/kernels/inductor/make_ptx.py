"""Makes the PTX files beside it: the Triton kernels that TorchInductor, the compiler behind torch.compile, makes of a
transformer block, its loss and its gradients. No GPU is needed: `python make_ptx.py` (made with torch 2.13.0, CPU only,
and Triton 3.9.0).

The tensors are fake ones on a device that is not there, and what PyTorch asks of the device is answered here: the
numbers of an H100 (132 multiprocessors) or, for sm_80, of an A100 (108). Everything else is PyTorch's own: lowering,
fusion, the text of the kernels, and the configuration, of which the first that would be tried is compiled.
Matrix products go to cuBLAS and are not among these kernels.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

KERNEL = re.compile(r"^(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)'''", re.S | re.M)
MULTIPROCESSORS = {80: 108, 90: 132}
TOKENS, BATCH, WIDTH, HEADS, WORDS = 128, 2, 256, 4, 1000
SHAPES = {
    "table": (WORDS, WIDTH), "norm1_w": (WIDTH,), "norm1_b": (WIDTH,), "qkv_w": (3 * WIDTH, WIDTH),
    "qkv_b": (3 * WIDTH,), "out_w": (WIDTH, WIDTH), "out_b": (WIDTH,), "norm2_w": (WIDTH,), "norm2_b": (WIDTH,),
    "up_w": (4 * WIDTH, WIDTH), "up_b": (4 * WIDTH,), "down_w": (WIDTH, 4 * WIDTH), "down_b": (WIDTH,),
}  # fmt: skip


def block(p: dict[str, torch.Tensor], ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Embedding, attention and perceptron, and the logits of every word."""
    x = F.embedding(ids, p["table"].detach())  # its gradient has no form for a device that is not there
    qkv = F.linear(F.layer_norm(x, (WIDTH,), p["norm1_w"], p["norm1_b"]), p["qkv_w"], p["qkv_b"])
    q, k, v = qkv.view(BATCH, TOKENS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
    weights = torch.softmax((q @ k.transpose(-1, -2)) * (WIDTH // HEADS) ** -0.5 + mask, -1)
    mixed = (weights @ v).transpose(1, 2).reshape(BATCH, TOKENS, WIDTH)
    x = x + F.linear(mixed, p["out_w"], p["out_b"])
    hidden = F.gelu(F.linear(F.layer_norm(x, (WIDTH,), p["norm2_w"], p["norm2_b"]), p["up_w"], p["up_b"]))
    return (x + F.linear(hidden, p["down_w"], p["down_b"])) @ p["table"].t()


def tensors(device: str) -> list[torch.Tensor]:
    """The parameters, the words, their labels and the mask of attention; under a FakeTensorMode."""
    values = [torch.empty(shape, device=device, requires_grad=device == "cpu") for shape in SHAPES.values()]
    ids = torch.empty((BATCH, TOKENS), dtype=torch.int64, device=device)
    labels = torch.empty(BATCH * TOKENS, dtype=torch.int64, device=device)
    return [*values, ids, labels, torch.empty((TOKENS, TOKENS), device=device)]


def forward(*arguments: torch.Tensor) -> torch.Tensor:
    *values, ids, _, mask = arguments
    return block({name: value.detach() for name, value in zip(SHAPES, values, strict=True)}, ids, mask)


def step(*arguments: torch.Tensor) -> list[torch.Tensor]:
    """One step of training: the loss, and all parameters with their gradients taken off."""
    *values, ids, labels, mask = arguments
    p = dict(zip(SHAPES, values, strict=True))
    loss = F.cross_entropy(block(p, ids, mask).view(-1, WORDS), labels)
    gradients = torch.autograd.grad(loss, values)
    return [loss.detach(), *(v.detach() - 0.01 * g for v, g in zip(values, gradients, strict=True))]


def pretend(architecture: int) -> None:
    """Answers for a device that is not there."""
    major, minor = divmod(architecture, 10)
    properties = SimpleNamespace(
        name="pretended", major=major, minor=minor, multi_processor_count=MULTIPROCESSORS[architecture],
        total_memory=80 << 30, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, warp_size=32,
        max_threads_per_block=1024, shared_memory_per_block=49152, shared_memory_per_block_optin=166912,
        L2_cache_size=40 << 20, gcnArchName="", uuid="", is_integrated=0,
    )  # fmt: skip
    target = GPUTarget("cuda", architecture, 32)
    cuda: Any = torch.cuda
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda *_: (major, minor)
    cuda._get_device_properties = lambda *_: properties
    cuda.get_device_properties = lambda *_: properties
    cuda._lazy_init = lambda: None
    cuda.synchronize = lambda *_: None
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda"),
        is_active=lambda: True,
    )
    triton.runtime.driver.set_active(driver)
    helpers: Any = triton_helpers
    helpers.set_driver_to_gpu = lambda: None


def generated(training: bool) -> str:
    """The program that TorchInductor makes, with its kernels as text in it."""
    cuda: Any = torch.cuda
    cuda.is_available = lambda: False  # while fake tensors are made: PyTorch would look for a real device
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        traced = make_fx(step if training else forward, decomposition_table=select_decomp_table())(*tensors("cpu"))
        for node in traced.graph.nodes:  # differentiated on the CPU: the engine would look for the device's own
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda")}
        traced.recompile()
        inputs = [one.detach() for one in tensors("cuda")]
        graph = make_fx(traced)(*inputs)
        cuda.is_available = lambda: True
        lowering = GraphLowering(graph, example_inputs=inputs, is_inference=True)
        with V.set_graph_handler(lowering), V.set_fake_mode(fake), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            return lowering.codegen()[0].value


def ptx_of(source: str, name: str, architecture: int) -> str:
    """The PTX of one kernel of the program, in the first configuration that would be tried."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.py"
        file.write_text(source)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)
        config, meta, names = kernel.configs[0], kernel.triton_meta, kernel.fn.arg_names
        constants = {(names.index(k),): v for k, v in {**meta["constants"], **config.kwargs}.items() if k in names}
        signature = {k: "constexpr" if (names.index(k),) in constants else v for k, v in meta["signature"].items()}
        attributes = meta["configs"][0]
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        compiled = triton.compile(
            ASTSource(kernel.fn, signature, constants, attributes),
            target=GPUTarget("cuda", architecture, 32),
            options=options,
        )
    lines = [line for line in compiled.asm["ptx"].splitlines() if not line.lstrip().startswith((".file", ".loc", "//"))]
    text = "\n".join(lines)
    return text[: text.index(".section")] if ".section" in text else text


def main() -> None:
    here = Path(__file__).resolve().parent
    for architecture in MULTIPROCESSORS:
        pretend(architecture)
        number = 0
        seen: set[str] = set()
        for training in (False, True):
            program = generated(training)
            for name, source in re.findall(
                r"^(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)'''", program, re.S | re.M
            ):
                text = ptx_of(source, name, architecture)
                body = text.replace(name, "kernel")
                if body in seen:
                    continue
                seen.add(body)
                kind = name.split("_")[1]
                file = here / f"{number:02}_{kind}-sm_{architecture}.ptx"
                file.write_text(text.replace(name, f"inductor_{number:02}_{kind}").rstrip() + "\n")
                number += 1


if __name__ == "__main__":
    main()
