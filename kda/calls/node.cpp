/* A call of chunk_kda without Python: what runs one, and its node in autograd.  node.py describes the call to `make`.

   forward    the inputs as kernels read them -> the forward's routine -> o, final states, and what is saved
   backward   the saved tensors, checked by autograd -> the backward's routine -> a gradient for each input that needs one

   A routine allocates tensors and runs a list of launches, phase by phase (kda/backends/common/routine.py).  Python does
   the rest: it describes a backward when it is first needed, launches where a simulator takes the driver's place, and
   computes a backward that something else looks at: a second derivative, a transform, a mode. */
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

using torch::autograd::AutogradContext;
using Tensors = std::vector<at::Tensor>;

/* The inputs in the order of kda.model.problem.Inputs; gradients exist for the first eight. */
enum { Q, K, V, G, BETA, A_LOG, DT_BIAS, INITIAL_STATE, CU_SEQLENS, CU_SEQLENS_CPU, INPUTS };
constexpr size_t GRADIENTS = CU_SEQLENS, READ = CU_SEQLENS_CPU;
constexpr size_t SLOTS = 64;                 // of a list of launches, as in ptxkit/compile/launch_list.c
constexpr uintptr_t ALIGNMENT = 16;

/* What launch_list.c and torch export: runs a list, and returns the current stream of a device. */
using RunList = int (*)(PyObject* list, Py_ssize_t* next, void* stream, const uint64_t* address);
using StreamOf = int32_t (*)(int32_t device, void** stream);

[[noreturn]] static void throw_python_error() {
    python_error error;
    error.persist();
    throw std::move(error);
}

/* A reference to a Python object, which may end in any thread. */
class Object {
  public:
    explicit Object(PyObject* borrowed = nullptr) : object(borrowed) { Py_XINCREF(object); }
    Object(Object&& other) noexcept : object(std::exchange(other.object, nullptr)) {}
    Object(const Object&) = delete;
    Object& operator=(const Object&) = delete;
    ~Object() {
        if (!object || !Py_IsInitialized()) return;
        pybind11::gil_scoped_acquire gil;
        Py_DECREF(object);
    }
    PyObject* get() const { return object; }
    bool present() const { return object && object != Py_None; }

  private:
    PyObject* object;
};

static PyObject* wrapped(const at::Tensor& x) {
    if (x.defined()) return THPVariable_Wrap(x);
    Py_RETURN_NONE;
}

/* A new list of tensors, with None for those that there are not. */
static PyObject* listed(const Tensors& tensors) {
    PyObject* list = PyList_New(tensors.size());
    for (size_t i = 0; list && i < tensors.size(); i++) PyList_SET_ITEM(list, i, wrapped(tensors[i]));
    return list;
}

static at::Tensor unwrapped(PyObject* object) {
    if (object == Py_None) return {};
    TORCH_CHECK_TYPE(THPVariable_Check(object), "a tensor or None was asked for");
    return THPVariable_Unpack(object);
}

/* ---- routines */

struct Allocation {
    std::vector<int64_t> shape, strides;
    at::ScalarType dtype;
    bool zeroed;
};

struct Phase {
    std::vector<Allocation> allocations;
    Object launches, in_c;                   // a LaunchList, and the same as launch_list.c has it, if that may run it
    std::vector<size_t> freed;
};

/* How launches get to a driver. */
struct Driver {
    RunList run_list;
    StreamOf stream_of;                      // null: launches are pretended, and there is no device
    int device;

    void* stream() const {
        void* current = nullptr;
        if (stream_of) TORCH_CHECK(!stream_of(device, &current), "torch has no current stream for GPU ", device);
        return current;
    }
};

struct Routine {
    std::vector<Phase> phases;
    std::vector<Py_ssize_t> results;         // slots; -1 if there is no such result
    size_t inputs;                           // number of slots that a call fills
    std::vector<size_t> saved;               // numbers of a forward's results that are saved; of saved tensors, to read

    /* The last of the tensors may be left out. */
    Tensors operator()(const Driver& driver, at::Device device, Tensors tensors) const {
        tensors.resize(inputs);
        for (const Phase& phase : phases) {
            for (const Allocation& a : phase.allocations) {
                auto x = at::empty_strided(a.shape, a.strides, at::device(device).dtype(a.dtype));
                tensors.push_back(a.zeroed ? x.zero_() : std::move(x));
            }
            if (phase.in_c.present()) launch(phase, driver, tensors);
            else in_python(phase, tensors);
            for (size_t slot : phase.freed) tensors[slot].reset();
        }
        Tensors chosen;
        for (Py_ssize_t slot : results) chosen.push_back(slot < 0 ? at::Tensor() : tensors[slot]);
        return chosen;
    }

