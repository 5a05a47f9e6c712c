// SPDX-License-Identifier: Apache-2.0
//
// Python module of an artefact. Compiled once per interpreter and compiler, linked into every artefact.
//
// The module object is made by the C API, with pybind11's owned references: PYBIND11_MODULE caches modules by
// their name in the interpreter, so that two files of one name would both give the module of the first. The
// rest of pybind11 stays out: it would take four seconds of a first build.
// Everything here is static to one shared object, and its symbols are hidden.
#define PY_SSIZE_T_CLEAN
#include <pybind11/pytypes.h>

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "host/module.h"
#include "host/status.h"

namespace py = pybind11;

namespace {

const afc_module *table;

constexpr int kSizeCount = 5;  // B, Hq, Hk, M, N
constexpr int kTensorCount = 11;
constexpr int kPerBatchCount = 3;
constexpr int kMaxRank = 4;
constexpr uintptr_t kWorkspaceAlignment = 256;

// ---- reading arguments --------------------------------------------------------------------------
// Plain C API: a call reads about a hundred numbers, and this is a few times faster than pybind11's
// conversions. Each reader returns false with a Python exception set.

bool fail_type(const char *name, int index, const char *expected, PyObject *got) {
  if (index < 0) {
    PyErr_Format(PyExc_TypeError, "%s: expected %s, got %s", name, expected, Py_TYPE(got)->tp_name);
  } else {
    PyErr_Format(PyExc_TypeError, "%s[%d]: expected %s, got %s", name, index, expected,
                 Py_TYPE(got)->tp_name);
  }
  return false;
}

bool read_int64(PyObject *object, const char *name, int64_t *out) {
  if (!PyIndex_Check(object)) return fail_type(name, -1, "an int", object);
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) {
    PyErr_Format(PyExc_ValueError, "%s: %R does not fit in 64 bits", name, object);
    return false;
  }
  *out = value;
  return true;
}

bool read_int32(PyObject *object, const char *name, int32_t *out) {
  int64_t value = 0;
  if (!read_int64(object, name, &value)) return false;
  if (value < INT32_MIN || value > INT32_MAX) {
    PyErr_Format(PyExc_ValueError, "%s: %R does not fit in 32 bits", name, object);
    return false;
  }
  *out = static_cast<int32_t>(value);
  return true;
}

bool read_pointer(PyObject *object, const char *name, void **out) {
  if (!PyLong_Check(object)) return fail_type(name, -1, "an address as int", object);
  const unsigned long long value = PyLong_AsUnsignedLongLong(object);
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred()) {
    PyErr_Format(PyExc_ValueError, "%s: %R is no address", name, object);
    return false;
  }
  *out = reinterpret_cast<void *>(static_cast<uintptr_t>(value));
  return true;
}

bool check_tuple(PyObject *object, const char *name, Py_ssize_t least, Py_ssize_t most) {
  if (!PyTuple_Check(object)) return fail_type(name, -1, "a tuple", object);
  const Py_ssize_t size = PyTuple_GET_SIZE(object);
  if (size >= least && size <= most) return true;
  PyErr_Format(PyExc_ValueError, "%s: expected %zd to %zd items, got %zd", name, least, most, size);
  return false;
}

bool read_int64_tuple(PyObject *object, const char *name, int64_t *out, Py_ssize_t count) {
  if (!check_tuple(object, name, count, count)) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!read_int64(PyTuple_GET_ITEM(object, i), name, &out[i])) return false;
  }
  return true;
}

bool read_sizes(PyObject *object, afc_args *args) {
  int64_t sizes[kSizeCount];
  if (!read_int64_tuple(object, "sizes", sizes, kSizeCount)) return false;
  args->B = sizes[0];
  args->Hq = sizes[1];
  args->Hk = sizes[2];
  args->M = sizes[3];
  args->N = sizes[4];
  return true;
}

