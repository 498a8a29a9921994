"""Fatbin containers: a header, then entries that are PTX text or cubins, packed or not.

The layout was read off the output of nvcc 13.0 and older compilers: container {u32 magic, u16 version, u16 header
bytes, u64 body bytes}; entry {u16 kind @0, u32 header bytes @4, u64 padded payload bytes @8, u32 compressed bytes @16,
u32 architecture @28, u64 flags @40, u64 unpacked bytes @56}.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from woodfrog.kernels import limits
from woodfrog.kernels.error import KernelFileError
from woodfrog.kernels.reader.code import CodeObject
from woodfrog.kernels.reader.compress import unpack

MAGIC = 0xBA55ED50
MAGIC_BYTES = struct.pack("<I", MAGIC)
_HEADER = struct.Struct("<IHHQ")
_SMALLEST_ENTRY_HEADER = 64
_KINDS = {1: "ptx", 2: "cubin"}
_FLAG_LZ4 = 0x2000
_FLAG_ZSTD = 0x8000


def containers(data: memoryview, origin: str) -> Iterator[CodeObject]:
    """All code in the containers that lie one after the other in `data`, padding between them."""
    position, number, unpacked_bytes, entries = 0, 0, 0, 0
    while position + _HEADER.size <= len(data):
        magic, _version, header_bytes, body_bytes = _HEADER.unpack_from(data, position)
        if magic != MAGIC:
            if bytes(data[position : position + 8]).strip(b"\0"):
                raise KernelFileError(f"{origin}: offset {position} holds no fatbin header")
            position += 8  # sections pad containers to eight bytes
            continue
        number += 1
        if number > limits.CONTAINERS:
            raise KernelFileError(f"{origin} holds more than {limits.CONTAINERS} fatbin containers")
        where = f"{origin}, container {number}"
        start = position + header_bytes
        end = start + body_bytes
        if header_bytes < _HEADER.size or end > len(data):
            raise KernelFileError(f"{where} says it is {body_bytes} bytes long and reaches beyond its file")
        for code in _entries(data[start:end], where):
            entries += 1
            unpacked_bytes += len(code.data)
            if unpacked_bytes > limits.UNPACKED_BYTES or entries > limits.ENTRIES:
                raise KernelFileError(
                    f"{origin} unpacks to more than {limits.UNPACKED_BYTES} bytes or too many entries"
                )
            yield code
        position = end
    if bytes(data[position:]).strip(b"\0"):
        raise KernelFileError(f"{origin}: {len(data) - position} bytes after the last container are no fatbin")


def _entries(body: memoryview, origin: str) -> Iterator[CodeObject]:
    position, number = 0, 0
    while position < len(body):
        number += 1
        where = f"{origin}, entry {number}"
        left = len(body) - position
        if left < _SMALLEST_ENTRY_HEADER:
            raise KernelFileError(f"{where} is cut off: {left} bytes are left for its header")
        kind, _, header_bytes, payload_bytes = struct.unpack_from("<HHIQ", body, position)
        if header_bytes < _SMALLEST_ENTRY_HEADER or header_bytes > left or payload_bytes > left - header_bytes:
            raise KernelFileError(f"{where} reaches beyond the end of its container")
        (compressed_bytes,) = struct.unpack_from("<I", body, position + 16)
        (architecture,) = struct.unpack_from("<I", body, position + 28)
        (flags,) = struct.unpack_from("<Q", body, position + 40)
        (unpacked_bytes,) = struct.unpack_from("<Q", body, position + 56)
        payload = body[position + header_bytes : position + header_bytes + payload_bytes]
        position += header_bytes + payload_bytes
        name = _KINDS.get(kind)
        if name is None:
            continue  # a kind for tools (NVVM, objects for link-time optimisation): no kernel in it that a driver runs
        compression = "zstd" if flags & _FLAG_ZSTD else "lz4" if flags & _FLAG_LZ4 else "none"
        if compression == "none":
            if payload_bytes > limits.CODE_BYTES:
                raise KernelFileError(f"{where} holds {payload_bytes} bytes, more than the {limits.CODE_BYTES} allowed")
            data, stored_bytes = bytes(payload), payload_bytes
        else:
            if compressed_bytes > payload_bytes:
                raise KernelFileError(f"{where} says its packed data is longer than the entry")
            data = unpack(bytes(payload[:compressed_bytes]), compression, unpacked_bytes, where)
            stored_bytes = compressed_bytes
        if name == "ptx":
            data = data.split(b"\0", 1)[0]
        yield CodeObject(name, f"sm_{architecture}", compression, stored_bytes, data, where)
