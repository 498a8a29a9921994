"""Unpacks the payloads of fatbin entries. Never allocates more than the size that was announced and capped."""

from __future__ import annotations

import lz4.block
import zstandard

from woodfrog.kernels import limits
from woodfrog.kernels.error import KernelFileError


def unpack(payload: bytes, compression: str, size_bytes: int, origin: str) -> bytes:
    """`payload` unpacked to exactly `size_bytes` bytes; KernelFileError where that is not what comes out."""
    if size_bytes > limits.CODE_BYTES:
        raise KernelFileError(
            f"{origin} announces {size_bytes} bytes of code, more than the {limits.CODE_BYTES} allowed"
        )
    try:
        if compression == "zstd":
            # The decompressor allocates what the frame's own header says: compare first.
            announced = zstandard.frame_content_size(payload)
            if announced not in (-1, size_bytes):
                raise KernelFileError(f"{origin}: the zstd frame holds {announced} bytes, the entry says {size_bytes}")
            data = zstandard.ZstdDecompressor().decompress(payload, max_output_size=size_bytes)
        else:
            data = lz4.block.decompress(payload, uncompressed_size=size_bytes)
    except (zstandard.ZstdError, lz4.block.LZ4BlockError, ValueError, OverflowError, MemoryError) as error:
        raise KernelFileError(f"{origin}: its {compression} data cannot be unpacked ({error})") from None
    if len(data) != size_bytes:
        raise KernelFileError(f"{origin}: {len(data)} bytes came out of its {compression} data instead of {size_bytes}")
    return data