  private:
    static void launch(const Phase& phase, const Driver& driver, const Tensors& tensors) {
        uint64_t address[SLOTS];
        for (size_t i = 0; i < tensors.size(); i++)
            address[i] = tensors[i].defined() ? reinterpret_cast<uintptr_t>(tensors[i].data_ptr()) : 0;
        void* stream = driver.stream();
        Py_ssize_t next = 0;
        if (int answer = driver.run_list(phase.in_c.get(), &next, stream, address)) {
            pybind11::gil_scoped_acquire gil;
            done(PyObject_CallMethod(phase.launches.get(), "go_on", "OiKNni", phase.in_c.get(),
                                     driver.device, reinterpret_cast<unsigned long long>(stream),
                                     listed(tensors), next, answer));
        }
    }

    static void in_python(const Phase& phase, const Tensors& tensors) {
        pybind11::gil_scoped_acquire gil;
        done(PyObject_CallFunction(phase.launches.get(), "N", listed(tensors)));
    }

    static void done(PyObject* result) {
        if (!result) throw_python_error();
        Py_DECREF(result);
    }
};

/* ---- descriptions, as node.py writes them; each function reads one and throws what Python raised */

static PyObject* item(PyObject* tuple, Py_ssize_t i) {
    PyObject* found = PyTuple_GetItem(tuple, i);
    if (!found) throw_python_error();
    return found;
}

static int64_t number(PyObject* object) {
    int64_t x = PyLong_AsLongLong(object);
    if (x == -1 && PyErr_Occurred()) throw_python_error();
    return x;
}

template <typename T, typename Read>
static std::vector<T> each(PyObject* tuple, Read read) {
    std::vector<T> all;
    Py_ssize_t count = PyTuple_Size(tuple);
    if (count < 0) throw_python_error();
    for (Py_ssize_t i = 0; i < count; i++) all.push_back(read(item(tuple, i)));
    return all;
}

static Allocation allocation(PyObject* given) {
    PyObject* dtype = item(given, 2);
    TORCH_CHECK_TYPE(THPDtype_Check(dtype), "an allocation has a dtype");
    return {each<int64_t>(item(given, 0), number), each<int64_t>(item(given, 1), number),
            reinterpret_cast<THPDtype*>(dtype)->scalar_type, item(given, 3) == Py_True};
}

static Phase phase(PyObject* given) {
    return {each<Allocation>(item(given, 0), allocation), Object(item(given, 1)), Object(item(given, 2)),
            each<size_t>(item(given, 3), number)};
}

static Routine routine(PyObject* given) {
    return {each<Phase>(item(given, 0), phase), each<Py_ssize_t>(item(given, 1), number),
            static_cast<size_t>(number(item(given, 2))), each<size_t>(item(given, 3), number)};
}

/* ---- tensors as kernels read them */

static at::Tensor aligned(at::Tensor x) {
    if (!x.defined()) return x;
    if (!x.is_contiguous()) x = x.contiguous();
    auto address = reinterpret_cast<uintptr_t>(x.data_ptr());
    return address % ALIGNMENT || x.is_neg() || (!address && x.numel()) ? x.clone() : x;
}

static at::Tensor aligned(const at::Tensor& x, at::ScalarType dtype) {
    return x.defined() ? aligned(x.to(dtype)) : x;
}

static Tensors in_memory(const Tensors& inputs) {
    Tensors tensors(inputs.begin(), inputs.begin() + READ);
    at::Device device = inputs[Q].device();
    for (size_t i : {A_LOG, DT_BIAS}) tensors[i] = aligned(tensors[i], at::kFloat);
    if (auto& offsets = tensors[CU_SEQLENS]; offsets.defined()) offsets = offsets.to(device, offsets.scalar_type(), true);
    for (auto& x : tensors) x = aligned(std::move(x));
    return tensors;
}

