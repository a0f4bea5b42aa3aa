"""What a program was set to, as it is recorded: each fact once, and again only when it has changed.

Adapters report values through `SetupLog.note`, as often as they like; new and changed ones go to the writer. Knows no
framework: an adapter passes `plain` the types whose values it wants written by name.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

from astray.records import Setup

MOST_CHANGES = 100
"""How many changes of a module's attribute are recorded. A call counter would fill the disk."""

CHANGES_TOO_OFTEN = "<changes too often to be followed>"

LONGEST_TEXT = 100
LONGEST_LIST = 16

NOT_PLAIN: Final = object()
"""What `plain` returns for a value that is not a setting."""

ENVIRONMENT = {
    "NVIDIA_TF32_OVERRIDE": "0 forbids TF32 in cuBLAS and cuDNN, whatever the program asks for",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1 allows TF32 in matrix products",
    "CUBLAS_WORKSPACE_CONFIG": "which algorithms cuBLAS may choose, and whether it is deterministic",
    "CUBLASLT_WORKSPACE_SIZE": "which algorithms cuBLASLt may choose",
    "DISABLE_ADDMM_CUDA_LT": "takes cuBLASLt out of addmm",
    "TORCH_BLAS_PREFER_CUBLASLT": "which library multiplies",
    "TORCH_BLAS_PREFER_HIPBLASLT": "which library multiplies",
    "TORCH_LINALG_PREFER_CUSOLVER": "which library factorises",
    "TORCH_LINALG_PREFER_MAGMA": "which library factorises",
    "TORCH_CUDNN_V8_API_DISABLED": "which convolutions cuDNN chooses from",
    "USE_HEURISTIC_MODE_B": "which convolutions cuDNN chooses from",
    "FLASH_ATTENTION_DETERMINISTIC": "the order of sums in the backward of attention",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "which kernels TransformerEngine chooses from",
    "NVTE_FLASH_ATTN": "which attention TransformerEngine uses",
    "NVTE_FUSED_ATTN": "which attention TransformerEngine uses",
    "NVTE_UNFUSED_ATTN": "which attention TransformerEngine uses",
    "NVTE_APPLY_QK_LAYER_SCALING": "scales the scores of attention by layer",
    "TRITON_F32_DEFAULT": "whether Triton multiplies float32 as TF32",
    "TRITON_INTERPRET": "runs Triton's kernels in numpy",
    "TORCH_COMPILE_DISABLE": "compiled code rounds elsewhere than eager code",
    "TORCHDYNAMO_DISABLE": "compiled code rounds elsewhere than eager code",
    "TORCHINDUCTOR_EMULATE_PRECISION_CASTS": "whether fused kernels round where eager code does",
    "TORCHINDUCTOR_MAX_AUTOTUNE": "which kernels torch.compile chooses from",
    "TORCHINDUCTOR_FREEZING": "folds weights into each other",
    "PYTORCH_JIT": "whether scripted code is compiled, which rounds elsewhere",
    "PYTORCH_NVFUSER_DISABLE": "which fused kernels scripted code uses",
    "PYTORCH_TUNABLEOP_ENABLED": "which matrix products are chosen, by timing",
    "PYTORCH_TUNABLEOP_TUNING": "which matrix products are chosen, by timing",
    "PYTORCH_MIOPEN_SUGGEST_NHWC": "the layout of convolutions on AMD",
    "PYTORCH_MPS_FAST_MATH": "whether Metal's kernels may be inexact",
    "PYTORCH_MPS_PREFER_METAL": "which matrix product is used on Apple's GPUs",
    "PYTORCH_ENABLE_MPS_FALLBACK": "what Metal lacks is computed on the CPU",
    "OMP_NUM_THREADS": "into how many parts sums are cut",
    "MKL_NUM_THREADS": "into how many parts sums are cut",
    "MKL_DYNAMIC": "into how many parts sums are cut",
    "OPENBLAS_NUM_THREADS": "into how many parts sums are cut",
    "MKL_CBWR": "whether MKL gives the same bits on every processor",
    "MKL_ENABLE_INSTRUCTIONS": "which kernels MKL chooses from",
    "MKL_DEBUG_CPU_TYPE": "which kernels MKL chooses from",
    "ATEN_CPU_CAPABILITY": "which of torch's kernels run on a CPU",
    "ONEDNN_MAX_CPU_ISA": "which kernels oneDNN chooses from",
    "DNNL_MAX_CPU_ISA": "which kernels oneDNN chooses from",
    "ONEDNN_DEFAULT_FPMATH_MODE": "whether oneDNN multiplies float32 as bfloat16 or TF32",
    "DNNL_DEFAULT_FPMATH_MODE": "whether oneDNN multiplies float32 as bfloat16 or TF32",
    "TORCH_MKLDNN_MATMUL_MIN_DIM": "from which size on oneDNN multiplies",
    "NCCL_ALGO": "the order in which ranks are summed",
    "NCCL_PROTO": "the order in which ranks are summed",
    "NCCL_NVLS_ENABLE": "whether the switch sums, with a rounding of its own",
    "NCCL_COLLNET_ENABLE": "whether the network sums, with a rounding of its own",
    "RCCL_MSCCL_ENABLE": "the order in which ranks are summed",
    "MIOPEN_FIND_MODE": "which convolutions are chosen on AMD",
    "MIOPEN_FIND_ENFORCE": "which convolutions are chosen on AMD",
    "ROCBLAS_TENSILE_LIBPATH": "which matrix products are used on AMD",
    "HCCL_ALGO": "the order in which ranks are summed on Ascend",
    "HCCL_DETERMINISTIC": "the order in which ranks are summed on Ascend",
    "LCCL_DETERMINISTIC": "the order in which ranks are summed on Ascend",
    "CLOSE_MATMUL_K_SHIFT": "the order of sums in matrix products on Ascend",
    "ATB_MATMUL_SHUFFLE_K_ENABLE": "the order of sums in matrix products on Ascend",
    "ALLOW_FP32_TO_FP16": "whether float32 is computed in float16 on Ascend",
    "ACL_PRECISION_MODE": "in which precision operators compute on Ascend",
    "INF_NAN_MODE_ENABLE": "whether what overflows saturates on Ascend",
    "XLA_FLAGS": "how XLA fuses and multiplies",
    "XLA_USE_BF16": "makes every float32 a bfloat16",
    "XLA_DOWNCAST_BF16": "makes every float32 a bfloat16",
    "FLAGS_cudnn_deterministic": "which convolutions Paddle chooses from",
    "FLAGS_embedding_deterministic": "the order of sums in the backward of Paddle's embeddings",
    "FLAGS_gemm_use_half_precision_compute_type": "in which precision Paddle sums products of halves",
    "FLAGS_cublaslt_exhaustive_search_times": "which matrix products Paddle chooses, by timing",
}
"""The environment variables that change numbers, and how. Only these are read: others may hold secrets."""


