/* CRC-32C of bytes, also while they are copied. kvstore/native/checksums_twin.py documents the functions and gives the same
 * results.
 *
 * Carry-less multiplication folds four or sixteen lanes of 16 bytes at a time (V. Gopal et al., "Fast CRC Computation for
 * Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009). The CRC instruction handles the rest. This costs less than
 * fetching the bytes from memory, so a copy with its checksum takes as long as a copy.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) /* otherwise the import fails, and the twin does the work */
#include <immintrin.h>

#define FOLDING __attribute__((target("pclmul,sse4.2")))
#define WIDE __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2")))
#define LANE 16
#define STRIDE (4 * LANE)
#define WIDE_STRIDE (4 * STRIDE)
#define KEEP_LOCK 16384          /* bytes: below this, releasing the interpreter lock costs more than the work */
#define PAST_THE_CACHE (128 << 10) /* bytes: larger copies bypass the cache, so that they do not displace its content */
#define PAGE 4096                /* bytes: smallest page of x86-64 */

/* x^(distance + 31) and x^(distance - 33) modulo the polynomial, bits reversed: the factors that move a lane by `distance`
 * bits. The name of each pair has its distance. */
#define BY_2048 0xb9e02b86, 0xdcb17aa4
#define BY_1536 0xab7aff2a, 0xa87ab8a8
#define BY_1024 0xd3b6092, 0x6992cea2
#define BY_512 0x9e4addf8, 0x740eef02
#define BY_384 0xddc0152b, 0x1c291d04
#define BY_256 0xba4fc28e, 0x3da6d0cb
#define BY_128 0x493c7d27, 0xf20c0dfe

FOLDING static inline __m128i moved(__m128i lane, long long high, long long low)
{
    __m128i by = _mm_set_epi64x(high, low);
    return _mm_xor_si128(_mm_clmulepi64_si128(lane, by, 0x00), _mm_clmulepi64_si128(lane, by, 0x11));
}

/* Loads bytes exactly once: the compiler must not read them from memory again. The checksum then covers the stored bytes,
 * even if the source changes meanwhile. */
FOLDING static inline __m128i load(const uint8_t *from)
{
    __m128i lane = _mm_loadu_si128((const __m128i *)from);
    __asm__("" : "+x"(lane));
    return lane;
}

/* How a copy stores its bytes: not at all, normally, or bypassing the cache. */
enum store { NOWHERE, CACHED, STREAMED };

/* Advances a pointer by `further` bytes; NULL stays NULL. */
static inline uint8_t *at(uint8_t *to, size_t further, enum store how)
{
    return how == NOWHERE ? to : to + further;
}

FOLDING static inline void store(uint8_t *to, __m128i lane, enum store how)
{
    if (how == CACHED)
        _mm_storeu_si128((__m128i *)to, lane);
    else if (how == STREAMED)
        _mm_stream_si128((__m128i *)to, lane);
}

/* At the start of a page, a store that bypasses the cache waits until the processor has read the page tables. This takes half
 * as long as filling the page. Therefore the next page is prefetched while the current page is filled; a prefetch never
 * faults. On Zen 4 this makes copies into small pages 50 % faster, and copies into huge pages 17 %. */
static inline void look_ahead(const uint8_t *to, size_t stride, enum store how)
{
    if (how == STREAMED && ((uintptr_t)to & (PAGE - 1)) < stride)
        __builtin_prefetch((const void *)((uintptr_t)to + PAGE)); /* the address may be after the destination */
}

FOLDING static inline uint32_t bytes(uint32_t crc, const uint8_t *from, uint8_t *to, size_t count)
{
    for (; count > 0; count--) {
        uint8_t byte = *from++;
        __asm__("" : "+r"(byte)); /* as in `load` */
        if (to != NULL)
            *to++ = byte;
        crc = _mm_crc32_u8(crc, byte);
    }
    return crc;
}

