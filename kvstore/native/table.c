/* Table of blocks and their slots by hash. kvstore/native/tables_twin.py documents the methods and gives the same answers.
 *
 * A look-up gets hundreds of block hashes in one string and returns the slots of the present blocks in another. The entries
 * store both inline with open addressing, so a block costs one or two cache lines and no object. Block hashes come from
 * clients. The table hashes them again under its own key, so that nobody can choose hashes that collide.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__SIZEOF_INT128__) /* otherwise the import fails, and the twin does the work */

#define NAME 16
#define SLOT 20
#define LEAST 64 /* minimum number of entries of a table; a power of two */
#define AHEAD 8  /* entries that are prefetched before they are compared */

typedef struct {
    uint8_t name[NAME], slot[SLOT];
    uint32_t tag;    /* part of the hash: avoids most comparisons, and hashing when the table grows or shrinks */
    PyObject *block; /* NULL: empty */
} Entry;

typedef struct {
    PyObject ob_base;
    Entry *entries;
    size_t size, used; /* at most three quarters are used */
    uint64_t key[2];
} Table;

static PyObject *slot_attribute; /* name of the attribute, made once */

static uint32_t hash_of(const Table *table, const uint8_t *name)
{
    uint64_t halves[2];
    memcpy(halves, name, NAME);
    __uint128_t product = (__uint128_t)(halves[0] ^ table->key[0]) * (halves[1] ^ table->key[1]);
    return (uint32_t)((uint64_t)product ^ (uint64_t)(product >> 64));
}

/* Returns the entry of that hash, or the empty entry where it would be. */
static Entry *seek(const Table *table, const uint8_t *name, uint32_t tag)
{
    const size_t mask = table->size - 1;
    for (size_t at = tag & mask;; at = (at + 1) & mask) {
        Entry *entry = table->entries + at;
        if (entry->block == NULL || (entry->tag == tag && memcmp(entry->name, name, NAME) == 0))
            return entry;
    }
}

static int resize(Table *table, size_t size)
{
    Entry *before = table->entries, *end = before + table->size;
    Entry *entries = PyMem_Calloc(size, sizeof(Entry));
    if (entries == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    table->entries = entries;
    table->size = size;
    for (Entry *entry = before; entry < end; entry++)
        if (entry->block != NULL)
            *seek(table, entry->name, entry->tag) = *entry;
    PyMem_Free(before);
    return 0;
}

/* Returns the bytes of a hash; NULL with an error set if it is invalid. */
static const uint8_t *name_in(PyObject *object)
{
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(object, &bytes, &length) < 0)
        return NULL;
    if (length != NAME) {
        PyErr_Format(PyExc_ValueError, "a name of %zd bytes instead of 16", length);
        return NULL;
    }
    return (const uint8_t *)bytes;
}

static PyObject *get(PyObject *self, PyObject *object)
{
    const uint8_t *name = name_in(object);
    if (name == NULL)
        return NULL;
    PyObject *block = seek((Table *)self, name, hash_of((Table *)self, name))->block;
    return Py_NewRef(block == NULL ? Py_None : block);
}

static int contains(PyObject *self, PyObject *object)
{
    const uint8_t *name = name_in(object);
    return name == NULL ? -1 : seek((Table *)self, name, hash_of((Table *)self, name))->block != NULL;
}

static PyObject *put(PyObject *self, PyObject *const *arguments, Py_ssize_t given)
{
    Table *table = (Table *)self;
    char *slot;
    Py_ssize_t length;

    if (given != 2) {
        PyErr_Format(PyExc_TypeError, "a name and a block, not %zd arguments", given);
        return NULL;
    }
    PyObject *block = arguments[1];
    const uint8_t *name = name_in(arguments[0]);
    PyObject *where = name == NULL ? NULL : PyObject_GetAttr(block, slot_attribute);
    if (where == NULL)
        return NULL;
    if (PyBytes_AsStringAndSize(where, &slot, &length) < 0 || length != SLOT) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "a slot of %zd bytes instead of 20", length);
        Py_DECREF(where);
        return NULL;
    }
    if (table->used >= table->size / 4 * 3 && resize(table, table->size * 2) < 0) {
        Py_DECREF(where);
        return NULL;
    }
    const uint32_t tag = hash_of(table, name);
    Entry *entry = seek(table, name, tag);
    PyObject *former = entry->block;
    table->used += former == NULL;
    memcpy(entry->name, name, NAME);
    memcpy(entry->slot, slot, SLOT);
    entry->tag = tag;
    entry->block = Py_NewRef(block);
    Py_DECREF(where);
    Py_XDECREF(former);
    Py_RETURN_NONE;
}

static PyObject *remove_name(PyObject *self, PyObject *object)
{
    Table *table = (Table *)self;
    const uint8_t *name = name_in(object);
    if (name == NULL)
        return NULL;
    Entry *gap = seek(table, name, hash_of(table, name));
    PyObject *block = gap->block;
    if (block == NULL) {
        PyErr_SetObject(PyExc_KeyError, object);
        return NULL;
    }
    /* Fill the gap with entries that follow it. No entry moves before the position of its hash, where look-ups begin. */
    const size_t mask = table->size - 1;
    size_t empty = (size_t)(gap - table->entries);
    for (size_t at = (empty + 1) & mask; table->entries[at].block != NULL; at = (at + 1) & mask)
        if (((at - table->entries[at].tag) & mask) >= ((at - empty) & mask)) {
            table->entries[empty] = table->entries[at];
            empty = at;
        }
    table->entries[empty].block = NULL;
    table->used--;
    Py_DECREF(block);
    if (table->size > LEAST && table->used < table->size / 8 && resize(table, table->size / 2) < 0)
        PyErr_Clear(); /* the table keeps its size */
    Py_RETURN_NONE;
}

