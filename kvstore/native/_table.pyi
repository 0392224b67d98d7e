# Types of `table.c`, which answers as its twin does.

from kvstore.native.tables_twin import BlockTable

Table = BlockTable