/* Returns the CRC of four consecutive lanes. */
FOLDING static inline uint32_t reduced(const __m128i lanes[4])
{
    __m128i sum = _mm_xor_si128(_mm_xor_si128(moved(lanes[0], BY_384), moved(lanes[1], BY_256)),
                                _mm_xor_si128(moved(lanes[2], BY_128), lanes[3]));
    uint64_t crc = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(sum));
    return (uint32_t)_mm_crc32_u64(crc, (uint64_t)_mm_extract_epi64(sum, 1));
}

/* Handles `strides` times STRIDE bytes; `strides` is at least 1. */
FOLDING static inline __attribute__((always_inline)) uint32_t fold(uint32_t crc, const uint8_t *from, uint8_t *to,
                                                                   size_t strides, enum store how)
{
    __m128i lanes[4];
    for (int i = 0; i < 4; i++) {
        lanes[i] = load(from + i * LANE);
        store(at(to, i * LANE, how), lanes[i], how);
    }
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128((int)crc));
    for (size_t stride = 1; stride < strides; stride++) {
        from += STRIDE;
        to = at(to, STRIDE, how);
        look_ahead(to, STRIDE, how);
        for (int i = 0; i < 4; i++) {
            __m128i next = load(from + i * LANE);
            store(at(to, i * LANE, how), next, how);
            lanes[i] = _mm_xor_si128(moved(lanes[i], BY_512), next);
        }
    }
    return reduced(lanes);
}

/* The functions for wide registers do the same as `moved` to `fold`, but with four lanes in each register (AVX-512). */
WIDE static inline __m512i moved_wide(__m512i lanes, long long high, long long low)
{
    __m512i by = _mm512_broadcast_i32x4(_mm_set_epi64x(high, low));
    return _mm512_xor_si512(_mm512_clmulepi64_epi128(lanes, by, 0x00), _mm512_clmulepi64_epi128(lanes, by, 0x11));
}

WIDE static inline __m512i load_wide(const uint8_t *from)
{
    __m512i lanes = _mm512_loadu_si512(from);
    __asm__("" : "+v"(lanes)); /* as in `load` */
    return lanes;
}

WIDE static inline void store_wide(uint8_t *to, __m512i lanes, enum store how)
{
    if (how == CACHED)
        _mm512_storeu_si512(to, lanes);
    else if (how == STREAMED)
        _mm512_stream_si512((__m512i *)to, lanes);
}

