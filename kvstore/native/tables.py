"""Table of blocks by hash, with the look-up of a whole chain in one call: the native module or its twin.

The native table (`table.c`) finds 512 blocks and their slots in a quarter of the time of a dict. This is most of the
time of a node's look-up. `kvstore.native.tables_twin` documents the methods.
"""

try:
    from kvstore.native._table import Table as BlockTable

    BUILT = True
    """True if the native table is used."""
except ImportError:  # not built
    from kvstore.native.tables_twin import BlockTable

    BUILT = False

__all__ = ["BUILT", "BlockTable"]
