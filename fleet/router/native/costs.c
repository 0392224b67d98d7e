/* Native costs of the default policy: the cost of every candidate in one pass, the lowest cost, the keys of a prompt's blocks,
 * and the number of blocks that each worker holds.
 * fleet/router/native/twin.py has the same operations in numpy. Build with -ffp-contract=off, so that both round alike and
 * choose alike.
 *
 * For tens of workers a numpy operation is half a microsecond of call overhead and little work, and a cost needs twenty of them.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Rows of the table, as in fleet/router/policy.py. */
enum {
    BACKLOG_TOKENS = 0,
    ACTIVE_BLOCKS = 1,
    REQUESTS = 2,
    LIMIT = 3,
    MAX_RUNNING = 4,
    BLOCK_TOKENS = 6,
    PREFILL_SPEED = 7,
    DECODE_SPEED = 8,
    LIVE_BLOCKS = 10,
    NEW_BLOCKS = 11,
    ENGINE_BLOCKS = 12,
    COMING_BLOCKS = 13,
    STORE_BLOCKS = 14,
    BELOW_BLOCKS = 15,
    CONVERSION = 16,
    QUANTITIES = 17
};

static double larger(double a, double b) { return a > b ? a : b; }
static double smaller(double a, double b) { return a < b ? a : b; }

/* The arguments of the cost besides the table, in the order in which Python passes them. */
typedef struct {
    double prompt, engine, store, lower, request, decode, spread, others, stall;
    int warm, even, prefill;
} Weights;

static void cost_all(const double *columns, Py_ssize_t count, const Weights *by, double *costs)
{
#define AT(quantity) columns[(quantity) * count + i]
    Py_ssize_t busy = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        busy += AT(BACKLOG_TOKENS) > 0;
    const double waiting_for = by->others * ((double)busy / (double)(count + 1 - busy));
    for (Py_ssize_t i = 0; i < count; i++) {
        double cost = (AT(BACKLOG_TOKENS) + by->prompt) / AT(BLOCK_TOKENS);
        double work = by->prompt / AT(BLOCK_TOKENS);
        if (by->warm) {
            double credit = by->engine * AT(ENGINE_BLOCKS);
            const double coming = AT(COMING_BLOCKS);
            double shared = smaller(coming, AT(BACKLOG_TOKENS) / AT(BLOCK_TOKENS));
            credit += by->engine * coming;
            if (by->even) {
                credit += by->store * AT(STORE_BLOCKS);
                credit += by->lower * AT(BELOW_BLOCKS);
                credit -= AT(CONVERSION);
            } else {
                const double speed = AT(PREFILL_SPEED);
                credit += larger(0.0, 1 - (1 - by->store) * speed) * AT(STORE_BLOCKS);
                credit += larger(0.0, 1 - (1 - by->lower) * speed) * AT(BELOW_BLOCKS);
                credit -= AT(CONVERSION) * speed;
            }
            if (AT(REQUESTS) >= AT(MAX_RUNNING)) {
                const double waiting = (AT(REQUESTS) + 1) / AT(MAX_RUNNING) - 1;
                const double worth = smaller(larger(1 - by->spread * waiting, 0.0), 1.0);
                credit *= worth;
                shared *= worth;
            }
            cost = larger(cost - (credit + shared), 0.0);
            work = larger(work - credit, 0.0);
        }
        double load = by->request * AT(REQUESTS);
        double price = waiting_for;
        if (!by->prefill) {
            load = by->decode * (AT(ACTIVE_BLOCKS) + AT(NEW_BLOCKS)) + load;
            price += by->stall * AT(REQUESTS);
        }
        cost += price * work;
        if (!by->even) {
            cost /= AT(PREFILL_SPEED);
            load /= AT(DECODE_SPEED);
        }
        costs[i] = cost + load;
    }
#undef AT
}