/* Returns the entries of the longest present prefix, to be freed; NULL with an error set for invalid hashes. */
static const Entry **found(const Table *table, PyObject *names, Py_ssize_t *count)
{
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(names, &bytes, &length) < 0)
        return NULL;
    if (length % NAME != 0) {
        PyErr_Format(PyExc_ValueError, "names of %zd bytes, which is not a multiple of 16", length);
        return NULL;
    }
    const Py_ssize_t asked = length / NAME;
    const Entry **entries = PyMem_Calloc((size_t)asked + 1, sizeof *entries);
    if (entries == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    const uint8_t *name = (const uint8_t *)bytes;
    const size_t mask = table->size - 1;
    uint32_t tags[AHEAD];
    for (Py_ssize_t i = 0; i < asked && i < AHEAD; i++) {
        tags[i] = hash_of(table, name + i * NAME);
        __builtin_prefetch(table->entries + (tags[i] & mask));
    }
    Py_ssize_t i = 0;
    for (; i < asked; i++) {
        const Entry *entry = seek(table, name + i * NAME, tags[i % AHEAD]);
        if (entry->block == NULL)
            break;
        entries[i] = entry;
        if (i + AHEAD < asked) {
            tags[i % AHEAD] = hash_of(table, name + (i + AHEAD) * NAME);
            __builtin_prefetch(table->entries + (tags[i % AHEAD] & mask));
        }
    }
    *count = i;
    return entries;
}

static PyObject *slots(PyObject *self, PyObject *names)
{
    Py_ssize_t count;
    const Entry **entries = found((Table *)self, names, &count);
    if (entries == NULL)
        return NULL;
    PyObject *joined = PyBytes_FromStringAndSize(NULL, count * SLOT);
    if (joined != NULL) {
        char *to = PyBytes_AsString(joined);
        for (Py_ssize_t i = 0; i < count; i++)
            memcpy(to + i * SLOT, entries[i]->slot, SLOT);
    }
    PyMem_Free(entries);
    return joined;
}

static PyObject *blocks(PyObject *self, PyObject *names)
{
    Py_ssize_t count;
    const Entry **entries = found((Table *)self, names, &count);
    if (entries == NULL)
        return NULL;
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++)
        PyList_SetItem(list, i, Py_NewRef(entries[i]->block));
    PyMem_Free(entries);
    return list;
}

static PyObject *names(PyObject *self, PyObject *Py_UNUSED(nothing))
{
    const Table *table = (Table *)self;
    PyObject *list = PyList_New(0);
    for (const Entry *entry = table->entries; list != NULL && entry < table->entries + table->size; entry++) {
        if (entry->block == NULL)
            continue;
        PyObject *name = PyBytes_FromStringAndSize((const char *)entry->name, NAME);
        if (name == NULL || PyList_Append(list, name) < 0)
            Py_CLEAR(list);
        Py_XDECREF(name);
    }
    return list;
}

static Py_ssize_t length(PyObject *self)
{
    return (Py_ssize_t)((Table *)self)->used;
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(named))
{
    unsigned long long key[2];
    if (!PyArg_ParseTuple(args, "(KK)", &key[0], &key[1]))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Table *table = (Table *)allocate(type, 0);
    if (table == NULL)
        return NULL;
    table->key[0] = key[0], table->key[1] = key[1];
    if (resize(table, LEAST) < 0) {
        Py_DECREF(table);
        return NULL;
    }
    return (PyObject *)table;
}

static void destroy(PyObject *self)
{
    Table *table = (Table *)self;
    PyTypeObject *type = Py_TYPE(self);
    Entry *entries = table->entries;
    for (size_t i = 0; i < table->size; i++)
        Py_XDECREF(entries[i].block);
    PyMem_Free(entries);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"get", get, METH_O, NULL},
    {"put", (PyCFunction)(void (*)(void))put, METH_FASTCALL, NULL},
    {"remove", remove_name, METH_O, NULL},
    {"slots", slots, METH_O, NULL},
    {"blocks", blocks, METH_O, NULL},
    {"names", names, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_new, (void *)make},          {Py_tp_dealloc, (void *)destroy}, {Py_tp_methods, methods},
    {Py_mp_length, (void *)length},     {Py_sq_contains, (void *)contains}, {0, NULL},
};

static PyType_Spec specification = {"kvstore.native._table.Table", sizeof(Table), 0, Py_TPFLAGS_DEFAULT, type_slots};

static int prepare(PyObject *module)
{
    if (slot_attribute == NULL && (slot_attribute = PyUnicode_InternFromString("slot")) == NULL)
        return -1;
    PyObject *type = PyType_FromSpec(&specification);
    if (type == NULL)
        return -1;
    int added = PyModule_AddObjectRef(module, "Table", type);
    Py_DECREF(type);
    return added;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)prepare}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_table", NULL, 0, NULL, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__table(void)
{
    return PyModuleDef_Init(&definition);
}

#else
PyMODINIT_FUNC PyInit__table(void)
{
    PyErr_SetString(PyExc_ImportError, "not for this compiler");
    return NULL;
}
#endif
