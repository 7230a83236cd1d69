/* Launches in order, as one call from Python: launch_list.py makes a list, `run` fills in addresses and calls the driver.

   A list does not change once it is made, and `run` works in memory of its own, so several threads may run one list at
   the same time.  While the driver is called, other Python threads run. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { SLOTS = 64, PARAMS = 64, BYTES = 4096, ALIGNMENT = 64, PROMISE_BROKEN = -1 };

typedef struct {                             /* CUlaunchConfig */
    uint32_t grid[3], block[3], shared;
    void *stream;
    uint64_t attributes;
    uint32_t count;
} Config;

typedef struct {                             /* an address that a call fills in: that of a slot, and so many bytes on */
    uint32_t slot, place;
    uint64_t offset, zeros;                  /* bits that it must not have: 15 if it is promised to be a multiple of 16 */
} Fill;

typedef struct {
    Config config;
    uint64_t kernel;
    uint32_t size, params, fills;
    uint32_t places[PARAMS];                 /* where each parameter lies in the buffer */
    Fill fill[PARAMS];
    char buffer[BYTES];                      /* the parameters, without the addresses */
} Launch;

typedef int (*Driver)(const Config *, uint64_t, void **, void **);

typedef struct {
    PyObject_HEAD
    Driver driver;
    Py_ssize_t count, slots;
    Launch *launches;
} List;

static PyObject *data_ptr, *is_contiguous, *is_neg;
static long launches;                        /* that the driver has accepted */

static int nothing(const Config *config, uint64_t kernel, void **params, void **extra) { return 0; }

static void dealloc(List *list) {
    PyMem_Free(list->launches);
    PyObject_Free(list);
}

/* The address of each tensor, 0 for None; -1 and an exception if one has no address. */
static int addresses(PyObject *tensors, uint64_t *found) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
        PyObject *tensor = PyList_GET_ITEM(tensors, i);
        found[i] = 0;
        if (tensor == Py_None) continue;
        PyObject *address = PyObject_CallMethodObjArgs(tensor, data_ptr, NULL);
        if (!address) return -1;
        found[i] = PyLong_AsUnsignedLongLong(address);
        Py_DECREF(address);
        if (PyErr_Occurred()) return -1;
    }
    return 0;
}

/* Whether a method of a tensor returns True; -1 and an exception if it raises. */
static int is(PyObject *tensor, PyObject *method) {
    PyObject *answer = PyObject_CallMethodObjArgs(tensor, method, NULL);
    if (!answer) return -1;
    int yes = answer == Py_True;
    Py_DECREF(answer);
    return yes;
}

/* settled(tensors): whether each is None, or its numbers lie in memory, contiguous, from a multiple of 16 on. */
static PyObject *settled(PyObject *module, PyObject *tensors) {
    uint64_t address[SLOTS];
    if (!PyList_CheckExact(tensors) || PyList_GET_SIZE(tensors) > SLOTS)
        return PyErr_Format(PyExc_TypeError, "settled needs a list of at most %d tensors", SLOTS);
    if (addresses(tensors, address)) return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
        PyObject *tensor = PyList_GET_ITEM(tensors, i);
        if (tensor == Py_None) continue;
        if (!address[i] || address[i] % 16) Py_RETURN_FALSE;
        int contiguous = is(tensor, is_contiguous), negated = is(tensor, is_neg);
        if (contiguous < 0 || negated < 0) return NULL;
        if (!contiguous || negated) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static int launch(Driver driver, const Launch *l, void *stream, const uint64_t *address) {
    _Alignas(ALIGNMENT) char buffer[BYTES];
    void *params[PARAMS];
    Config config = l->config;
    memcpy(buffer, l->buffer, l->size);
    for (uint32_t i = 0; i < l->fills; i++) {
        uint64_t filled = address[l->fill[i].slot] + l->fill[i].offset;
        if (filled & l->fill[i].zeros) return PROMISE_BROKEN;
        memcpy(buffer + l->fill[i].place, &filled, sizeof filled);
    }
    for (uint32_t i = 0; i < l->params; i++) params[i] = buffer + l->places[i];
    config.stream = stream;
    int answer = driver(&config, l->kernel, params, NULL);
    if (!answer) __atomic_fetch_add(&launches, 1, __ATOMIC_RELAXED);
    return answer;
}

/* Launches from `next` on, with an address for each slot.  Returns 0, or what the driver answered or PROMISE_BROKEN;
   then `next` is the number of the launch that failed.  Other code in C calls this by its address, RUN. */
static int run_list(PyObject *object, Py_ssize_t *next, void *stream, const uint64_t *address) {
    List *list = (List *)object;
    for (; *next < list->count; ++*next) {
        int answer = launch(list->driver, list->launches + *next, stream, address);
        if (answer) return answer;
    }
    return 0;
}

/* run(first, stream, tensors): None, or (the number of the launch that failed, the answer). */
static PyObject *run(List *list, PyObject *const *args, Py_ssize_t n) {
    uint64_t address[SLOTS];
    if (n != 3 || !PyList_CheckExact(args[2]) || PyList_GET_SIZE(args[2]) != list->slots)
        return PyErr_Format(PyExc_TypeError, "run needs (first, stream, a list of %zd tensors)", list->slots);
    Py_ssize_t next = PyLong_AsSsize_t(args[0]);
    void *stream = PyLong_AsVoidPtr(args[1]);
    if (PyErr_Occurred() || addresses(args[2], address)) return NULL;
    int answer;
    Py_BEGIN_ALLOW_THREADS
    answer = run_list((PyObject *)list, &next, stream, address);
    Py_END_ALLOW_THREADS
    if (answer) return Py_BuildValue("(ni)", next, answer);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL, NULL}, {0}};