// (pointer, s0, s1, s2, s3) or None.
bool read_tensor(PyObject *object, int index, afc_tensor *out) {
  if (object == Py_None) return true;
  if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != 5) {
    return fail_type("tensors", index, "(pointer, s0, s1, s2, s3) or None", object);
  }
  if (!read_pointer(PyTuple_GET_ITEM(object, 0), "tensors", &out->data)) return false;
  for (int d = 0; d < 4; ++d) {
    if (!read_int64(PyTuple_GET_ITEM(object, d + 1), "tensors", &out->stride[d])) return false;
  }
  return true;
}

// q, k, v, o, lse, d_o, dlse, dq, dk, dv and, where it is used, o_raw.
bool read_tensors(PyObject *object, afc_args *args) {
  afc_tensor *const fields[kTensorCount] = {&args->q,    &args->k,  &args->v,  &args->o,  &args->lse,  &args->d_o,
                                            &args->dlse, &args->dq, &args->dk, &args->dv, &args->o_raw};
  if (!check_tuple(object, "tensors", kTensorCount - 1, kTensorCount)) return false;
  const int count = static_cast<int>(PyTuple_GET_SIZE(object));
  for (int i = 0; i < count; ++i) {
    if (!read_tensor(PyTuple_GET_ITEM(object, i), i, fields[i])) return false;
  }
  return true;
}

// (pointer, dtype, sizes, strides) or None.
bool read_captured(PyObject *object, const char *name, int index, afc_captured *out) {
  if (object == Py_None) return true;
  if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != 4) {
    return fail_type(name, index, "(pointer, dtype, sizes, strides) or None", object);
  }
  PyObject *sizes = PyTuple_GET_ITEM(object, 2);
  if (!check_tuple(sizes, name, 0, kMaxRank)) return false;
  out->rank = static_cast<int32_t>(PyTuple_GET_SIZE(sizes));
  if (!read_pointer(PyTuple_GET_ITEM(object, 0), name, &out->data)) return false;
  if (!read_int32(PyTuple_GET_ITEM(object, 1), name, &out->dtype)) return false;
  if (out->dtype < AFC_BOOL || out->dtype > AFC_FLOAT64) {
    PyErr_Format(PyExc_ValueError, "%s[%d]: expected a dtype code in 0..%d, got %d", name, index, AFC_FLOAT64,
                 out->dtype);
    return false;
  }
  return read_int64_tuple(sizes, name, out->size, out->rank) &&
         read_int64_tuple(PyTuple_GET_ITEM(object, 3), name, out->stride, out->rank);
}

bool read_captured_tuple(PyObject *object, const char *name, afc_captured *out) {
  if (!check_tuple(object, name, 0, AFC_MAX_CAPTURED)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) {
    if (!read_captured(PyTuple_GET_ITEM(object, i), name, static_cast<int>(i), &out[i])) return false;
  }
  return true;
}

// An int goes to .i, a float to .f: the caller passes the kind that the attention declares.
bool read_scalars(PyObject *object, afc_scalar *out) {
  if (!check_tuple(object, "scalars", 0, AFC_MAX_SCALARS)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) {
    PyObject *item = PyTuple_GET_ITEM(object, i);
    if (PyFloat_Check(item)) {
      out[i].f = PyFloat_AS_DOUBLE(item);
    } else if (!read_int64(item, "scalars", &out[i].i)) {
      return false;
    }
  }
  return true;
}

bool read_entry(PyObject *object, const afc_entry **out) {
  int64_t index = 0;
  if (!read_int64(object, "entry", &index)) return false;
  if (index < 0 || index >= static_cast<int64_t>(table->entry_count)) {
    PyErr_Format(PyExc_ValueError, "entry: expected an index below %u, got %lld", table->entry_count,
                 static_cast<long long>(index));
    return false;
  }
  *out = &table->entries[index];
  return true;
}

bool read_bool(PyObject *object, int *out) {
  *out = PyObject_IsTrue(object);
  return *out >= 0;
}