WIDE static inline __attribute__((always_inline)) uint32_t fold_wide(uint32_t crc, const uint8_t *from, uint8_t *to,
                                                                     size_t strides, enum store how)
{
    __m512i wide[4];
    for (int i = 0; i < 4; i++) {
        wide[i] = load_wide(from + i * STRIDE);
        store_wide(at(to, i * STRIDE, how), wide[i], how);
    }
    wide[0] = _mm512_xor_si512(wide[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    for (size_t stride = 1; stride < strides; stride++) {
        from += WIDE_STRIDE;
        to = at(to, WIDE_STRIDE, how);
        look_ahead(to, WIDE_STRIDE, how);
        for (int i = 0; i < 4; i++) {
            __m512i next = load_wide(from + i * STRIDE);
            store_wide(at(to, i * STRIDE, how), next, how);
            wide[i] = _mm512_xor_si512(moved_wide(wide[i], BY_2048), next);
        }
    }
    __m128i lanes[4];
    _mm512_storeu_si512(lanes, _mm512_xor_si512(
        _mm512_xor_si512(moved_wide(wide[0], BY_1536), moved_wide(wide[1], BY_1024)),
        _mm512_xor_si512(moved_wide(wide[2], BY_512), wide[3])));
    return reduced(lanes);
}

FOLDING static uint32_t narrowly(uint32_t crc, const uint8_t *from, uint8_t *to, size_t strides, enum store how)
{
    if (how == NOWHERE)
        return fold(crc, from, to, strides, NOWHERE);
    return how == CACHED ? fold(crc, from, to, strides, CACHED) : fold(crc, from, to, strides, STREAMED);
}

WIDE static uint32_t widely(uint32_t crc, const uint8_t *from, uint8_t *to, size_t strides, enum store how)
{
    if (how == NOWHERE)
        return fold_wide(crc, from, to, strides, NOWHERE);
    return how == CACHED ? fold_wide(crc, from, to, strides, CACHED) : fold_wide(crc, from, to, strides, STREAMED);
}

static int can_wide; /* 1 if the processor supports the functions for wide registers; set when the module is loaded */

/* Returns the CRC-32C of the earlier bytes, whose CRC-32C is `crc`, followed by `count` bytes at `from`. Also copies these
 * bytes to `to`, unless `to` is NULL. */
FOLDING static uint32_t extend(uint32_t crc, const uint8_t *from, uint8_t *to, size_t count)
{
    enum store how = to == NULL ? NOWHERE : count < PAST_THE_CACHE ? CACHED : STREAMED;
    crc = ~crc;
    if (how == STREAMED) {
        size_t head = -(uintptr_t)to & (STRIDE - 1);
        crc = bytes(crc, from, to, head);
        from += head, to += head, count -= head;
    }
    for (int wide = can_wide; wide >= 0; wide--) {
        size_t stride = wide ? WIDE_STRIDE : STRIDE, folded = count / stride * stride;
        if (folded > 0) {
            crc = (wide ? widely : narrowly)(crc, from, to, folded / stride, how);
            from += folded, count -= folded;
            to = at(to, folded, how);
        }
    }
    if (how == STREAMED)
        _mm_sfence();
    return ~bytes(crc, from, to, count);
}

static PyObject *run(uint32_t crc, Py_buffer *source, Py_buffer *destination)
{
    uint8_t *to = destination == NULL ? NULL : destination->buf;
    if (source->len < KEEP_LOCK) {
        crc = extend(crc, source->buf, to, (size_t)source->len);
    } else {
        Py_BEGIN_ALLOW_THREADS
        crc = extend(crc, source->buf, to, (size_t)source->len);
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *py_extend(PyObject *module, PyObject *args)
{
    unsigned int crc;
    Py_buffer data;
    (void)module;
    if (!PyArg_ParseTuple(args, "Iy*", &crc, &data))
        return NULL;
    PyObject *result = run(crc, &data, NULL);
    PyBuffer_Release(&data);
    return result;
}

static PyObject *py_copy(PyObject *module, PyObject *args)
{
    unsigned int crc;
    Py_buffer source, destination;
    PyObject *result = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "Iy*w*", &crc, &source, &destination))
        return NULL;
    if (source.len != destination.len)
        PyErr_Format(PyExc_ValueError, "%zd bytes to copy into %zd", source.len, destination.len);
    else
        result = run(crc, &source, &destination);
    PyBuffer_Release(&source);
    PyBuffer_Release(&destination);
    return result;
}

/* The functions below copy many blocks of a pool in one call. */

#define SLOT_BYTES 20 /* offset (8), generation (8), CRC-32C (4), little-endian: kvstore.messages.SLOT */

enum outcome { MOVED, GONE, CORRUPT }; /* the same numbers as in kvstore/native/checksums_twin.py */

struct slot {
    uint64_t offset, generation;
    uint32_t crc;
};

struct work {
    Py_buffer pool, stamps, slots;
    Py_ssize_t page_bytes, block_bytes, count, parts;
    Py_buffer *views;    /* views of the parts */
    uint8_t *outcomes;   /* one for each block */
    uint32_t *checksums; /* checksums of the bytes that were written */
};

static struct slot slot_at(const struct work *work, Py_ssize_t index)
{
    struct slot slot;
    const uint8_t *at = (const uint8_t *)work->slots.buf + index * SLOT_BYTES;
    memcpy(&slot.offset, at, 8);
    memcpy(&slot.generation, at + 8, 8);
    memcpy(&slot.crc, at + 16, 4);
    return slot;
}

/* Returns whether the place exists and belongs to the block of the slot. */
static int holds(const struct work *work, const struct slot *slot)
{
    const uint64_t *stamps = work->stamps.buf;
    uint64_t page = slot->offset / (uint64_t)work->page_bytes;
    if (page >= (uint64_t)work->stamps.len / 8 || slot->offset > (uint64_t)work->pool.len ||
        (uint64_t)work->pool.len - slot->offset < (uint64_t)work->block_bytes)
        return 0;
    return __atomic_load_n(stamps + page, __ATOMIC_ACQUIRE) == slot->generation;
}

static void get_all(struct work *work)
{
    Py_buffer *part = work->views, *end = work->views + work->parts;
    for (Py_ssize_t index = 0; index < work->count; index++) {
        struct slot slot = slot_at(work, index);
        int held = holds(work, &slot);
        const uint8_t *from = (const uint8_t *)work->pool.buf + (held ? slot.offset : 0);
        uint32_t crc = 0;
        for (Py_ssize_t left = work->block_bytes; left > 0 && part < end; left -= part->len, part++)
            if (held) {
                crc = extend(crc, from, part->buf, (size_t)part->len);
                from += part->len;
            }
        work->outcomes[index] = !held ? GONE : crc == slot.crc ? MOVED : holds(work, &slot) ? CORRUPT : GONE;
    }
}

static void put_all(struct work *work)
{
    Py_buffer *part = work->views, *end = work->views + work->parts;
    for (Py_ssize_t index = 0; index < work->count; index++) {
        struct slot slot = slot_at(work, index);
        int held = holds(work, &slot);
        uint8_t *to = (uint8_t *)work->pool.buf + (held ? slot.offset : 0);
        uint32_t crc = 0;
        for (Py_ssize_t left = work->block_bytes; left > 0 && part < end; left -= part->len, part++)
            if (held) {
                crc = extend(crc, part->buf, to, (size_t)part->len);
                to += part->len;
            }
        work->outcomes[index] = held && holds(work, &slot) ? MOVED : GONE;
        work->checksums[index] = crc;
    }
}

/* Gets the buffers of the parts; returns whether they make up whole blocks. */
static int take_parts(struct work *work, PyObject *parts, int flags)
{
    Py_ssize_t total = PyList_Size(parts), left = 0, blocks = 0;
    work->views = PyMem_Calloc((size_t)total + 1, sizeof(Py_buffer));
    if (work->views == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    for (; work->parts < total; work->parts++) {
        Py_buffer *view = work->views + work->parts;
        PyObject *part = PySequence_GetItem(parts, work->parts); /* getting a buffer may run code that shortens the list */
        int taken = part != NULL && PyObject_GetBuffer(part, view, flags) == 0;
        Py_XDECREF(part);
        if (!taken)
            return 0;
        if (left == 0 && view->len > 0)
            left = work->block_bytes, blocks++;
        if (view->len > left) {
            PyBuffer_Release(view);
            PyErr_Format(PyExc_AssertionError, "parts do not make blocks of %zd bytes", work->block_bytes);
            return 0;
        }
        left -= view->len;
    }
    if (left != 0 || blocks != work->count) {
        PyErr_Format(PyExc_AssertionError, "parts do not make %zd blocks of %zd bytes", work->count, work->block_bytes);
        return 0;
    }
    return 1;
}

static PyObject *listed(const struct work *work)
{
    PyObject *checksums = PyList_New(work->count);
    for (Py_ssize_t index = 0; checksums != NULL && index < work->count; index++) {
        PyObject *checksum = PyLong_FromUnsignedLong(work->checksums[index]);
        if (checksum == NULL)
            Py_CLEAR(checksums);
        else
            PyList_SetItem(checksums, index, checksum);
    }
    return checksums;
}

static PyObject *told(const struct work *work, int with_checksums)
{
    PyObject *outcomes = PyBytes_FromStringAndSize((const char *)work->outcomes, work->count);
    if (outcomes == NULL || !with_checksums)
        return outcomes;
    PyObject *checksums = listed(work);
    PyObject *both = checksums == NULL ? NULL : PyTuple_Pack(2, outcomes, checksums);
    Py_DECREF(outcomes);
    Py_XDECREF(checksums);
    return both;
}

static PyObject *move(PyObject *args, const char *format, int flags, void (*all)(struct work *), int with_checksums)
{
    struct work work = {.views = NULL};
    PyObject *parts, *result = NULL;
    if (!PyArg_ParseTuple(args, format, &work.pool, &work.stamps, &work.page_bytes, &work.slots, &work.block_bytes,
                          &PyList_Type, &parts))
        return NULL;
    work.count = work.slots.len / SLOT_BYTES;
    if (work.page_bytes < 1 || work.block_bytes < 1 || work.slots.len % SLOT_BYTES != 0)
        PyErr_SetString(PyExc_ValueError, "sizes must be positive, and slots whole");
    else if ((uintptr_t)work.stamps.buf % sizeof(uint64_t) != 0)
        PyErr_SetString(PyExc_ValueError, "stamps are not aligned");
    else if (take_parts(&work, parts, flags)) {
        work.outcomes = PyMem_Calloc((size_t)work.count + 1, 1 + sizeof(uint32_t));
        if (work.outcomes == NULL)
            PyErr_NoMemory();
        else {
            size_t before = ((size_t)work.count + 1) * sizeof(uint32_t); /* the checksums come first because they are aligned */
            work.checksums = (uint32_t *)work.outcomes;
            work.outcomes += before;
            Py_BEGIN_ALLOW_THREADS
            all(&work);
            Py_END_ALLOW_THREADS
            result = told(&work, with_checksums);
            PyMem_Free(work.checksums);
        }
    }
    while (work.parts > 0)
        PyBuffer_Release(work.views + --work.parts);
    PyMem_Free(work.views);
    PyBuffer_Release(&work.pool);
    PyBuffer_Release(&work.stamps);
    PyBuffer_Release(&work.slots);
    return result;
}

static PyObject *py_get_blocks(PyObject *module, PyObject *args)
{
    (void)module;
    return move(args, "y*y*ny*nO!", PyBUF_WRITABLE, get_all, 0);
}

static PyObject *py_put_blocks(PyObject *module, PyObject *args)
{
    (void)module;
    return move(args, "w*y*ny*nO!", PyBUF_SIMPLE, put_all, 1);
}

static void sum_all(struct work *work)
{
    Py_buffer *part = work->views, *end = work->views + work->parts;
    for (Py_ssize_t index = 0; index < work->count; index++) {
        uint32_t crc = 0;
        for (Py_ssize_t left = work->block_bytes; left > 0 && part < end; left -= part->len, part++)
            crc = extend(crc, part->buf, NULL, (size_t)part->len);
        work->checksums[index] = crc;
    }
}

static PyObject *py_sums(PyObject *module, PyObject *args)
{
    struct work work = {.views = NULL};
    PyObject *parts, *result = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "nnO!", &work.count, &work.block_bytes, &PyList_Type, &parts))
        return NULL;
    if (work.block_bytes < 1 || work.count < 0)
        PyErr_SetString(PyExc_ValueError, "sizes must be positive");
    else if (take_parts(&work, parts, PyBUF_SIMPLE)) {
        work.checksums = PyMem_Calloc((size_t)work.count + 1, sizeof(uint32_t));
        if (work.checksums == NULL)
            PyErr_NoMemory();
        else {
            Py_BEGIN_ALLOW_THREADS
            sum_all(&work);
            Py_END_ALLOW_THREADS
            result = listed(&work);
            PyMem_Free(work.checksums);
        }
    }
    while (work.parts > 0)
        PyBuffer_Release(work.views + --work.parts);
    PyMem_Free(work.views);
    return result;
}

static PyMethodDef methods[] = {
    {"extend", py_extend, METH_VARARGS, NULL},
    {"copy", py_copy, METH_VARARGS, NULL},
    {"get_blocks", py_get_blocks, METH_VARARGS, NULL},
    {"put_blocks", py_put_blocks, METH_VARARGS, NULL},
    {"sums", py_sums, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_checksum", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__checksum(void)
{
    if (!__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("sse4.2")) {
        PyErr_SetString(PyExc_ImportError, "this processor lacks PCLMULQDQ or SSE 4.2");
        return NULL;
    }
    can_wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
    return PyModuleDef_Init(&definition);
}
#else
PyMODINIT_FUNC PyInit__checksum(void)
{
    PyErr_SetString(PyExc_ImportError, "written for x86-64");
    return NULL;
}
#endif
