# Of `table.c`; answers as its twin does.

from kvstore.native.tables_twin import Table as Table