// The last kPerBatchCount arguments may be left out.
bool check_count(const char *function, Py_ssize_t expected, Py_ssize_t got) {
  if (got == expected || got == expected + kPerBatchCount) return true;
  PyErr_Format(PyExc_TypeError, "%s: expected %zd positional arguments, got %zd", function, expected, got);
  return false;
}

// Addresses of q_origin, k_origin and kv_len per batch, each 0 for none.
bool read_per_batch(PyObject *const *argv, Py_ssize_t argc, Py_ssize_t first, afc_args *args) {
  if (argc == first) return true;
  void *address[kPerBatchCount];
  const char *const names[kPerBatchCount] = {"q_origin_per_batch", "k_origin_per_batch", "kv_len_per_batch"};
  for (int i = 0; i < kPerBatchCount; ++i) {
    if (!read_pointer(argv[first + i], names[i], &address[i])) return false;
  }
  args->q_origin_per_batch = static_cast<const int64_t *>(address[0]);
  args->k_origin_per_batch = static_cast<const int64_t *>(address[1]);
  args->kv_len_per_batch = static_cast<const int64_t *>(address[2]);
  return true;
}

// ---- calls --------------------------------------------------------------------------------------

PyObject *raise_status(const afc_entry &entry, int status) {
  PyObject *kind = PyExc_RuntimeError;
  if (status == AFC_UNSUPPORTED) kind = PyExc_NotImplementedError;
  if (status == AFC_BAD_ARGUMENT) kind = PyExc_ValueError;
  const char *text = afc_last_error();
  if (text[0] != '\0') return PyErr_Format(kind, "%s: %s", entry.name, text);
  return PyErr_Format(kind, "%s: failed with status %d", entry.name, status);
}

void start_args(afc_args *args) {
  memset(args, 0, sizeof(*args));
  args->version = AFC_ABI_VERSION;
  args->bytes = sizeof(*args);
}

// A workspace that is too small or not aligned would be written beyond its end: refused here, whatever the
// entry does.
bool check_workspace(const afc_entry &entry, const afc_args &args, int backward) {
  const int64_t needed = afc_call_workspace(entry.workspace, &args, backward);
  if (needed < 0) {
    raise_status(entry, afc_last_status());
    return false;
  }
  if (args.workspace_bytes < needed || (needed > 0 && args.workspace == nullptr)) {
    PyErr_Format(PyExc_ValueError, "%s: workspace: expected at least %lld bytes, got %lld", entry.name,
                 static_cast<long long>(needed),
                 static_cast<long long>(args.workspace ? args.workspace_bytes : 0));
    return false;
  }
  if (reinterpret_cast<uintptr_t>(args.workspace) % kWorkspaceAlignment != 0) {
    PyErr_Format(PyExc_ValueError, "%s: workspace: expected an address aligned to %d bytes", entry.name,
                 static_cast<int>(kWorkspaceAlignment));
    return false;
  }
  return true;
}

// _afc_workspace(entry, backward, device, sizes, q_origin, k_origin, threads, grad_captured[,
// q_origin_per_batch, k_origin_per_batch, kv_len_per_batch]) -> bytes
PyObject *call_workspace(PyObject *, PyObject *const *argv, Py_ssize_t argc) {
  const afc_entry *entry = nullptr;
  int backward = 0;
  afc_args args;
  start_args(&args);
  const bool ok = check_count("_afc_workspace", 8, argc) && read_entry(argv[0], &entry) &&
                  read_bool(argv[1], &backward) && read_int32(argv[2], "device", &args.device) &&
                  read_sizes(argv[3], &args) && read_int64(argv[4], "q_origin", &args.q_origin) &&
                  read_int64(argv[5], "k_origin", &args.k_origin) &&
                  read_int32(argv[6], "threads", &args.threads) &&
                  read_captured_tuple(argv[7], "grad_captured", args.grad_captured) &&
                  read_per_batch(argv, argc, 8, &args);
  if (!ok) return nullptr;
  const int64_t bytes = afc_call_workspace(entry->workspace, &args, backward);
  return bytes < 0 ? raise_status(*entry, afc_last_status()) : PyLong_FromLongLong(bytes);
}

