"""CRC-32C of bytes, and of bytes while they are copied: native where it was built, a library and numpy elsewhere.

The native module (`checksum.c`) sums bytes up while they pass through the processor anyway: a copy with its checksum takes
as long as a copy. Meaning and arguments are those of `kvstore.native.checksums_twin`.
"""

try:
    from kvstore.native._checksum import copy, extend, get_blocks, put_blocks, sums

    BUILT = True
    """Whether the native module runs."""
except ImportError:  # not built, or not for this processor
    from kvstore.native.checksums_twin import copy, extend, get_blocks, put_blocks, sums

    BUILT = False

__all__ = ["BUILT", "copy", "extend", "get_blocks", "put_blocks", "sums"]