/* Return a new list with the places of the lowest cost; NULL with an error set. */
static PyObject *lowest_of(const double *costs, Py_ssize_t count)
{
    int finite = count > 0;
    double least = INFINITY;
    for (Py_ssize_t i = 0; finite && i < count; i++) {
        finite = isfinite(costs[i]);
        least = smaller(costs[i], least);
    }
    if (!finite) {
        PyErr_SetString(PyExc_ValueError, "costs must be finite, and there must be at least one");
        return NULL;
    }
    PyObject *places = PyList_New(0);
    for (Py_ssize_t i = 0; places != NULL && i < count; i++) {
        if (costs[i] != least)
            continue;
        PyObject *place = PyLong_FromSsize_t(i);
        if (place == NULL || PyList_Append(places, place) < 0)
            Py_CLEAR(places);
        Py_XDECREF(place);
    }
    return places;
}

PyDoc_STRVAR(fleet_doc, "fleet_costs(columns, out, prompt_tokens, engine, store, lower, request, decode, spread, others, stall, warm, even, prefill)\n--\n\n"
                        "See `fleet.router.native.twin`.");

static PyObject *fleet_costs(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *table_object, *out_object;
    Weights by;
    Py_buffer table, out;

    if (!PyArg_ParseTuple(arguments, "OOdddddddddppp", &table_object, &out_object, &by.prompt, &by.engine, &by.store, &by.lower,
                          &by.request, &by.decode, &by.spread, &by.others, &by.stall, &by.warm, &by.even, &by.prefill))
        return NULL;
    if (PyObject_GetBuffer(table_object, &table, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    if (PyObject_GetBuffer(out_object, &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&table);
        return NULL;
    }
    const Py_ssize_t count = out.len / (Py_ssize_t)sizeof(double);
    const int fits = table.itemsize == sizeof(double) && out.itemsize == sizeof(double) &&
                     table.len == out.len * QUANTITIES;
    if (fits)
        cost_all(table.buf, count, &by, out.buf);
    PyBuffer_Release(&table);
    PyBuffer_Release(&out);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "columns must be a float64 table of 17 quantities, and out must have a cost for each worker");
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(fleet_lowest_doc, "fleet_lowest(columns, prompt_tokens, engine, store, lower, request, decode, spread, others, stall, warm, even, prefill)\n--\n\n"
                               "See `fleet.router.native.twin`.");

static PyObject *fleet_lowest(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *table_object, *places = NULL;
    Weights by;
    Py_buffer table;
    double few[64], *costs = few;

    if (!PyArg_ParseTuple(arguments, "Odddddddddppp", &table_object, &by.prompt, &by.engine, &by.store, &by.lower, &by.request,
                          &by.decode, &by.spread, &by.others, &by.stall, &by.warm, &by.even, &by.prefill))
        return NULL;
    if (PyObject_GetBuffer(table_object, &table, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    const Py_ssize_t count = table.len / (Py_ssize_t)sizeof(double) / QUANTITIES;
    if (table.itemsize != sizeof(double) || table.len != count * QUANTITIES * (Py_ssize_t)sizeof(double))
        PyErr_SetString(PyExc_ValueError, "columns must be a float64 table of 17 quantities");
    else if (count > 64 && (costs = PyMem_Malloc((size_t)count * sizeof(double))) == NULL)
        PyErr_NoMemory();
    else {
        cost_all(table.buf, count, &by, costs);
        places = lowest_of(costs, count);
    }
    if (costs != few)
        PyMem_Free(costs);
    PyBuffer_Release(&table);
    return places;
}

PyDoc_STRVAR(lowest_doc, "lowest(costs)\n--\n\nSee `fleet.router.native.twin`.");

static PyObject *lowest(PyObject *Py_UNUSED(module), PyObject *object)
{
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    const Py_ssize_t count = view.itemsize == sizeof(double) ? view.len / (Py_ssize_t)sizeof(double) : 0;
    PyObject *places = lowest_of(view.buf, count);
    PyBuffer_Release(&view);
    return places;
}

PyDoc_STRVAR(all_have_room_doc, "all_have_room(columns)\n--\n\nSee `fleet.router.native.twin`.");

static PyObject *all_have_room(PyObject *Py_UNUSED(module), PyObject *object)
{
    Py_buffer table;
    if (PyObject_GetBuffer(object, &table, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    const Py_ssize_t count = table.len / (Py_ssize_t)sizeof(double) / QUANTITIES;
    const int fits = table.itemsize == sizeof(double) && table.len == count * QUANTITIES * (Py_ssize_t)sizeof(double);
    int room = 1;
    if (fits) {
        const double *requests = (const double *)table.buf + REQUESTS * count;
        const double *limits = (const double *)table.buf + LIMIT * count;
        for (Py_ssize_t i = 0; i < count; i++)
            room &= requests[i] < limits[i];
    }
    PyBuffer_Release(&table);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "columns must be a float64 table of 17 quantities");
        return NULL;
    }
    return PyBool_FromLong(room);
}

/* Write the depths of runs to the rows of the workers whose bits are in their masks; return 0 with an error set if a run is malformed. */
static int spread_runs(PyObject *runs, const Py_ssize_t *rows, Py_ssize_t places, double *values, Py_ssize_t workers)
{
    PyObject *shift = PyLong_FromLong(64);
    int done = 0;

    if (shift == NULL)
        return 0;
    for (Py_ssize_t i = 0; i < PyList_Size(runs); i++) {
        PyObject *depth_object, *mask;
        double depth;
        if (!PyArg_ParseTuple(PyList_GetItem(runs, i), "OO", &depth_object, &mask))
            goto out;
        if ((depth = PyLong_AsDouble(depth_object)) == -1.0 && PyErr_Occurred())
            goto out;
        Py_INCREF(mask);
        for (Py_ssize_t first = 0; first < places; first += 64) {
            uint64_t word = PyLong_AsUnsignedLongLongMask(mask);
            if (word == UINT64_MAX && PyErr_Occurred()) {
                Py_DECREF(mask);
                goto out;
            }
            for (; word != 0; word &= word - 1) {
                const Py_ssize_t place = first + __builtin_ctzll(word);
                if (place < places && rows[place] >= 0 && rows[place] < workers)
                    values[rows[place]] = depth;
            }
            if (first + 64 >= places)
                break;
            PyObject *rest = PyNumber_Rshift(mask, shift);
            Py_DECREF(mask);
            if (rest == NULL)
                goto out;
            mask = rest;
        }
        Py_DECREF(mask);
    }
    done = 1;
out:
    Py_DECREF(shift);
    return done;
}

PyDoc_STRVAR(spread_doc, "spread(runs, row_at, column)\n--\n\nSee `fleet.router.native.twin`.");

static PyObject *spread(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *runs, *row_at_object, *column_object;
    Py_buffer row_at, column;
    int done = 0;

    if (!PyArg_ParseTuple(arguments, "O!OO", &PyList_Type, &runs, &row_at_object, &column_object))
        return NULL;
    if (PyObject_GetBuffer(row_at_object, &row_at, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    if (PyObject_GetBuffer(column_object, &column, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&row_at);
        return NULL;
    }
    if (row_at.itemsize != sizeof(Py_ssize_t) || column.itemsize != sizeof(double))
        PyErr_SetString(PyExc_ValueError, "row_at must be intp, and column must be float64");
    else
        done = spread_runs(runs, row_at.buf, row_at.len / (Py_ssize_t)sizeof(Py_ssize_t), column.buf,
                           column.len / (Py_ssize_t)sizeof(double));
    PyBuffer_Release(&row_at);
    PyBuffer_Release(&column);
    if (!done)
        return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(spread_live_doc, "spread_live(runs, row_at, columns)\n--\n\nSee `fleet.router.native.twin`.");

static PyObject *spread_live(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *runs, *row_at_object, *table_object;
    Py_buffer row_at, table;
    int done = 0;

    if (!PyArg_ParseTuple(arguments, "O!OO", &PyList_Type, &runs, &row_at_object, &table_object))
        return NULL;
    if (PyObject_GetBuffer(row_at_object, &row_at, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    if (PyObject_GetBuffer(table_object, &table, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&row_at);
        return NULL;
    }
    const Py_ssize_t places = row_at.len / (Py_ssize_t)sizeof(Py_ssize_t);
    const Py_ssize_t *rows = row_at.buf;
    const Py_ssize_t count = table.len / (Py_ssize_t)sizeof(double) / QUANTITIES;
    double *columns = table.buf;
    if (row_at.itemsize != sizeof(Py_ssize_t) || table.itemsize != sizeof(double) ||
        table.len != count * QUANTITIES * (Py_ssize_t)sizeof(double))
        PyErr_SetString(PyExc_ValueError, "row_at must be intp, and columns must be a float64 table of 17 quantities");
    else
        done = spread_runs(runs, rows, places, columns + LIVE_BLOCKS * count, count);
    for (Py_ssize_t place = 0; done && place < places; place++) {
        const Py_ssize_t i = rows[place];
        if (i < 0 || i >= count)
            continue;
        const double live = columns[LIVE_BLOCKS * count + i];
        columns[NEW_BLOCKS * count + i] -= live;
        columns[COMING_BLOCKS * count + i] = larger(0.0, live - columns[ENGINE_BLOCKS * count + i]);
    }
    PyBuffer_Release(&row_at);
    PyBuffer_Release(&table);
    if (!done)
        return NULL;
    Py_RETURN_NONE;
}

/* The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): every bit of the result depends on every bit of `x`. */
static uint64_t mixed(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Return the sum of tokens, each times the factor of its place. */
static inline __attribute__((always_inline)) uint64_t sum_of(const char *tokens, const char *factors, Py_ssize_t words)
{
    uint64_t sum = 0;
    for (Py_ssize_t j = 0; j < words; j++) {
        uint32_t token;
        uint64_t factor;
        memcpy(&token, tokens + 4 * j, sizeof token);
        memcpy(&factor, factors + 8 * j, sizeof factor);
        sum += token * factor;
    }
    return sum;
}

static uint64_t summed_by_one(const char *tokens, const char *factors, Py_ssize_t words)
{
    return sum_of(tokens, factors, words);
}

static uint64_t (*summed)(const char *, const char *, Py_ssize_t) = summed_by_one;

#if defined(__x86_64__) && defined(__GNUC__) /* AVX2 sums four tokens at a time in 0.6 of the time */
static __attribute__((target("avx2"))) uint64_t summed_by_four(const char *tokens, const char *factors, Py_ssize_t words)
{
    return sum_of(tokens, factors, words);
}
#endif

PyDoc_STRVAR(block_keys_doc, "block_keys(tokens, size, factors)\n--\n\nSee `fleet.router.native.twin`.");

static PyObject *block_keys(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer tokens, factors;
    Py_ssize_t size;
    PyObject *keys = NULL;

    if (!PyArg_ParseTuple(arguments, "y*ny*", &tokens, &size, &factors))
        return NULL;
    if (size <= 0 || factors.len != 2 * size) {
        PyErr_SetString(PyExc_ValueError, "size must be above 0, with a factor of 8 bytes for each 4 bytes of it");
        goto out;
    }
    const Py_ssize_t count = tokens.len / size;
    const char *block = tokens.buf;
    uint64_t key = 0;
    keys = PyTuple_New(count);
    for (Py_ssize_t i = 0; keys != NULL && i < count; i++, block += size) {
        key += mixed((uint64_t)(i + 1) * 0x9e3779b97f4a7c15u + summed(block, factors.buf, size / 4));
        PyObject *number = PyLong_FromUnsignedLongLong(key);
        if (number == NULL)
            Py_CLEAR(keys);
        else
            PyTuple_SetItem(keys, i, number);
    }
out:
    PyBuffer_Release(&tokens);
    PyBuffer_Release(&factors);
    return keys;
}

static PyMethodDef methods[] = {
    {"all_have_room", all_have_room, METH_O, all_have_room_doc},
    {"block_keys", block_keys, METH_VARARGS, block_keys_doc},
    {"fleet_costs", fleet_costs, METH_VARARGS, fleet_doc},
    {"fleet_lowest", fleet_lowest, METH_VARARGS, fleet_lowest_doc},
    {"lowest", lowest, METH_O, lowest_doc},
    {"spread", spread, METH_VARARGS, spread_doc},
    {"spread_live", spread_live, METH_VARARGS, spread_live_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_costs", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__costs(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx2"))
        summed = summed_by_four;
#endif
    return PyModuleDef_Init(&definition);
}