// _afc_run(entry, backward, flags, device, sizes, tensors, captured, grad_captured, scalars, q_origin,
// k_origin, workspace_ptr, workspace_bytes, stream, threads[, q_origin_per_batch, k_origin_per_batch,
// kv_len_per_batch])
PyObject *call_run(PyObject *, PyObject *const *argv, Py_ssize_t argc) {
  const afc_entry *entry = nullptr;
  int backward = 0;
  afc_args args;
  start_args(&args);
  const bool ok = check_count("_afc_run", 15, argc) && read_entry(argv[0], &entry) &&
                  read_bool(argv[1], &backward) && read_int32(argv[2], "flags", &args.flags) &&
                  read_int32(argv[3], "device", &args.device) && read_sizes(argv[4], &args) &&
                  read_tensors(argv[5], &args) && read_captured_tuple(argv[6], "captured", args.captured) &&
                  read_captured_tuple(argv[7], "grad_captured", args.grad_captured) &&
                  read_scalars(argv[8], args.scalar) && read_int64(argv[9], "q_origin", &args.q_origin) &&
                  read_int64(argv[10], "k_origin", &args.k_origin) &&
                  read_pointer(argv[11], "workspace_ptr", &args.workspace) &&
                  read_int64(argv[12], "workspace_bytes", &args.workspace_bytes) &&
                  read_pointer(argv[13], "stream", &args.stream) &&
                  read_int32(argv[14], "threads", &args.threads) && read_per_batch(argv, argc, 15, &args);
  if (!ok) return nullptr;
  int (*function)(const afc_args *) = backward ? entry->backward : entry->forward;
  if (function == nullptr) {
    return PyErr_Format(PyExc_NotImplementedError, "%s: the module was built without its %s pass",
                        entry->name, backward ? "backward" : "forward");
  }
  if (!check_workspace(*entry, args, backward)) return nullptr;
  int status = AFC_OK;
  Py_BEGIN_ALLOW_THREADS;
  status = afc_call(function, &args);
  Py_END_ALLOW_THREADS;
  if (status != AFC_OK) return raise_status(*entry, status);
  Py_RETURN_NONE;
}

// ---- the module object --------------------------------------------------------------------------

using Object = py::object;

Object steal(PyObject *object) { return py::reinterpret_steal<Object>(object); }

bool has_entry(const char *name) {
  for (uint32_t i = 0; i < table->entry_count; ++i) {
    if (strcmp(name, table->entries[i].name) == 0) return true;
  }
  return false;
}

// Module-level __getattr__(name): reached only for names that the module lacks. `self` is (name of the
// module, why afc cannot be imported).
PyObject *fail_attribute(PyObject *self, PyObject *wanted) {
  PyObject *module_name = PyTuple_GET_ITEM(self, 0);
  const char *name = PyUnicode_Check(wanted) ? PyUnicode_AsUTF8(wanted) : nullptr;
  if (name == nullptr) {
    fail_type("name", -1, "a str", wanted);
  } else if (has_entry(name)) {
    PyErr_Format(PyExc_AttributeError,
                 "module '%U' holds the attention '%s', but its Python callable comes from the `afc` "
                 "package, which cannot be imported (%U): install afc beside this module; _afc_run() works "
                 "without it",
                 module_name, name, PyTuple_GET_ITEM(self, 1));
  } else {
    PyErr_Format(PyExc_AttributeError, "module '%U' has no attribute '%s'", module_name, name);
  }
  return nullptr;
}

PyMethodDef getattr_method = {"__getattr__", fail_attribute, METH_O,
                              "Explains why an attention has no callable here."};

bool add(PyObject *module, const char *name, const Object &value) {
  return value && PyObject_SetAttrString(module, name, value.ptr()) == 0;
}