/* A gradient in the shape and dtype of its input; those of heads that share q and k are summed in order. */
static at::Tensor as_given(const at::Tensor& y, const at::Tensor& x) {
    if (!y.defined() || !x.defined()) return {};
    if (y.sizes() == x.sizes()) return y.to(x.scalar_type());
    if (y.numel() == x.numel()) return y.view(x.sizes()).to(x.scalar_type());
    auto B = x.size(0), T = x.size(1), H = x.size(2);
    return y.view({B, T, H, y.size(2) / H, x.size(3)}).sum(3, false, at::kFloat).to(y.scalar_type());
}

/* ---- a call */

/* All that calls of one kind share.  `backward_of(dht is given)` describes a backward; `look(saved, do, dht, needs)`
   computes one that something else looks at. */
struct Call : torch::CustomClassHolder {
    Driver driver;
    Routine forward;
    Object backward_of, look;
    std::unique_ptr<const Routine> backward[2];

    Call(Driver driver, Routine forward, PyObject* backward_of, PyObject* look)
        : driver(driver), forward(std::move(forward)), backward_of(backward_of), look(look) {}

    Tensors run(const Tensors& inputs) const {
        c10::OptionalDeviceGuard guard(inputs[Q].device());
        return forward(driver, inputs[Q].device(), in_memory(inputs));
    }

    const Routine& backward_for(bool dht) {
        pybind11::gil_scoped_acquire gil;
        if (!backward[dht]) {
            PyObject* described = PyObject_CallFunction(backward_of.get(), "O", dht ? Py_True : Py_False);
            if (!described) throw_python_error();
            auto made = std::make_unique<const Routine>(routine(described));
            Py_DECREF(described);
            if (!backward[dht]) backward[dht] = std::move(made);               // another thread may have been faster
        }
        return *backward[dht];
    }
};

using CallPtr = c10::intrusive_ptr<Call>;

