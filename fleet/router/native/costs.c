/* The default policy's cost of every candidate in one pass, the lowest of some costs, and what goes before: names for the blocks
 * of a prompt, and who has how many of them.
 * fleet/router/native/twin.py says the same in numpy, operation by operation: build with -ffp-contract=off, so that both round
 * alike and choose alike.
 *
 * For tens of workers each numpy operation is half a microsecond of calling and little work, and a cost is twenty of them.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Rows of the table, as in fleet/router/candidates.py. */
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

PyDoc_STRVAR(fleet_doc, "fleet_costs(columns, out, prompt_tokens, engine, store, lower, request, decode, spread, others, stall, warm, even, prefill)\n--\n\n"
                        "See `fleet.router.native.twin`.");

static PyObject *fleet_costs(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *table_object, *out_object;
    double prompt, engine, store, lower, request, decode, spread, others, stall;
    int warm, even, prefill;
    Py_buffer table, out;

    if (!PyArg_ParseTuple(arguments, "OOdddddddddppp", &table_object, &out_object, &prompt, &engine, &store, &lower, &request,
                          &decode, &spread, &others, &stall, &warm, &even, &prefill))
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
    if (fits) {
        const double *columns = table.buf;
        double *costs = out.buf;
#define AT(quantity) columns[(quantity) * count + i]
        Py_ssize_t busy = 0;
        for (Py_ssize_t i = 0; i < count; i++)
            busy += AT(BACKLOG_TOKENS) > 0;
        const double waiting_for = others * ((double)busy / (double)(count + 1 - busy));
        for (Py_ssize_t i = 0; i < count; i++) {
            double cost = (AT(BACKLOG_TOKENS) + prompt) / AT(BLOCK_TOKENS);
            double work = prompt / AT(BLOCK_TOKENS);
            if (warm) {
                double credit = engine * AT(ENGINE_BLOCKS);
                const double coming = AT(COMING_BLOCKS);
                double shared = smaller(coming, AT(BACKLOG_TOKENS) / AT(BLOCK_TOKENS));
                credit += engine * coming;
                if (even) {
                    credit += store * AT(STORE_BLOCKS);
                    credit += lower * AT(BELOW_BLOCKS);
                    credit -= AT(CONVERSION);
                } else {
                    const double speed = AT(PREFILL_SPEED);
                    credit += larger(0.0, 1 - (1 - store) * speed) * AT(STORE_BLOCKS);
                    credit += larger(0.0, 1 - (1 - lower) * speed) * AT(BELOW_BLOCKS);
                    credit -= AT(CONVERSION) * speed;
                }
                if (AT(REQUESTS) >= AT(MAX_RUNNING)) {
                    const double waiting = (AT(REQUESTS) + 1) / AT(MAX_RUNNING) - 1;
                    const double worth = smaller(larger(1 - spread * waiting, 0.0), 1.0);
                    credit *= worth;
                    shared *= worth;
                }
                cost = larger(cost - (credit + shared), 0.0);
                work = larger(work - credit, 0.0);
            }
            double load = request * AT(REQUESTS);
            double price = waiting_for;
            if (!prefill) {
                load = decode * (AT(ACTIVE_BLOCKS) + AT(NEW_BLOCKS)) + load;
                price += stall * AT(REQUESTS);
            }
            cost += price * work;
            if (!even) {
                cost /= AT(PREFILL_SPEED);
                load /= AT(DECODE_SPEED);
            }
            costs[i] = cost + load;
        }
#undef AT
    }
    PyBuffer_Release(&table);
    PyBuffer_Release(&out);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "a table of 17 quantities, and as many costs as it has workers, all float64");
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(lowest_doc, "lowest(costs)\n--\n\nSee `fleet.router.native.twin`.");

static PyObject *lowest(PyObject *Py_UNUSED(module), PyObject *object)
{
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    const Py_ssize_t count = view.len / (Py_ssize_t)sizeof(double);
    const double *costs = view.buf;
    PyObject *places = NULL;
    int finite = view.itemsize == sizeof(double) && count > 0;
    double least = INFINITY;
    for (Py_ssize_t i = 0; finite && i < count; i++) {
        finite = isfinite(costs[i]);
        least = smaller(costs[i], least);
    }
    if (!finite) {
        PyErr_SetString(PyExc_ValueError, "costs must be finite, and at least one");
        goto out;
    }
    places = PyList_New(0);
    for (Py_ssize_t i = 0; places != NULL && i < count; i++) {
        if (costs[i] != least)
            continue;
        PyObject *place = PyLong_FromSsize_t(i);
        if (place == NULL || PyList_Append(places, place) < 0)
            Py_CLEAR(places);
        Py_XDECREF(place);
    }
out:
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
        PyErr_SetString(PyExc_ValueError, "a table of 17 quantities, all float64");
        return NULL;
    }
    return PyBool_FromLong(room);
}

/* Write depths at the rows of the workers whose bits are in the masks of runs; false with an error set where these are no runs. */
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
        PyErr_SetString(PyExc_ValueError, "rows as intp, a column of float64");
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
        PyErr_SetString(PyExc_ValueError, "rows as intp, a table of 17 quantities, all float64");
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

PyDoc_STRVAR(block_keys_doc, "block_keys(tokens, size, factors)\n--\n\nSee `fleet.router.native.twin`.");

static PyObject *block_keys(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer tokens, factors;
    Py_ssize_t size;
    PyObject *keys = NULL;

    if (!PyArg_ParseTuple(arguments, "y*ny*", &tokens, &size, &factors))
        return NULL;
    if (size <= 0 || factors.len != 2 * size) {
        PyErr_SetString(PyExc_ValueError, "a size above 0, and a factor of 8 bytes for each 4 of it");
        goto out;
    }
    const Py_ssize_t count = tokens.len / size, words = size / 4;
    const char *block = tokens.buf;
    uint64_t key = 0;
    keys = PyTuple_New(count);
    for (Py_ssize_t i = 0; keys != NULL && i < count; i++, block += size) {
        uint64_t sum = (uint64_t)(i + 1) * 0x9e3779b97f4a7c15u;
        for (Py_ssize_t j = 0; j < words; j++) {
            uint32_t token;
            uint64_t factor;
            memcpy(&token, block + 4 * j, sizeof token);
            memcpy(&factor, (const char *)factors.buf + 8 * j, sizeof factor);
            sum += token * factor;
        }
        key += mixed(sum);
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
    {"lowest", lowest, METH_O, lowest_doc},
    {"spread", spread, METH_VARARGS, spread_doc},
    {"spread_live", spread_live, METH_VARARGS, spread_live_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_costs", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__costs(void)
{
    return PyModuleDef_Init(&definition);
}
