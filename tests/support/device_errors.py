"""Errors of CUDA, NCCL, gloo and torch's store with their texts, as torch 2.8 to 2.13 raises them, and their cause.

The texts of CUDA and NCCL are from reports of users, of torch's and NCCL's sources; those of gloo and the store were
provoked with torch 2.13.
"""

from dataclasses import dataclass

from parallel_backend.error_texts import Cause


@dataclass(frozen=True, kw_only=True)
class TorchError:
    """An error of a rank.

    Attributes:
        kind: name of the type in ``torch`` or ``torch.distributed``, or of a built-in one.
        text: what it says.
        cause: what caused it.
        breaks: whether the process cannot use its device any more.
    """

    kind: str
    text: str
    cause: Cause
    breaks: bool = False

    def make(self) -> Exception:
        """Return the exception."""
        import torch

        kinds = {**vars(torch.distributed), **vars(torch), "RuntimeError": RuntimeError, "KeyError": KeyError}
        made: Exception = kinds[self.kind](self.text)
        return made


_HINTS = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)
_SEARCH = (
    "Search for `{}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\n"
)
_NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/{}, {}, NCCL version 2.26.2\n{}\nLast error:\n{}"
_CODES = {
    "cuda": (
        "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "ncclUnhandledCudaError: Call to CUDA function failed.",
    ),
    "system": (
        "unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. ",
    ),
    "internal": (
        "internal error - please report this issue to the NCCL developers",
        "ncclInternalError: Internal check failed.",
    ),
    "usage": (
        "invalid usage (run with NCCL_DEBUG=WARN for details)",
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    ),
    "remote": (
        "remote process exited or there was a network error",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    ),
}
WATCHDOG = "[PG ID 2 PG GUID 3 Rank 1] Process group watchdog thread terminated with exception: "
TIMEOUT = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, NumelOut=1,"
    " Timeout(ms)=600000) ran for 600012 milliseconds before timing out."
)


def _cuda(sentence: str, name: str = "", *, breaks: bool = True, cause: Cause = Cause.OWN) -> TorchError:
    text = f"CUDA error: {sentence}\n{_SEARCH.format(name) if name else ''}{_HINTS}"
    return TorchError(kind="AcceleratorError", text=text, cause=cause, breaks=breaks)


def _nccl(code: str, last: str, cause: Cause, *, breaks: bool = False, where: str = "NCCLUtils.cpp:77") -> TorchError:
    return TorchError(
        kind="DistBackendError", text=_NCCL.format(where, *_CODES[code], last), cause=cause, breaks=breaks
    )


def _dist(text: str, cause: Cause, kind: str = "DistBackendError", *, breaks: bool = False) -> TorchError:
    return TorchError(kind=kind, text=text, cause=cause, breaks=breaks)


def _gloo(where: str, text: str) -> TorchError:
    return _dist(f"[/pytorch/third_party/gloo/gloo/transport/tcp/{where}] {text}", Cause.PEER, "RuntimeError")