/* Whether a backward has to be one that autograd, a transform or a mode can follow. */
static bool something_looks(const at::Tensor& do_, const at::Tensor& dht) {
    auto batched = [](const at::Tensor& x) {
        return x.defined() && x.key_set().has_any(c10::DispatchKeySet({at::DispatchKey::FuncTorchBatched, at::DispatchKey::Batched}));
    };
    return at::GradMode::is_enabled() || batched(do_) || batched(dht) ||
           c10::impl::tls_is_dispatch_key_included(at::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

struct Passed {
    CallPtr call;
    const Tensors& inputs;
    Tensors& results;
};

struct ChunkKdaBackward : torch::autograd::Function<ChunkKdaBackward> {
    /* `edges` are those of the inputs that there are, and that may need a gradient. */
    static Tensors forward(AutogradContext* ctx, const Passed& passed, at::TensorList edges) {
        Tensors& results = passed.results = passed.call->run(passed.inputs);
        Tensors saved = passed.inputs;
        for (size_t i : passed.call->forward.saved) saved.push_back(results[i]);
        ctx->saved_data["call"] = c10::IValue::make_capsule(passed.call);
        ctx->set_materialize_grads(false);
        ctx->save_for_backward(std::move(saved));
        Tensors outputs{results[0]};
        if (results[1].defined()) outputs.push_back(results[1]);
        return outputs;
    }

    static Tensors backward(AutogradContext* ctx, Tensors of_outputs) {
        auto call = c10::static_intrusive_pointer_cast<Call>(ctx->saved_data["call"].toCapsule());
        auto saved = ctx->get_saved_variables();
        at::Tensor do_ = of_outputs[0], dht = of_outputs.size() > 1 ? of_outputs[1] : at::Tensor();
        std::vector<bool> needs;             // of the inputs that there are
        for (size_t i = 0; i < GRADIENTS; i++)
            if (saved[i].defined()) needs.push_back(ctx->needs_input_grad(needs.size()));
        auto gradients = computed(*call, saved, do_, dht, needs);
        Tensors wanted{at::Tensor()};        // `passed` has none
        for (size_t i = 0; i < GRADIENTS; i++)
            if (saved[i].defined()) wanted.push_back(needs[wanted.size() - 1] ? gradients[i] : at::Tensor());
        return wanted;
    }

  private:
    static Tensors computed(
        Call& call, const Tensors& saved, at::Tensor do_, const at::Tensor& dht, const std::vector<bool>& needs
    ) {
        if (something_looks(do_, dht) || c10::impl::TorchDispatchModeTLS::stack_len())
            if (auto found = looked_at(call, saved, do_, dht, needs); !found.empty()) return found;
        c10::OptionalDeviceGuard guard(saved[Q].device());
        const Routine& backward = call.backward_for(dht.defined());
        if (!do_.defined()) do_ = at::zeros_like(saved[V]);
        auto tensors = in_memory(saved);
        tensors.push_back(aligned(do_, saved[Q].scalar_type()));
        tensors.push_back(aligned(dht, at::kFloat));
        for (size_t i : backward.saved) tensors.push_back(aligned(saved[INPUTS + i]));
        auto gradients = backward(call.driver, saved[Q].device(), std::move(tensors));
        for (size_t i = 0; i < GRADIENTS; i++) gradients[i] = as_given(gradients[i], saved[i]);
        return gradients;
    }

    /* The gradients from Python, which finds none if only a capture looks. */
    static Tensors looked_at(
        const Call& call, const Tensors& saved, const at::Tensor& do_, const at::Tensor& dht,
        const std::vector<bool>& needs
    ) {
        pybind11::gil_scoped_acquire gil;
        PyObject* flags = PyList_New(0);
        size_t present = 0;
        for (size_t i = 0; i < GRADIENTS; i++)
            PyList_Append(flags, saved[i].defined() && needs[present++] ? Py_True : Py_False);
        PyObject* found = PyObject_CallFunction(call.look.get(), "NNNN", listed(saved), wrapped(do_),
                                                wrapped(dht), flags);
        if (!found) throw_python_error();
        Tensors gradients;
        if (found != Py_None)
            for (size_t i = 0; i < GRADIENTS; i++) gradients.push_back(unwrapped(PySequence_Fast_GET_ITEM(found, i)));
        Py_DECREF(found);
        return gradients;
    }
};

/* ---- for Python */

struct PyCall {
    PyObject_HEAD
    CallPtr call;
};

static void dealloc(PyCall* self) {
    self->call.~CallPtr();
    Py_TYPE(self)->tp_free(reinterpret_cast<PyObject*>(self));
}

static Tensors read(PyObject* given) {
    TORCH_CHECK_TYPE(PyTuple_CheckExact(given) && PyTuple_GET_SIZE(given) == INPUTS, "a call has ", +INPUTS, " tensors");
    Tensors inputs;
    for (size_t i = 0; i < INPUTS; i++) inputs.push_back(unwrapped(PyTuple_GET_ITEM(given, i)));
    return inputs;
}

/* (o, final states or None) */
static PyObject* outputs(const Tensors& results) {
    return Py_BuildValue("NN", wrapped(results[0]), wrapped(results[1]));
}

static PyObject* recorded(PyCall* self, PyObject* given) {
    HANDLE_TH_ERRORS
    auto inputs = read(given);
    Tensors results;
    {
        pybind11::gil_scoped_release no_gil;
        Tensors edges;
        for (size_t i = 0; i < GRADIENTS; i++)
            if (inputs[i].defined()) edges.push_back(inputs[i]);
        auto outputs = ChunkKdaBackward::apply(Passed{self->call, inputs, results}, at::TensorList(edges));
        std::move(outputs.begin(), outputs.end(), results.begin());
    }
    return outputs(results);
    END_HANDLE_TH_ERRORS
}

static PyObject* unrecorded(PyCall* self, PyObject* given) {
    HANDLE_TH_ERRORS
    auto inputs = read(given);
    Tensors results;
    {
        pybind11::gil_scoped_release no_gil;
        results = self->call->run(inputs);
    }
    return outputs(results);
    END_HANDLE_TH_ERRORS
}

static PyMethodDef methods[] = {
    {"recorded", reinterpret_cast<PyCFunction>(recorded), METH_O, "(o, final states) of ten inputs; autograd records the call."},
    {"unrecorded", reinterpret_cast<PyCFunction>(unrecorded), METH_O, "(o, final states) of ten inputs."},
    {nullptr, nullptr, 0, nullptr},
};

static PyTypeObject Type = {PyVarObject_HEAD_INIT(nullptr, 0)};

/* make(run_list, stream_of, device, forward, backward_of, look) */
static PyObject* make(PyObject*, PyObject* args) {
    HANDLE_TH_ERRORS
    int device;
    unsigned long long run_list, stream_of;
    PyObject *forward, *backward_of, *look;
    if (!PyArg_ParseTuple(args, "KKiOOO", &run_list, &stream_of, &device, &forward, &backward_of, &look)) return nullptr;
    auto call = c10::make_intrusive<Call>(
        Driver{reinterpret_cast<RunList>(run_list), reinterpret_cast<StreamOf>(stream_of), device}, routine(forward),
        backward_of, look);
    auto* self = PyObject_New(PyCall, &Type);
    if (!self) return nullptr;
    new (&self->call) CallPtr(std::move(call));
    return reinterpret_cast<PyObject*>(self);
    END_HANDLE_TH_ERRORS
}

/* ---- keys of calls */

/* Writes words that tell plain tensors of one shape, dtype and device from others, with `layout` also how they lie;
   false if one is no plain tensor, or the first lies nowhere. */
static bool write_outlines(std::vector<int64_t>& words, PyObject* given, bool layout) {
    TORCH_CHECK_TYPE(PyTuple_Check(given) && PyTuple_GET_SIZE(given), "a key is of a tuple of tensors");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++) {
        PyObject* object = PyTuple_GET_ITEM(given, i);
        if (object == Py_None && i) {
            words.push_back(-1);
            continue;
        }
        if (!THPVariable_CheckExact(object)) return false;
        const at::Tensor& x = THPVariable_Unpack(object);
        if (x.layout() != at::kStrided || x.is_nested() || x.is_meta() ||
            x.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return false;
        words.push_back(x.dim() << 32 | static_cast<int64_t>(x.scalar_type()) << 16 |
                        static_cast<int64_t>(x.device().type()) << 8 | static_cast<uint8_t>(x.device().index()));
        words.insert(words.end(), x.sizes().begin(), x.sizes().end());
        if (!layout) continue;
        words.insert(words.end(), x.strides().begin(), x.strides().end());
        words.push_back(reinterpret_cast<uintptr_t>(x.data_ptr()) % ALIGNMENT | x.is_neg() << 8 | x.requires_grad() << 9);
    }
    return true;
}

/* Whether two tensors lie in one storage. */
static bool share_storage(PyObject* given) {
    std::vector<const void*> storages;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++) {
        if (PyTuple_GET_ITEM(given, i) == Py_None) continue;
        const void* storage = THPVariable_Unpack(PyTuple_GET_ITEM(given, i)).storage().data();
        if (storage && std::find(storages.begin(), storages.end(), storage) != storages.end()) return true;
        storages.push_back(storage);
    }
    return false;
}

static PyObject* bytes_of(const std::vector<int64_t>& words) {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(words.data()), words.size() * sizeof(int64_t));
}

