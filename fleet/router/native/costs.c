/* The default policy's cost of every candidate in one pass, and the lowest of some costs. fleet/router/native/twin.py says the same
 * in numpy, operation by operation: build with -ffp-contract=off, so that both round alike and choose alike.
 *
 * For tens of workers each numpy operation is half a microsecond of calling and little work, and a cost is twenty of them.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <math.h>

/* Rows of the table, as in fleet/router/candidates.py. */
enum {
    BACKLOG_TOKENS = 0,
    ACTIVE_BLOCKS = 1,
    REQUESTS = 2,
    MAX_RUNNING = 4,
    BLOCK_TOKENS = 6,
    PREFILL_SPEED = 7,
    DECODE_SPEED = 8,
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

PyDoc_STRVAR(fleet_doc, "fleet_costs(columns, out, prompt_tokens, engine, store, lower, request, decode, spread, warm, even, prefill)\n--\n\n"
                        "See `fleet.router.native.twin`.");

static PyObject *fleet_costs(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *table_object, *out_object;
    double prompt, engine, store, lower, request, decode, spread;
    int warm, even, prefill;
    Py_buffer table, out;

    if (!PyArg_ParseTuple(arguments, "OOdddddddppp", &table_object, &out_object, &prompt, &engine, &store, &lower, &request,
                          &decode, &spread, &warm, &even, &prefill))
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
        for (Py_ssize_t i = 0; i < count; i++) {
            double cost = (AT(BACKLOG_TOKENS) + prompt) / AT(BLOCK_TOKENS);
            if (warm) {
                double credit = engine * AT(ENGINE_BLOCKS);
                const double coming = AT(COMING_BLOCKS);
                credit += engine * coming;
                credit += smaller(coming, AT(BACKLOG_TOKENS) / AT(BLOCK_TOKENS));
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
                    credit *= smaller(larger(1 - spread * waiting, 0.0), 1.0);
                }
                cost -= credit;
            }
            if (!even)
                cost /= AT(PREFILL_SPEED);
            if (warm)
                cost = larger(cost, 0.0);
            double load = request * AT(REQUESTS);
            if (!prefill)
                load = decode * (AT(ACTIVE_BLOCKS) + AT(NEW_BLOCKS)) + load;
            if (!even)
                load /= AT(DECODE_SPEED);
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

static PyMethodDef methods[] = {
    {"fleet_costs", fleet_costs, METH_VARARGS, fleet_doc},
    {"lowest", lowest, METH_O, lowest_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_costs", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__costs(void)
{
    return PyModuleDef_Init(&definition);
}
