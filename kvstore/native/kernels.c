/* Inner loops of repacking and of the codecs. kvstore/native/kernels_twin.py documents them and writes the same bytes. Sizes
 * are checked before the interpreter lock is released, so a call either raises or does all of its work.
 *
 * Floating point: each operation rounds once, as in numpy, so build with -ffp-contract=off. -fno-trapping-math changes no
 * result and lets the compiler compute both sides of a choice at once (6 times faster for float16).
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define WIDE __attribute__((target_clones("arch=skylake-avx512", "avx2", "default"))) /* chosen when the module is loaded */
#else
#define WIDE
#endif

/* 16-bit values at any address: a payload is packed, so its views may be unaligned. */
#if defined(__GNUC__)
typedef uint16_t Half __attribute__((aligned(1), may_alias));
#else
typedef uint16_t Half;
#endif

#define COPY_AXES 5
#define COPY_COLUMNS (5 + 3 * COPY_AXES)
#define MAX_VIEWS 4

/* The arrays among the arguments of a call: contiguous, with checked rank and item size, and released together. */

typedef struct {
    Py_buffer views[MAX_VIEWS];
    int count;
} Arguments;

static void release(Arguments *arguments)
{
    while (arguments->count > 0)
        PyBuffer_Release(&arguments->views[--arguments->count]);
}

static Py_buffer *take(Arguments *arguments, PyObject *object, int rank, Py_ssize_t item, int writable)
{
    Py_buffer *view = &arguments->views[arguments->count];
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0)) < 0)
        return NULL;
    arguments->count++;
    if (view->ndim != rank || view->itemsize != item) {
        PyErr_Format(PyExc_ValueError, "an array of %d axes and %zd-byte items, not %d and %zd", view->ndim,
                     view->itemsize, rank, item);
        return NULL;
    }
    return view;
}

static PyObject *refuse(Arguments *arguments, const char *message)
{
    release(arguments);
    if (message != NULL)
        PyErr_SetString(PyExc_ValueError, message);
    return NULL;
}

static PyObject *done(Arguments *arguments)
{
    release(arguments);
    Py_RETURN_NONE;
}

/* A list of contiguous buffers of bytes. */

typedef struct {
    Py_buffer *views;
    Py_ssize_t count;
} Objects;

static void release_objects(Objects *objects)
{
    while (objects->count > 0)
        PyBuffer_Release(&objects->views[--objects->count]);
    PyMem_Free(objects->views);
    objects->views = NULL;
}

static int take_objects(Objects *objects, PyObject *sequence, int writable)
{
    Py_ssize_t length = PySequence_Size(sequence);
    objects->count = 0;
    objects->views = NULL;
    if (length < 0)
        return -1;
    objects->views = PyMem_Calloc(length ? (size_t)length : 1, sizeof(Py_buffer));
    if (objects->views == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < length; i++) {
        PyObject *each = PySequence_GetItem(sequence, i);
        if (each == NULL)
            return -1;
        int failed =
            PyObject_GetBuffer(each, &objects->views[i], PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0)) < 0;
        Py_DECREF(each);
        if (failed)
            return -1;
        objects->count++;
    }
    return 0;
}

/* copy */

typedef struct {
    int64_t count, source_stride, destination_stride;
} Axis;

typedef struct { /* row of a table: COPY_COLUMNS numbers, as in the twin */
    int64_t source, source_offset, destination, destination_offset, run;
    Axis axes[COPY_AXES];
} Row;

_Static_assert(sizeof(Row) == COPY_COLUMNS * sizeof(int64_t), "rows lie as the table has them");

static Row row_at(const char *rows, Py_ssize_t index)
{
    Row row;
    memcpy(&row, rows + index * (Py_ssize_t)sizeof row, sizeof row);
    return row;
}

static void copy_runs(char *to, const char *from, const Axis *axis, int axes, int64_t run)
{
    if (axes == 0) {
        memcpy(to, from, (size_t)run);
        return;
    }
    const int64_t count = axis->count, there = axis->destination_stride, here = axis->source_stride;
    if (axes > 1) {
        for (int64_t i = 0; i < count; i++)
            copy_runs(to + i * there, from + i * here, axis + 1, axes - 1, run);
        return;
    }
    switch (run) { /* the compiler turns a copy of constant length into move instructions */
    case 1:
        for (int64_t i = 0; i < count; i++)
            to[i * there] = from[i * here];
        return;
    case 2:
        for (int64_t i = 0; i < count; i++)
            memcpy(to + i * there, from + i * here, 2);
        return;
    case 4:
        for (int64_t i = 0; i < count; i++)
            memcpy(to + i * there, from + i * here, 4);
        return;
    default:
        for (int64_t i = 0; i < count; i++)
            memcpy(to + i * there, from + i * here, (size_t)run);
    }
}

