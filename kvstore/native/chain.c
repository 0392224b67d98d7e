/* Block hashes: SHA-256 over the previous block's hash and the tokens of each block. The Python module kvstore/block.py has
 * the rules. It computes the same hashes itself if this C module is not built or the processor has no SHA instructions.
 *
 * A block has a few hundred bytes, so Python's hashlib spends more time on objects and calls than on hashing. Here one
 * call hashes a whole prompt.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) /* otherwise the import fails, and Python does the work */
#include <cpuid.h>
#include <immintrin.h>

#define HASHING __attribute__((target("sha,sse4.1")))
#define NAME 16
#define CHUNK 64
#define LENGTH 8 /* bytes of the message's length in bits, at its end */
#define KEEP_LOCK (64 << 10) /* bytes: below this, releasing the interpreter lock costs more than hashing */

static const uint32_t constants[64] __attribute__((aligned(16))) = { /* FIPS 180-4, 4.2.2 */
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};
static const uint32_t beginning[8] = { /* FIPS 180-4, 5.3.3 */
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

/* Returns the first 16 bytes of the hash of a padded message. The instructions take the eight words as ABEF and CDGH. */
HASHING static void name_of(const uint8_t *message, size_t chunks, uint8_t *name)
{
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bll, 0x0405060700010203ll);
    __m128i low = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)beginning), 0xb1);
    __m128i high = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(beginning + 4)), 0x1b);
    __m128i abef = _mm_alignr_epi8(low, high, 8), cdgh = _mm_blend_epi16(high, low, 0xf0);

    for (; chunks > 0; chunks--, message += CHUNK) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i words[4];
        for (int i = 0; i < 4; i++)
            words[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(message + 16 * i)), big_endian);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            __m128i sum = _mm_add_epi32(words[i & 3], _mm_load_si128((const __m128i *)(constants + 4 * i)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
            if (i < 12) { /* compute the message words that four rounds need sixteen rounds later */
                __m128i next = _mm_sha256msg1_epu32(words[i & 3], words[(i + 1) & 3]);
                next = _mm_add_epi32(next, _mm_alignr_epi8(words[(i + 3) & 3], words[(i + 2) & 3], 4));
                words[i & 3] = _mm_sha256msg2_epu32(next, words[(i + 3) & 3]);
            }
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    low = _mm_blend_epi16(_mm_shuffle_epi32(abef, 0x1b), _mm_shuffle_epi32(cdgh, 0xb1), 0xf0);
    _mm_storeu_si128((__m128i *)name, _mm_shuffle_epi8(low, big_endian));
}

static int has_instructions(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_1) || !(c & bit_SSSE3))
        return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA);
}

PyDoc_STRVAR(extend_doc, "extend(parent, tokens, size)\n--\n\nNames of the full blocks of `size` bytes in `tokens`.");

static PyObject *extend(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer parent, tokens;
    Py_ssize_t size;
    uint8_t *message = NULL, *names = NULL;
    PyObject *found = NULL;

    if (!PyArg_ParseTuple(arguments, "y*y*n", &parent, &tokens, &size))
        return NULL;
    if (parent.len != NAME || size <= 0) {
        PyErr_SetString(PyExc_ValueError, "a parent of 16 bytes and a size above 0");
        goto out;
    }
    const size_t count = (size_t)(tokens.len / size);
    if (count == 0) { /* without a full block, no memory is taken, whatever the block size */
        found = PyList_New(0);
        goto out;
    }
    const size_t length = NAME + (size_t)size;
    const size_t chunks = (length + 1 + LENGTH + CHUNK - 1) / CHUNK;
    message = PyMem_Calloc(chunks, CHUNK);
    names = PyMem_Malloc(count * NAME + 1);
    if (message == NULL || names == NULL) {
        PyErr_NoMemory();
        goto out;
    }
    memcpy(message, parent.buf, NAME);
    message[length] = 0x80;
    for (int i = 0; i < LENGTH; i++)
        message[chunks * CHUNK - 1 - i] = (uint8_t)(((uint64_t)length * 8) >> (8 * i));

    PyThreadState *state = tokens.len > KEEP_LOCK ? PyEval_SaveThread() : NULL;
    for (size_t i = 0; i < count; i++) {
        memcpy(message + NAME, (const uint8_t *)tokens.buf + i * (size_t)size, (size_t)size);
        name_of(message, chunks, names + i * NAME);
        memcpy(message, names + i * NAME, NAME);
    }
    if (state != NULL)
        PyEval_RestoreThread(state);

    found = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; found != NULL && i < count; i++) {
        PyObject *name = PyBytes_FromStringAndSize((const char *)names + i * NAME, NAME);
        if (name == NULL)
            Py_CLEAR(found);
        else
            PyList_SetItem(found, (Py_ssize_t)i, name);
    }
out:
    PyMem_Free(message);
    PyMem_Free(names);
    PyBuffer_Release(&parent);
    PyBuffer_Release(&tokens);
    return found;
}

static PyMethodDef methods[] = {
    {"extend", extend, METH_VARARGS, extend_doc},
    {NULL, NULL, 0, NULL},
};

static int prepare(PyObject *Py_UNUSED(module))
{
    if (has_instructions())
        return 0;
    PyErr_SetString(PyExc_ImportError, "this processor has no SHA instructions");
    return -1;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)prepare}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_chain", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__chain(void)
{
    return PyModuleDef_Init(&definition);
}

#else
PyMODINIT_FUNC PyInit__chain(void)
{
    PyErr_SetString(PyExc_ImportError, "not for this processor");
    return NULL;
}
#endif