static PyTypeObject Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "launch_list.List",
    .tp_basicsize = sizeof(List),
    .tp_dealloc = (destructor)dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = methods,
};

/* One launch: (grid x 3, block x 3, shared, attributes, their number), kernel, buffer, places, fills. */
static int read_launch(PyObject *given, Launch *l, Py_ssize_t slots) {
    PyObject *places, *fills;
    const char *buffer;
    Py_ssize_t size;
    unsigned long long attributes, kernel;
    uint32_t *g = l->config.grid, *b = l->config.block;
    if (!PyArg_ParseTuple(given, "(IIIIIIIKI)Ky#O!O!", g, g + 1, g + 2, b, b + 1, b + 2, &l->config.shared, &attributes,
                          &l->config.count, &kernel, &buffer, &size, &PyTuple_Type, &places, &PyTuple_Type, &fills))
        return -1;
    l->config.attributes = attributes;
    l->kernel = kernel;
    l->params = PyTuple_GET_SIZE(places);
    l->fills = PyTuple_GET_SIZE(fills);
    if (size > BYTES || l->params > PARAMS || l->fills > PARAMS) {
        PyErr_SetString(PyExc_ValueError, "a launch has too many arguments for a list");
        return -1;
    }
    l->size = size;
    memcpy(l->buffer, buffer, size);
    for (uint32_t i = 0; i < l->params; i++) {
        l->places[i] = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(places, i));
        if (PyErr_Occurred()) return -1;
    }
    for (uint32_t i = 0; i < l->fills; i++) {
        unsigned long long offset, zeros;
        Fill *fill = l->fill + i;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(fills, i), "IIKK", &fill->slot, &fill->place, &offset, &zeros)) return -1;
        fill->offset = offset;
        fill->zeros = zeros;
        if (fill->slot >= slots || fill->place + 8 > l->size) {
            PyErr_SetString(PyExc_ValueError, "an address of a launch lies in no slot, or in no parameter");
            return -1;
        }
    }
    return 0;
}

/* make(driver's function, number of slots, launches) */
static PyObject *make(PyObject *module, PyObject *args) {
    unsigned long long driver;
    Py_ssize_t slots;
    PyObject *launches;
    if (!PyArg_ParseTuple(args, "KnO!", &driver, &slots, &PyTuple_Type, &launches)) return NULL;
    if (slots > SLOTS) return PyErr_Format(PyExc_ValueError, "a list has at most %d slots", SLOTS);
    List *list = PyObject_New(List, &Type);
    if (!list) return NULL;
    list->driver = (Driver)(uintptr_t)driver;
    list->slots = slots;
    list->count = PyTuple_GET_SIZE(launches);
    list->launches = PyMem_Calloc(list->count + 1, sizeof(Launch));
    if (!list->launches) PyErr_NoMemory();
    for (Py_ssize_t i = 0; list->launches && i < list->count; i++)
        if (read_launch(PyTuple_GET_ITEM(launches, i), list->launches + i, slots)) break;
    if (PyErr_Occurred()) {
        Py_DECREF(list);
        return NULL;
    }
    return (PyObject *)list;
}

static PyObject *launched(PyObject *module, PyObject *nothing_else) { return PyLong_FromLong(launches); }

static PyMethodDef functions[] = {
    {"make", make, METH_VARARGS, NULL}, {"launched", launched, METH_NOARGS, NULL},
    {"settled", settled, METH_O, NULL}, {0},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "launch_list", NULL, -1, functions};

PyMODINIT_FUNC PyInit_launch_list(void) {
    PyObject *module = PyType_Ready(&Type) ? NULL : PyModule_Create(&definition);
    data_ptr = PyUnicode_InternFromString("data_ptr");
    is_contiguous = PyUnicode_InternFromString("is_contiguous");
    is_neg = PyUnicode_InternFromString("is_neg");
    if (!module || !data_ptr || !is_contiguous || !is_neg
        || PyModule_AddObject(module, "NOTHING", PyLong_FromVoidPtr((void *)nothing))
        || PyModule_AddObject(module, "RUN", PyLong_FromVoidPtr((void *)run_list)))
        return NULL;
    return module;
}