/* Returns whether the last run along all axes ends within the object, without overflows. */
static int is_within(int64_t offset, const Axis *axes, int destination, int64_t run, Py_ssize_t length)
{
    if (offset < 0 || run < 0 || offset > length || run > length - offset)
        return 0;
    int64_t left = length - offset - run;
    for (int i = 0; i < COPY_AXES; i++) {
        int64_t stride = destination ? axes[i].destination_stride : axes[i].source_stride;
        if (axes[i].count < 1 || stride < 0)
            return 0;
        if (axes[i].count == 1 || stride == 0)
            continue;
        if (axes[i].count - 1 > left / stride)
            return 0;
        left -= (axes[i].count - 1) * stride;
    }
    return 1;
}

static PyObject *copy(PyObject *module, PyObject *args)
{
    PyObject *table, *from, *into;
    Arguments arguments = {.count = 0};
    Objects sources = {NULL, 0}, destinations = {NULL, 0};
    Py_buffer *view = NULL;
    const char *message = NULL;
    (void)module;

    if (!PyArg_ParseTuple(args, "OOO", &table, &from, &into))
        return NULL;
    if ((view = take(&arguments, table, 2, 8, 0)) == NULL || take_objects(&sources, from, 0) < 0 ||
        take_objects(&destinations, into, 1) < 0)
        goto refused;
    const char *rows = view->buf;
    const Py_ssize_t count = view->shape[0];
    if (view->shape[1] != COPY_COLUMNS) {
        message = "the table has another number of columns";
        goto refused;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        const Row row = row_at(rows, i);
        if (row.source < 0 || row.source >= sources.count || row.destination < 0 ||
            row.destination >= destinations.count ||
            !is_within(row.source_offset, row.axes, 0, row.run, sources.views[row.source].len) ||
            !is_within(row.destination_offset, row.axes, 1, row.run, destinations.views[row.destination].len)) {
            message = "a copy is not within its objects";
            goto refused;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++) {
        const Row row = row_at(rows, i);
        Axis used[COPY_AXES];
        int number = 0;
        for (int axis = 0; axis < COPY_AXES; axis++)
            if (row.axes[axis].count > 1)
                used[number++] = row.axes[axis];
        copy_runs((char *)destinations.views[row.destination].buf + row.destination_offset,
                  (const char *)sources.views[row.source].buf + row.source_offset, used, number, row.run);
    }
    Py_END_ALLOW_THREADS
    release_objects(&sources);
    release_objects(&destinations);
    return done(&arguments);

refused:
    release_objects(&sources);
    release_objects(&destinations);
    return refuse(&arguments, message);
}

/* split, join */

WIDE static void split_two(const uint8_t *block, uint8_t *low, uint8_t *high, Py_ssize_t values)
{
    for (Py_ssize_t i = 0; i < values; i++) {
        low[i] = block[2 * i];
        high[i] = block[2 * i + 1];
    }
}

WIDE static void join_two(const uint8_t *low, const uint8_t *high, uint8_t *block, Py_ssize_t values)
{
    for (Py_ssize_t i = 0; i < values; i++) {
        block[2 * i] = low[i];
        block[2 * i + 1] = high[i];
    }
}

static PyObject *split(PyObject *module, PyObject *args)
{
    PyObject *from, *into;
    Arguments arguments = {.count = 0};
    Py_buffer *block, *planes;
    (void)module;

    if (!PyArg_ParseTuple(args, "OO", &from, &into))
        return NULL;
    if ((block = take(&arguments, from, 1, 1, 0)) == NULL || (planes = take(&arguments, into, 2, 1, 1)) == NULL)
        return refuse(&arguments, NULL);
    if (block->len != planes->len)
        return refuse(&arguments, "planes and block differ in size");
    const Py_ssize_t width = planes->shape[0], values = planes->shape[1];
    const uint8_t *source = block->buf;
    uint8_t *destination = planes->buf;
    Py_BEGIN_ALLOW_THREADS
    if (width == 1)
        memcpy(destination, source, (size_t)values);
    else if (width == 2)
        split_two(source, destination, destination + values, values);
    else
        for (Py_ssize_t place = 0; place < width; place++)
            for (Py_ssize_t i = 0; i < values; i++)
                destination[place * values + i] = source[i * width + place];
    Py_END_ALLOW_THREADS
    return done(&arguments);
}

static PyObject *join(PyObject *module, PyObject *args)
{
    PyObject *from, *into;
    Arguments arguments = {.count = 0};
    Objects planes = {NULL, 0};
    Py_buffer *block = NULL;
    const char *message = NULL;
    (void)module;

    if (!PyArg_ParseTuple(args, "OO", &from, &into))
        return NULL;
    if ((block = take(&arguments, into, 1, 1, 1)) == NULL || take_objects(&planes, from, 0) < 0)
        goto refused;
    const Py_ssize_t width = planes.count, values = width ? planes.views[0].len : 0;
    for (Py_ssize_t place = 0; place < width; place++)
        if (planes.views[place].len != values) {
            message = "planes differ in size";
            goto refused;
        }
    if (width == 0 || values > PY_SSIZE_T_MAX / width || block->len != values * width) {
        message = "planes and block differ in size";
        goto refused;
    }
    uint8_t *destination = block->buf;
    Py_BEGIN_ALLOW_THREADS
    if (width == 1)
        memcpy(destination, planes.views[0].buf, (size_t)values);
    else if (width == 2)
        join_two(planes.views[0].buf, planes.views[1].buf, destination, values);
    else
        for (Py_ssize_t place = 0; place < width; place++) {
            const uint8_t *source = planes.views[place].buf;
            for (Py_ssize_t i = 0; i < values; i++)
                destination[i * width + place] = source[i];
        }
    Py_END_ALLOW_THREADS
    release_objects(&planes);
    return done(&arguments);

refused:
    release_objects(&planes);
    return refuse(&arguments, message);
}

/* narrow, widen */

static int has_table(const Py_buffer *which, Py_ssize_t tables)
{
    const Half *table = which->buf;
    for (Py_ssize_t i = 0; i < which->shape[0]; i++)
        if (table[i] >= tables)
            return 0;
    return 1;
}

/* Performs `narrow`, which looks up a code of one byte for each 16-bit value, or `widen`, which does the reverse. */
static PyObject *look_up(PyObject *args, int narrowing)
{
    PyObject *from, *tabled, *grouped, *into;
    Arguments arguments = {.count = 0};
    Py_buffer *source, *tables, *which, *destination;

    if (!PyArg_ParseTuple(args, "OOOO", &from, &tabled, &grouped, &into))
        return NULL;
    if ((source = take(&arguments, from, 2, narrowing ? 2 : 1, 0)) == NULL ||
        (tables = take(&arguments, tabled, 2, narrowing ? 1 : 2, 0)) == NULL ||
        (which = take(&arguments, grouped, 1, 2, 0)) == NULL ||
        (destination = take(&arguments, into, 2, narrowing ? 1 : 2, 1)) == NULL)
        return refuse(&arguments, NULL);
    const Py_ssize_t groups = source->shape[0], length = source->shape[1], entries = narrowing ? 65536 : 256;
    if (destination->shape[0] != groups || destination->shape[1] != length || which->shape[0] != groups)
        return refuse(&arguments, "values, codes and groups differ in size");
    if (tables->shape[1] != entries || !has_table(which, tables->shape[0]))
        return refuse(&arguments, "a group's table does not exist");
    const Half *table_of = which->buf;
    Py_BEGIN_ALLOW_THREADS
    if (narrowing)
        for (Py_ssize_t group = 0; group < groups; group++) {
            const uint8_t *table = (const uint8_t *)tables->buf + (Py_ssize_t)table_of[group] * entries;
            const Half *values = (const Half *)source->buf + group * length;
            uint8_t *codes = (uint8_t *)destination->buf + group * length;
            for (Py_ssize_t i = 0; i < length; i++)
                codes[i] = table[values[i]];
        }
    else
        for (Py_ssize_t group = 0; group < groups; group++) {
            const Half *table = (const Half *)tables->buf + (Py_ssize_t)table_of[group] * entries;
            const uint8_t *codes = (const uint8_t *)source->buf + group * length;
            Half *values = (Half *)destination->buf + group * length;
            for (Py_ssize_t i = 0; i < length; i++)
                values[i] = table[codes[i]];
        }
    Py_END_ALLOW_THREADS
    return done(&arguments);
}

static PyObject *narrow(PyObject *module, PyObject *args)
{
    (void)module;
    return look_up(args, 1);
}

static PyObject *widen(PyObject *module, PyObject *args)
{
    (void)module;
    return look_up(args, 0);
}

/* quantise, dequantise */

#define BFLOAT16 7 /* fraction bits */
#define FLOAT16 10
#define MAGNITUDE 0x7FFF

static inline float as_float(uint32_t bits)
{
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline uint32_t as_bits(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

static inline float from_bfloat16(uint16_t pattern)
{
    return as_float((uint32_t)pattern << 16);
}

static inline float from_float16(uint16_t pattern)
{
    /* Moves fraction and exponent to their place in a float32; the factor exactly corrects the bias. */
    float magnitude = as_float((uint32_t)(pattern & MAGNITUDE) << 13) * 0x1p112f;
    return as_float(as_bits(magnitude) | (uint32_t)(pattern & 0x8000) << 16);
}

static inline uint16_t to_bfloat16(float number)
{
    uint32_t bits = as_bits(number), magnitude = bits & 0x7FFFFFFF;
    uint32_t rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16;
    return (uint16_t)((rounded < 0x7F7F ? rounded : 0x7F7F) | (bits >> 16 & 0x8000));
}

static inline uint16_t to_float16(float number)
{
    uint32_t bits = as_bits(number), magnitude = bits & 0x7FFFFFFF;
    /* Above 2**-14 the fraction is rounded; below, adding 0.5 leaves multiples of 2**-24, the smallest float16. */
    uint32_t normal = ((magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13) - (112u << 10);
    uint32_t small = as_bits(as_float(magnitude) + 0.5f) - 0x3F000000u;
    uint32_t rounded = magnitude < 0x38800000u ? small : normal;
    return (uint16_t)((rounded < 0x7BFF ? rounded : 0x7BFF) | (bits >> 16 & 0x8000));
}

static inline int8_t nearest(float quotient)
{
    return (int8_t)(as_bits(quotient + 12582912.0f) & 0xFF); /* adding 1.5 * 2**23 rounds to an integer, ties to even */
}

WIDE static void largest_of(const Half *values, Half *largest, Py_ssize_t rows, Py_ssize_t columns)
{
    memset(largest, 0, (size_t)columns * 2);
    for (Py_ssize_t row = 0; row < rows; row++)
        for (Py_ssize_t i = 0; i < columns; i++) {
            uint16_t magnitude = values[row * columns + i] & MAGNITUDE;
            largest[i] = magnitude > largest[i] ? magnitude : largest[i];
        }
}

WIDE static void scale_bfloat16(Half *scales, Py_ssize_t columns)
{
    for (Py_ssize_t i = 0; i < columns; i++) {
        uint32_t scale = (as_bits(from_bfloat16(scales[i]) / 127.0f) + 0xFFFF) >> 16;
        scales[i] = scale ? (uint16_t)scale : 0x3F80;
    }
}

WIDE static void scale_float16(Half *scales, Py_ssize_t columns)
{
    for (Py_ssize_t i = 0; i < columns; i++) {
        uint32_t scale = (as_bits(from_float16(scales[i]) / 127.0f) + 0xFFFF) >> 16;
        scales[i] = scale ? (uint16_t)scale : 0x3F80;
    }
}

WIDE static void divide_bfloat16(const Half *values, const Half *scales, int8_t *codes, Py_ssize_t columns)
{
    for (Py_ssize_t i = 0; i < columns; i++)
        codes[i] = nearest(from_bfloat16(values[i]) / from_bfloat16(scales[i]));
}

WIDE static void divide_float16(const Half *values, const Half *scales, int8_t *codes, Py_ssize_t columns)
{
    for (Py_ssize_t i = 0; i < columns; i++)
        codes[i] = nearest(from_float16(values[i]) / from_bfloat16(scales[i]));
}

WIDE static void multiply_bfloat16(const int8_t *codes, const Half *scales, Half *values, Py_ssize_t columns)
{
    for (Py_ssize_t i = 0; i < columns; i++)
        values[i] = to_bfloat16((float)codes[i] * from_bfloat16(scales[i]));
}

WIDE static void multiply_float16(const int8_t *codes, const Half *scales, Half *values, Py_ssize_t columns)
{
    for (Py_ssize_t i = 0; i < columns; i++)
        values[i] = to_float16((float)codes[i] * from_bfloat16(scales[i]));
}

static const char *check_columns(const Py_buffer *values, const Py_buffer *codes, const Py_buffer *scales, int fraction)
{
    if (fraction != BFLOAT16 && fraction != FLOAT16)
        return "no format that is known has that many fraction bits";
    for (int axis = 0; axis < 3; axis++)
        if (values->shape[axis] != codes->shape[axis])
            return "shapes do not fit";
    if (scales->shape[0] != values->shape[0] || scales->shape[1] != values->shape[2])
        return "shapes do not fit";
    return NULL;
}

static PyObject *quantise(PyObject *module, PyObject *args)
{
    PyObject *from, *scaled, *into;
    Arguments arguments = {.count = 0};
    Py_buffer *values, *scales, *codes;
    const char *message;
    int fraction;
    (void)module;

    if (!PyArg_ParseTuple(args, "OiOO", &from, &fraction, &scaled, &into))
        return NULL;
    if ((values = take(&arguments, from, 3, 2, 0)) == NULL || (scales = take(&arguments, scaled, 2, 2, 1)) == NULL ||
        (codes = take(&arguments, into, 3, 1, 1)) == NULL)
        return refuse(&arguments, NULL);
    if ((message = check_columns(values, codes, scales, fraction)) != NULL)
        return refuse(&arguments, message);
    const Py_ssize_t groups = values->shape[0], rows = values->shape[1], columns = values->shape[2];
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t group = 0; group < groups; group++) {
        const Half *value = (const Half *)values->buf + group * rows * columns;
        int8_t *code = (int8_t *)codes->buf + group * rows * columns;
        Half *scale = (Half *)scales->buf + group * columns;
        largest_of(value, scale, rows, columns);
        (fraction == BFLOAT16 ? scale_bfloat16 : scale_float16)(scale, columns);
        for (Py_ssize_t row = 0; row < rows; row++)
            (fraction == BFLOAT16 ? divide_bfloat16 : divide_float16)(value + row * columns, scale,
                                                                      code + row * columns, columns);
    }
    Py_END_ALLOW_THREADS
    return done(&arguments);
}

static PyObject *dequantise(PyObject *module, PyObject *args)
{
    PyObject *from, *scaled, *into;
    Arguments arguments = {.count = 0};
    Py_buffer *codes, *scales, *values;
    const char *message;
    int fraction;
    (void)module;

    if (!PyArg_ParseTuple(args, "OOiO", &from, &scaled, &fraction, &into))
        return NULL;
    if ((codes = take(&arguments, from, 3, 1, 0)) == NULL || (scales = take(&arguments, scaled, 2, 2, 0)) == NULL ||
        (values = take(&arguments, into, 3, 2, 1)) == NULL)
        return refuse(&arguments, NULL);
    if ((message = check_columns(values, codes, scales, fraction)) != NULL)
        return refuse(&arguments, message);
    const Py_ssize_t groups = values->shape[0], rows = values->shape[1], columns = values->shape[2];
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t group = 0; group < groups; group++) {
        const int8_t *code = (const int8_t *)codes->buf + group * rows * columns;
        const Half *scale = (const Half *)scales->buf + group * columns;
        Half *value = (Half *)values->buf + group * rows * columns;
        for (Py_ssize_t row = 0; row < rows; row++)
            (fraction == BFLOAT16 ? multiply_bfloat16 : multiply_float16)(code + row * columns, scale,
                                                                          value + row * columns, columns);
    }
    Py_END_ALLOW_THREADS
    return done(&arguments);
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, NULL},         {"split", split, METH_VARARGS, NULL},
    {"join", join, METH_VARARGS, NULL},         {"narrow", narrow, METH_VARARGS, NULL},
    {"widen", widen, METH_VARARGS, NULL},       {"quantise", quantise, METH_VARARGS, NULL},
    {"dequantise", dequantise, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernels", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void)
{
    return PyModuleDef_Init(&definition);
}
