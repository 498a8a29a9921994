"""The manifest file's bytes: encode and decode (docs/format.md, "The manifest file").

Input is hostile until the last check: each length is compared with its cap and with the file before it is used, and the
body is decoded only after its digest. It must never raise anything but BadImageError for bad input.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
from blake3 import blake3

from woodfrog.errors import BadImageError
from woodfrog.image.manifest import DIGEST_BYTES, FORMAT_VERSION, Feature, Manifest
from woodfrog.image.validate import validate

MAGIC = b"WFRGIMG\0"
# magic, format version, header length, mandatory flags, optional flags, body length, reserved; then the digest of these
PREFIX = struct.Struct("<8sIIQQQQ")
HEADER_BYTES = PREFIX.size + DIGEST_BYTES
MAX_BODY_BYTES = 1 << 30
MIN_FILE_BYTES = HEADER_BYTES + 1 + DIGEST_BYTES
MAX_FILE_BYTES = HEADER_BYTES + MAX_BODY_BYTES + DIGEST_BYTES
KNOWN_FEATURES = Feature(sum(Feature))

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def encode(manifest: Manifest) -> bytes:
    """The whole manifest file. BadImageError if the manifest contradicts itself, so that none such is ever written."""
    validate(manifest, manifest.features)
    try:
        body = _encoder.encode(manifest)
    except UnicodeEncodeError:  # a path or argument that is no UTF-8; it is there to be read, so a mark will do
        body = _encoder.encode(_readable(manifest))
    # The types' caps hold on decoding only; reading back is the cheapest way never to write what cannot be read.
    _decode_body(body)
    if len(body) > MAX_BODY_BYTES:
        raise BadImageError(
            f"the manifest would have {len(body)} bytes, more than the format's {MAX_BODY_BYTES}",
            advice="use a larger chunk size",
        )
    prefix = PREFIX.pack(MAGIC, FORMAT_VERSION, HEADER_BYTES, int(manifest.features), 0, len(body), 0)
    content = prefix + blake3(prefix).digest() + body
    return content + blake3(content, max_threads=blake3.AUTO).digest()


def decode(data: bytes | memoryview, where: str = "manifest") -> Manifest:
    """The manifest in `data` (a whole file), validated. `where` names the file in the error's sentence."""
    view = memoryview(data)
    flags, body_bytes = _check_header(view, where)
    body = view[HEADER_BYTES : HEADER_BYTES + body_bytes]
    end = HEADER_BYTES + body_bytes
    if blake3(view[:end], max_threads=blake3.AUTO).digest() != bytes(view[end:]):
        raise _damaged(where, "its digest does not match its contents")
    manifest = _decode_body(body, where)
    validate(manifest, flags)
    return manifest


def _readable(manifest: Manifest) -> Manifest:
    """The same with U+FFFD in place of what Python keeps undecodable bytes as (surrogates)."""

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return value.encode(errors="surrogateescape").decode(errors="replace")
        if isinstance(value, list):
            return [clean(part) for part in value]
        if isinstance(value, dict):
            return {clean(key): clean(part) for key, part in value.items()}
        return value

    return msgspec.convert(clean(msgspec.to_builtins(manifest, builtin_types=(bytes,))), Manifest)


def _check_header(view: memoryview, where: str) -> tuple[Feature, int]:
    if not MIN_FILE_BYTES <= len(view) <= MAX_FILE_BYTES:
        raise _damaged(where, f"it has {len(view)} bytes, where {MIN_FILE_BYTES} to {MAX_FILE_BYTES} are possible")
    magic, version, header_bytes, mandatory, _optional, body_bytes, reserved = PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise _damaged(where, "it does not begin with the magic of an image's manifest")
    if version != FORMAT_VERSION:
        raise BadImageError(
            f"{where} has format version {version}; this woodfrog reads version {FORMAT_VERSION}",
            advice="use the woodfrog that wrote it, or, if the number is absurd, another image: this one is damaged",
        )
    if header_bytes != HEADER_BYTES:
        raise _damaged(where, f"its header claims {header_bytes} bytes instead of {HEADER_BYTES}")
    if blake3(view[: PREFIX.size]).digest() != bytes(view[PREFIX.size : HEADER_BYTES]):
        raise _damaged(where, "its header's digest does not match")
    if reserved != 0:
        raise _damaged(where, "a reserved field is not zero")
    if not 1 <= body_bytes <= MAX_BODY_BYTES or body_bytes != len(view) - HEADER_BYTES - DIGEST_BYTES:
        raise _damaged(where, f"it claims a body of {body_bytes} bytes, which is not what the file has")
    if mandatory & ~int(KNOWN_FEATURES):
        raise BadImageError(
            f"{where} needs features that this woodfrog does not have (flags {mandatory & ~int(KNOWN_FEATURES):#x})",
            advice="use a newer woodfrog",
        )
    return Feature(mandatory), body_bytes


def _decode_body(body: bytes | memoryview, where: str = "manifest") -> Manifest:
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise _damaged(where, f"its body cannot be understood ({error})") from error


def _damaged(where: str, what: str) -> BadImageError:
    return BadImageError(
        f"{where} is damaged or not an image's manifest: {what}",
        advice="use another image; `woodfrog images` lists them",
    )