bool add_getattr(PyObject *module, const Object &missing) {
  const Object name = steal(PyObject_GetAttrString(module, "__name__"));
  if (!name) return false;
  const Object self = steal(PyTuple_Pack(2, name.ptr(), missing.ptr()));
  return self && add(module, "__getattr__", steal(PyCFunction_New(&getattr_method, self.ptr())));
}

bool add_data(PyObject *module) {
  const Object entries = steal(PyList_New(0));
  if (!entries) return false;
  for (uint32_t i = 0; i < table->entry_count; ++i) {
    const Object text = steal(PyUnicode_FromString(table->entries[i].description));
    if (!text || PyList_Append(entries.ptr(), text.ptr()) != 0) return false;
  }
  return add(module, "_afc_entries", entries) &&
         add(module, "_afc_metadata", steal(PyUnicode_FromString(table->metadata))) &&
         add(module, "_afc_abi_version", steal(PyLong_FromUnsignedLong(table->abi_version)));
}

// Takes the exception of a failed import: true with its text in `why` if the package itself is absent; false,
// with the exception set again, if something in it is broken.
bool package_is_absent(Object *why) {
  if (!PyErr_ExceptionMatches(PyExc_ModuleNotFoundError)) return false;
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  const Object name = steal(PyObject_GetAttrString(value, "name"));
  const char *text = name && PyUnicode_Check(name.ptr()) ? PyUnicode_AsUTF8(name.ptr()) : nullptr;
  if (text == nullptr || (strcmp(text, "afc") != 0 && strcmp(text, "afc.runtime") != 0)) {
    PyErr_Restore(type, value, trace);
    return false;
  }
  *why = steal(PyObject_Str(value));
  steal(type), steal(value), steal(trace);
  return bool(*why);
}

// Lets the package add one callable per attention; where it is absent, `missing` is why. False with an
// exception set.
bool attach_callables(PyObject *module, Object *missing) {
  const Object runtime = steal(PyImport_ImportModule("afc.runtime"));
  if (!runtime) return package_is_absent(missing);
  return bool(steal(PyObject_CallMethod(runtime.ptr(), "attach", "O", module)));
}

int execute(PyObject *module) {
  Object missing;
  if (!add_data(module) || !attach_callables(module, &missing)) return -1;
  return !missing || add_getattr(module, missing) ? 0 : -1;
}

PyMethodDef methods[] = {
    {"_afc_workspace", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_workspace)),
     METH_FASTCALL,
     "_afc_workspace(entry, backward, device, sizes, q_origin, k_origin, threads, grad_captured[, "
     "q_origin_per_batch, k_origin_per_batch, kv_len_per_batch]) -> bytes"},
    {"_afc_run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_run)), METH_FASTCALL,
     "_afc_run(entry, backward, flags, device, sizes, tensors, captured, grad_captured, scalars, q_origin, "
     "k_origin, workspace_ptr, workspace_bytes, stream, threads[, q_origin_per_batch, k_origin_per_batch, "
     "kv_len_per_batch])"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef_Slot slots[] = {
    {Py_mod_exec, reinterpret_cast<void *>(execute)},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    nullptr,
    "Attention kernels built by afc.",
    0,
    methods,
    slots,
    nullptr,
    nullptr,
    nullptr,
};

// The layout of Python's objects is that of one minor version: another must not run this code.
bool check_python() {
  const char *running = Py_GetVersion();
  char built[16];
  const int length = snprintf(built, sizeof(built), "%d.%d", PY_MAJOR_VERSION, PY_MINOR_VERSION);
  const char next = running[length];
  if (strncmp(running, built, length) == 0 && (next < '0' || next > '9')) return true;
  PyErr_Format(PyExc_ImportError,
               "this module was built for Python %s and cannot be used by Python %.16s: compile it again",
               built, running);
  return false;
}

}  // namespace

extern "C" PyObject *afc_host_init(const afc_module *module_table, const char *stem) {
  if (!check_python()) return nullptr;
  table = module_table;
  definition.m_name = stem;
  return PyModuleDef_Init(&definition);
}
