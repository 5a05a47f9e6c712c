// SPDX-License-Identifier: Apache-2.0
//
// The part of the CUDA driver's binary interface that afc uses, declared here so that no CUDA header is
// needed. Names, values and layouts are fixed by the driver; the unit tests compare them with cuda.h where
// that exists.
#ifndef AFC_HOST_DRIVER_API_H
#define AFC_HOST_DRIVER_API_H

namespace afc_driver {

using Result = int;
using Device = int;
using Context = struct ContextOpaque *;
using Library = struct LibraryOpaque *;
using Kernel = struct KernelOpaque *;      // of a library, for any context
using Function = struct FunctionOpaque *;  // of one context; launches take a Kernel cast to this as well
using Stream = struct StreamOpaque *;

constexpr Result kSuccess = 0;
constexpr Result kNotInitialized = 3;
constexpr Result kInvalidImage = 200;
constexpr Result kNoBinaryForGpu = 209;
constexpr Result kInvalidPtx = 218;
constexpr Result kUnsupportedPtxVersion = 222;

constexpr int kMultiprocessorCount = 16;  // CUdevice_attribute
constexpr int kCapabilityMajor = 75;
constexpr int kCapabilityMinor = 76;
constexpr int kSharedBytesOptin = 97;

constexpr int kMaxDynamicSharedBytes = 8;  // CUfunction_attribute

constexpr int kCaptureRelaxed = 2;  // CUstreamCaptureMode

constexpr int kProgrammaticStreamSerialization = 6;  // CUlaunchAttributeID

struct LaunchAttribute {
  int id;
  char padding[4];
  union {
    char reserved[64];
    int programmatic_stream_serialization_allowed;
    unsigned long long alignment;
  } value;
};

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute *attributes;
  unsigned attribute_count;
};

// X(member, symbol, parameters)
#define AFC_DRIVER_FUNCTIONS(X)                                                                             \
  X(init, "cuInit", (unsigned flags))                                                                       \
  X(driver_version, "cuDriverGetVersion", (int *version))                                                    \
  X(error_name, "cuGetErrorName", (Result result, const char **name))                                       \
  X(error_string, "cuGetErrorString", (Result result, const char **text))                                   \
  X(device_get, "cuDeviceGet", (Device * device, int ordinal))                                              \
  X(device_count, "cuDeviceGetCount", (int *count))                                                         \
  X(device_attribute, "cuDeviceGetAttribute", (int *value, int attribute, Device device))                   \
  X(device_name, "cuDeviceGetName", (char *name, int bytes, Device device))                                 \
  X(primary_retain, "cuDevicePrimaryCtxRetain", (Context * context, Device device))                         \
  X(context_push, "cuCtxPushCurrent_v2", (Context context))                                                 \
  X(context_pop, "cuCtxPopCurrent_v2", (Context * context))                                                 \
  X(context_current, "cuCtxGetCurrent", (Context * context))                                                \
  X(context_device, "cuCtxGetDevice", (Device * device))                                                    \
  X(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", (int *mode))                                \
  X(library_load, "cuLibraryLoadData",                                                                      \
    (Library * library, const void *code, int *jit_options, void **jit_values, unsigned jit_count,          \
     int *options, void **values, unsigned count))                                                          \
  X(library_kernel, "cuLibraryGetKernel", (Kernel * kernel, Library library, const char *name))             \
  X(kernel_set_attribute, "cuKernelSetAttribute", (int attribute, int value, Kernel kernel, Device device)) \
  X(kernel_function, "cuKernelGetFunction", (Function * function, Kernel kernel))                           \
  X(launch, "cuLaunchKernelEx",                                                                             \
    (const LaunchConfig *config, Function function, void **parameters, void **extra))

#define AFC_DRIVER_POINTER(member, symbol, parameters) Result(*member) parameters = nullptr;
struct Api {
  AFC_DRIVER_FUNCTIONS(AFC_DRIVER_POINTER)
};
#undef AFC_DRIVER_POINTER

}  // namespace afc_driver

#endif  // AFC_HOST_DRIVER_API_H
