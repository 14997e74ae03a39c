"""Where each lesson's ideas were published, and what a reader finds there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """A publication: its authors and title, and where it is."""

    text: str
    url: str


ONLINE = Source(
    'M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018',
    "https://arxiv.org/abs/1805.02867",
)
ACCURATE = Source(
    'P. Blanchard, D. J. Higham and N. J. Higham, "Accurately computing the log-sum-exp and softmax functions", IMA '
    "Journal of Numerical Analysis 41(4), 2021",
    "https://doi.org/10.1093/imanum/draa038",
)
ROOFLINE = Source(
    'S. Williams, A. Waterman and D. Patterson, "Roofline: an insightful visual performance model for multicore '
    'architectures", Communications of the ACM 52(4), 2009',
    "https://doi.org/10.1145/1498765.1498785",
)
TUTORIAL = Source(
    'Triton, tutorial "Fused Softmax"',
    "https://github.com/triton-lang/triton/blob/main/python/tutorials/02-fused-softmax.py",
)
MODEL = Source(
    'NVIDIA, CUDA Programming Guide, "Programming Model"',
    "https://docs.nvidia.com/cuda/cuda-programming-guide/01-introduction/programming-model.html",
)
PRACTICES = Source(
    "NVIDIA, CUDA C++ Best Practices Guide", "https://docs.nvidia.com/cuda/pdf/CUDA_C_Best_Practices_Guide.pdf"
)
VECTORS = Source(
    'NVIDIA, "CUDA Pro Tip: Increase Performance with Vectorized Memory Access"',
    "https://devblogs.nvidia.com/parallelforall/cuda-pro-tip-increase-performance-with-vectorized-memory-access/",
)
LOADS = Source("NVIDIA, PTX instruction ld", "https://nvidia.github.io/cccl/libcudacxx/ptx/instructions/ld.html")
MEMORY_BOUND = Source(
    "W. Guo, T. Zadouri and T. Dao, post on memory-bound kernels in CuTe-DSL (QuACK), 2025",
    "https://sysml.cs.princeton.edu/blogs/memory-bound-kernels.html",
)
FLASH = Source(
    'T. Dao, D. Y. Fu, S. Ermon, A. Rudra and C. Ré, "FlashAttention: fast and memory-efficient exact attention with '
    'IO-awareness", 2022',
    "https://arxiv.org/abs/2205.14135",
)
MEGATRON = Source(
    'M. Shoeybi and others, "Megatron-LM: training multi-billion parameter language models using model parallelism", '
    "2019",
    "https://arxiv.org/abs/1909.08053",
)
CUT = Source(
    'E. Wijmans, B. Huval, A. Hertzberg, V. Koltun and P. Krähenbühl, "Cut your losses in large-vocabulary language '
    'models"',
    "https://machinelearning.apple.com/research/cut-your-losses",
)
LIGER = Source(
    "Liger Kernel, ops/cross_entropy.py",
    "https://github.com/linkedin/Liger-Kernel/blob/main/src/liger_kernel/ops/cross_entropy.py",
)


def _llm_c(name: str) -> Source:
    return Source(f"llm.c, dev/cuda/{name}", f"https://github.com/karpathy/llm.c/blob/master/dev/cuda/{name}")


# lesson -> (source, what it has)
SOURCES: Mapping[int, tuple[tuple[Source, str], ...]] = {
    1: (
        (ACCURATE, "the subtraction of the maximum costs no accuracy"),
        (ROOFLINE, "bytes, operations, and which of the two bounds a kernel"),
    ),
    2: ((TUTORIAL, "this kernel, and why a block has a power of two of lanes"),),
    3: ((TUTORIAL, "the driver around the kernel"), (MODEL, "how the host launches blocks of threads")),
    4: ((TUTORIAL, "this kernel: as many programs as are resident, with stages"),),
    5: ((VECTORS, "why wide loads pay, and when they do not"),),
    6: ((_llm_c("softmax_forward.cu"), "the same steps in CUDA C++, one kernel for each"),),
    7: ((ONLINE, "the formula, its proof, and its speed"), (FLASH, "what the formula made possible in attention")),
    8: ((MEMORY_BOUND, "reductions within a thread, a warp and a block"),),
    9: ((MODEL, "thread-block clusters"), (MEMORY_BOUND, "the same reduction over a cluster, in another language")),
    10: ((MEMORY_BOUND, "another softmax that runs at the speed of memory"), (ROOFLINE, "the bound that it meets")),
    11: ((MEGATRON, "a vocabulary that is spread over GPUs"), (ONLINE, "the merge of two partial results")),
    12: ((_llm_c("attention_backward.cu"), "kernels of this gradient, one idea each"),),
    13: (
        (_llm_c("classifier_fused.cu"), "loss and gradient in one kernel, in CUDA C++"),
        (LIGER, "a Triton kernel that writes the gradient over the logits"),
        (CUT, "the loss without logits in memory"),
    ),
    14: ((_llm_c("attention_forward.cu"), "causal softmax kernels"), (FLASH, "masks inside of attention")),
    15: ((PRACTICES, "coalesced access to global memory"),),
    16: ((VECTORS, "vector loads"), (LOADS, "loads and their cache hints")),
}


def lines(n: int) -> list[str]:
    """Lesson n's sources, a line for each."""
    return [f"{source.text}, {source.url}: {what}" for source, what in SOURCES[n]]