/* outlines(tensors): a key by shapes, dtypes and devices, and by whether a gradient is needed; None if a tensor is not
   plain. */
static PyObject* outlines(PyObject*, PyObject* given) {
    HANDLE_TH_ERRORS
    std::vector<int64_t> words;
    words.reserve(64);
    if (!write_outlines(words, given, false)) Py_RETURN_NONE;
    bool training = false;
    for (size_t i = 0; i < GRADIENTS; i++) {
        PyObject* object = PyTuple_GET_ITEM(given, i);
        training |= object != Py_None && THPVariable_Unpack(object).requires_grad();
    }
    words.push_back(training && at::GradMode::is_enabled());
    return bytes_of(words);
    END_HANDLE_TH_ERRORS
}

/* layouts(tensors): a key by these, strides and alignment; None also if two tensors lie in one storage. */
static PyObject* layouts(PyObject*, PyObject* given) {
    HANDLE_TH_ERRORS
    std::vector<int64_t> words;
    words.reserve(256);
    if (!write_outlines(words, given, true) || share_storage(given)) Py_RETURN_NONE;
    words.push_back(at::GradMode::is_enabled());
    return bytes_of(words);
    END_HANDLE_TH_ERRORS
}

static PyMethodDef functions[] = {
    {"make", make, METH_VARARGS, nullptr}, {"outlines", outlines, METH_O, nullptr}, {"layouts", layouts, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kda_node", nullptr, -1, functions};

PyMODINIT_FUNC PyInit_kda_node() {
    Type.tp_name = "kda_node.Call";
    Type.tp_basicsize = sizeof(PyCall);
    Type.tp_dealloc = reinterpret_cast<destructor>(dealloc);
    Type.tp_flags = Py_TPFLAGS_DEFAULT;
    Type.tp_methods = methods;
    return PyType_Ready(&Type) ? nullptr : PyModule_Create(&definition);
}