FULL: dict[str, TorchError] = {
    "torch": _dist("CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total", Cause.FULL, "OutOfMemoryError"),
    "cuda": _cuda("out of memory", "cudaErrorMemoryAllocation", breaks=False, cause=Cause.FULL),
    "driver": _dist("CUDA driver error: out of memory", Cause.FULL, "RuntimeError"),
    "triton": _dist("Triton Error [CUDA]: out of memory", Cause.FULL, "RuntimeError"),
    "cublas": _dist(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", Cause.FULL, "RuntimeError"
    ),
    "cudnn": _dist("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", Cause.FULL, "RuntimeError"),
    "another library": _dist("CUDA_ERROR_OUT_OF_MEMORY: out of memory", Cause.FULL, "RuntimeError"),
    "hip": _dist("HIP error: out of memory", Cause.FULL, "RuntimeError"),
    "nccl": _nccl("cuda", "Cuda failure 2 'out of memory'", Cause.FULL),
    "nccl before 2.22": _nccl("cuda", "Cuda failure 'out of memory'", Cause.FULL),
    "nccl calloc": _nccl("cuda", "Failed to CUDA calloc async 608 bytes", Cause.FULL),
    "nccl calloc of a buffer": _nccl("cuda", "Failed to CUDA calloc 6291456 bytes", Cause.FULL),
    "watchdog": _dist(f"{WATCHDOG}CUDA error: out of memory\n{_HINTS}", Cause.FULL),
}
OWN: dict[str, TorchError] = {
    "illegal address": _cuda("an illegal memory access was encountered", "cudaErrorIllegalAddress"),
    "launch failure": _cuda("unspecified launch failure", "cudaErrorLaunchFailure"),
    "assert": _cuda("device-side assert triggered", "cudaErrorAssert"),
    "misaligned": _cuda("misaligned address", "cudaErrorMisalignedAddress"),
    "illegal instruction": _cuda("an illegal instruction was encountered", "cudaErrorIllegalInstruction"),
    "stack": _cuda("hardware stack error", "cudaErrorHardwareStackError"),
    "address space": _cuda("operation not supported on global/shared address space", "cudaErrorInvalidAddressSpace"),
    "program counter": _cuda("invalid program counter", "cudaErrorInvalidPc"),
    "launch timeout": _cuda("the launch timed out and was terminated", "cudaErrorLaunchTimeout"),
    "ecc": _cuda("uncorrectable ECC error encountered", "cudaErrorECCUncorrectable"),
    "nvlink": _cuda("uncorrectable NVLink error detected during the execution", "cudaErrorNvlinkUncorrectable"),
    "contained": _cuda("Invalid access of peer GPU memory over nvlink or a hardware error", "cudaErrorContained"),
    "off the bus": _cuda("unknown error", "cudaErrorUnknown"),
    "no kernel": _cuda("no kernel image is available for execution on the device", breaks=False),
    "invalid argument": _cuda("invalid argument", "cudaErrorInvalidValue", breaks=False),
    "busy": _cuda("CUDA-capable device(s) is/are busy or unavailable", breaks=False),
    "no card": _dist("No CUDA GPUs are available", Cause.OWN, "RuntimeError"),
    "driver": _dist(
        "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() "
        "that might have already set an error? Error 802: system not yet initialized", Cause.OWN, "RuntimeError"
    ),
    "triton": _dist(
        "Triton Error [CUDA]: an illegal memory access was encountered", Cause.OWN, "RuntimeError", breaks=True
    ),
    "cublas": _dist(
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`", Cause.OWN, "RuntimeError"
    ),
    "nccl": _nccl("cuda", "Cuda failure 999 'unknown error'", Cause.OWN, breaks=True),
    "nccl argument": _nccl("cuda", "Cuda failure 1 'invalid argument'", Cause.OWN),
    "nccl illegal address": _nccl(
        "cuda", "Cuda failure 700 'an illegal memory access was encountered'", Cause.OWN, breaks=True
    ),
    "nccl calloc after an illegal address": _nccl(
        "cuda", "Cuda failure 700 'an illegal memory access was encountered'\nFailed to CUDA calloc async 608 bytes",
        Cause.OWN, breaks=True,
    ),
    "nccl after a lost connection": _nccl("cuda", "socketProgress: Connection closed by remote peer a<1>", Cause.OWN),
    "nvls": _nccl(
        "cuda", "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 'the operation "
        "cannot be performed in the present state'", Cause.OWN
    ),
    "small /dev/shm": _nccl(
        "system", "Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888), error: No space left"
        " on device (28)", Cause.OWN
    ),
    "two ranks on a card": _nccl(
        "usage", "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 53000", Cause.OWN
    ),
    "watchdog": _dist(
        f"{WATCHDOG}CUDA error: an illegal memory access was encountered\n{_HINTS}", Cause.OWN, breaks=True
    ),
    "aborted": _dist(
        "NCCL communicator was aborted on rank 1.  Original reason for failure was: NCCL error: unhandled cuda error "
        "(run with NCCL_DEBUG=INFO for details), NCCL version 2.26.2", Cause.OWN
    ),
}  # fmt: skip
PEER: dict[str, TorchError] = {
    "lost": _nccl("remote", "socketProgress: Connection closed by remote peer localhost<41234>", Cause.PEER),
    "reset": _nccl("remote", "socketProgressOpt: Call to recv from 127.0.0.1<3375> failed : Connection reset by peer",
                   Cause.PEER),
    "lost, last error old": _nccl("remote", "Cuda failure 2 'out of memory'", Cause.PEER),
    "lost, said by the proxy": _nccl("internal", "Net : Connection closed by remote peer user<50260>", Cause.PEER),
    "refused": _nccl(
        "system", "socketStartConnect: Connect to 127.0.0.1<3375> failed : Connection refused", Cause.PEER
    ),
    "network": _nccl("remote", "NET/IB : Got completion from peer 10.0.35.1<49189> with error 12", Cause.PEER),
    "timeout": _dist(TIMEOUT, Cause.PEER),
    "watchdog": _dist(
        f"{WATCHDOG}NCCL error: remote process exited or there was a network error, NCCL version 2.26.2\n"
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        Cause.PEER,
    ),
    "aborted": _dist(
        f"NCCL communicator was aborted on rank 1.  Original reason for failure was: {TIMEOUT}", Cause.PEER
    ),
    "no id": _dist(
        "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', "
        "but store->get('0') got error: wait timeout after 600000ms, keys: /group//1//cuda//0", Cause.PEER
    ),
    "store": _dist("wait timeout after 600000ms, keys: /group/0//1//cpu//0/1", Cause.PEER, "DistStoreError"),
    "store gone": _dist(
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        Cause.PEER, "DistNetworkError",
    ),
    "store late": _dist(
        "The client socket has timed out after 600000ms while trying to connect to (127.0.0.1, 29500).",
        Cause.PEER, "DistNetworkError",
    ),
    "gloo": _gloo(
        "pair.cc:537", "Read error [127.0.0.1]:64194: Connection reset by peer. This is typically caused by a remote "
        "worker hanging or bugs in the application."
    ),
    "gloo closed": _gloo("pair.cc:547", "Connection closed by peer [127.0.0.1]:9876"),
    "gloo timeout": _gloo("unbound_buffer.cc:78", "Timed out waiting 600000ms for recv operation to complete"),
}  # fmt: skip
UNKNOWN: dict[str, TorchError] = {
    "nccl internal": _nccl("internal", "Message truncated : received 1024 bytes instead of 256", Cause.UNKNOWN),
    "aborted": _dist("NCCL communicator was aborted on rank 1. ", Cause.UNKNOWN),
}
"""Communication that failed, and may have failed because of another rank."""
TABLES = {"FULL": FULL, "OWN": OWN, "PEER": PEER, "UNKNOWN": UNKNOWN}
BUGS: dict[str, TorchError] = {
    "no error of a device": _dist("out of memory", Cause.FULL, "KeyError"),
    "no lost rank": _dist("Connection reset by peer", Cause.PEER, "KeyError"),
    "shapes": _dist("The size of tensor a (3) must match the size of tensor b (4)", Cause.UNKNOWN, "RuntimeError"),
}
"""Errors of other kinds, whatever their texts say."""
