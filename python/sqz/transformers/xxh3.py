"""XXH3-64 with seed 0, as index files, captures and checkpoints are hashed by libsqz (docs/format.md)."""

from typing import Any

import numpy as np

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e")
_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_STRIPE, _BLOCK, _SHORTEST = 64, 1024, 241  # bytes
_LOW = np.uint64(0xFFFFFFFF)
_SWAPPED = [1, 0, 3, 2, 5, 4, 7, 6]


def _words(data: bytes, first: int) -> Any:
    """The 8 little-endian words of 64 bits from byte `first` on."""
    return np.frombuffer(data, "<u8", 8, first)


_STRIPE_SECRETS = np.stack([_words(_SECRET, 8 * i) for i in range(_BLOCK // _STRIPE)])


def _sums(stripes: Any, secrets: Any) -> Any:
    """What stripes [..., n, 8] add to the 8 accumulators, modulo 2^64."""
    keyed = stripes ^ secrets
    products = (keyed & _LOW) * (keyed >> np.uint64(32))
    return products.sum(-2, dtype=np.uint64) + stripes[..., _SWAPPED].sum(-2, dtype=np.uint64)


def xxh3_64(data: bytes) -> str:
    """The hash of at least 241 bytes, as 16 hexadecimal digits. Shorter data have another algorithm: ValueError."""
    if len(data) < _SHORTEST:
        raise ValueError(f"data: found {len(data)} bytes, expected at least {_SHORTEST}")
    blocks = (len(data) - 1) // _BLOCK
    scramble, prime = _words(_SECRET, 128), np.uint64(_PRIME32[0])
    accumulators = np.array([_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0]], np.uint64)
    whole = np.frombuffer(data, "<u8", blocks * _BLOCK // 8).reshape(blocks, _BLOCK // _STRIPE, 8)
    for sums in _sums(whole, _STRIPE_SECRETS):
        accumulators += sums
        accumulators = ((accumulators ^ (accumulators >> np.uint64(47))) ^ scramble) * prime
    stripes = (len(data) - 1 - blocks * _BLOCK) // _STRIPE
    rest = np.frombuffer(data, "<u8", stripes * 8, blocks * _BLOCK).reshape(stripes, 8)
    accumulators += _sums(rest, _STRIPE_SECRETS[:stripes])
    accumulators += _sums(_words(data, len(data) - _STRIPE)[None], _words(_SECRET, 121)[None])

    mixed = [int(a) ^ int(b) for a, b in zip(accumulators, _words(_SECRET, 11))]
    digest = len(data) * _PRIME64[0]
    for a, b in zip(mixed[::2], mixed[1::2]):
        digest += (a * b & (1 << 64) - 1) ^ (a * b >> 64)
    digest &= (1 << 64) - 1
    digest = (digest ^ digest >> 37) * 0x165667919E3779F9 & (1 << 64) - 1
    return f"{digest ^ digest >> 32:016x}"