class SetupLog:
    """Passes what has changed to `write`, with the step from which it holds."""

    def __init__(self, write: Callable[[Setup], None]) -> None:
        self._write = write
        self._known: dict[tuple[str, str], dict[str, Any]] = {}
        self._changes: Counter[tuple[str, str, str]] = Counter()

    def note(
        self, step: int, subject: str, site: str, values: Mapping[str, Any], most_changes: int | None = None
    ) -> None:
        """Notes the values of a subject. One that has changed more than `most_changes` times is not followed on."""
        key = subject, site
        known = self._known.get(key)
        if known is None:
            self._known[key] = known = dict(values)
            self._write(Setup(step, subject, site, dict(values)))
            return
        changed = {}
        for name, value in values.items():
            if name in known and (known[name] is CHANGES_TOO_OFTEN or _is_same(known[name], value)):
                continue
            if most_changes is not None and name in known:
                self._changes[subject, site, name] += 1
                if self._changes[subject, site, name] > most_changes:
                    value = CHANGES_TOO_OFTEN
            changed[name] = known[name] = value
        if changed:
            self._write(Setup(step, subject, site, changed))


def _is_same(first: Any, second: Any) -> bool:
    """Whether two plain values are equal and of one type: 1 and True are not."""
    return type(first) is type(second) and first == second


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of `ENVIRONMENT` that are set, with their values."""
    return {name: variables[name][:LONGEST_TEXT] for name in ENVIRONMENT if name in variables}


def plain(value: Any, by_name: tuple[type, ...] = ()) -> Any:
    """A value as JSON can hold it, or `NOT_PLAIN`. No code of the program is called.

    `by_name` are types whose values are written as text, such as dtypes.

    >>> plain((1, 2.5, None)), plain(float("inf")), plain({}) is NOT_PLAIN
    ([1, 2.5, None], 'inf', True)
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value._name_}"
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        number = float.__float__(value)
        return number if math.isfinite(number) else repr(number)
    if isinstance(value, str):
        text = str.__str__(value)
        return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"
    if isinstance(value, by_name):
        return str(value).removeprefix("torch.")
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return f"<{value.__qualname__}>"
    if isinstance(value, tuple | list) and len(value) <= LONGEST_LIST:
        own = tuple.__iter__(value) if isinstance(value, tuple) else list.__iter__(value)
        items = [plain(item, by_name) for item in own]
        return NOT_PLAIN if any(item is NOT_PLAIN or isinstance(item, list) for item in items) else items
    return NOT_PLAIN
