// SPDX-License-Identifier: Apache-2.0
//
// State is kept per module and filled at the first launch on each device, under one lock; later launches read
// it through atomics. Kernels are context-independent handles of a library, so any context of the right
// device will do.
#include "host/driver.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "host/driver_api.h"
#include "host/status.h"

using namespace afc_driver;

namespace {

constexpr int kMaxDevices = 64;
constexpr int kFirstDependentLaunchArch = 90;

struct DeviceState {
  Device handle;
  Context primary;
  afc_gpu_device facts;
  char name[128];
};

// Kernels of one image, in the order of afc_gpu_module.kernels.
struct LoadedImage {
  const afc_gpu_image *image;      // its first part
  std::vector<Library> libraries;  // a part each
  std::vector<Kernel> kernels;
};

std::mutex lock;                     // guards everything below while it is filled
Api api;                             // complete once ready_pid is set
std::atomic<pid_t> starting_pid{0};  // process that began to initialise the driver
std::atomic<pid_t> ready_pid{0};     // process that has initialised it
std::atomic<DeviceState *> devices[kMaxDevices];

int fail_driver(int status, const char *what, Result result) {
  const char *name = nullptr;
  const char *text = nullptr;
  if (api.error_name != nullptr) api.error_name(result, &name);
  if (api.error_string != nullptr) api.error_string(result, &text);
  return afc_fail(status, "%s: %s (%d, %s)", what, text ? text : "unknown error", result,
                  name ? name : "unnamed");
}

int load_api() {
  void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return afc_fail(AFC_NO_DRIVER,
                    "no CUDA driver: libcuda.so.1 cannot be opened (%s); GPU kernels need a machine with an "
                    "NVIDIA driver",
                    dlerror());
  }
#define AFC_DRIVER_RESOLVE(member, symbol, parameters)                                                    \
  api.member = reinterpret_cast<decltype(api.member)>(dlsym(handle, symbol));                             \
  if (api.member == nullptr) {                                                                            \
    return afc_fail(AFC_NO_DRIVER, "the CUDA driver lacks %s: a driver for CUDA 12.0 or later is needed", \
                    symbol);                                                                              \
  }
  AFC_DRIVER_FUNCTIONS(AFC_DRIVER_RESOLVE)
#undef AFC_DRIVER_RESOLVE
  return AFC_OK;
}

int initialize_locked(pid_t self) {
  if (ready_pid.load(std::memory_order_relaxed) == self) return AFC_OK;
  if (api.launch == nullptr) {
    if (int status = load_api()) return status;
  }
  const Result result = api.init(0);
  if (result == kNotInitialized) {
    return fail_driver(
        AFC_DRIVER_ERROR,
        "the CUDA driver does not start (was this process forked from one that used CUDA? start it by "
        "'spawn' or 'forkserver')",
        result);
  }
  if (result != kSuccess) return fail_driver(AFC_NO_DRIVER, "the CUDA driver does not start", result);
  ready_pid.store(self, std::memory_order_release);
  return AFC_OK;
}

// Opens the driver once per process. A driver in use does not survive fork: the child is told so, before it
// takes the lock, which another thread of the parent may have held.
int initialize() {
  const pid_t self = getpid();
  if (ready_pid.load(std::memory_order_acquire) == self) return AFC_OK;
  pid_t starter = 0;
  if (!starting_pid.compare_exchange_strong(starter, self) && starter != self) {
    return afc_fail(
        AFC_DRIVER_ERROR,
        "this process was forked from one that had launched GPU kernels: CUDA does not survive fork; start "
        "the process by 'spawn' or 'forkserver', or fork before the first launch");
  }
  std::lock_guard<std::mutex> guard(lock);
  const int status = initialize_locked(self);
  if (status != AFC_OK) starting_pid.store(0);
  return status;
}

int read_facts(DeviceState *device) {
  int major = 0;
  int minor = 0;
  struct {
    int attribute;
    int *value;
  } const wanted[] = {
      {kCapabilityMajor, &major},
      {kCapabilityMinor, &minor},
      {kMultiprocessorCount, &device->facts.multiprocessors},
      {kSharedBytesOptin, &device->facts.shared_bytes},
  };
  for (const auto &item : wanted) {
    const Result result = api.device_attribute(item.value, item.attribute, device->handle);
    if (result != kSuccess) return fail_driver(AFC_DRIVER_ERROR, "cuDeviceGetAttribute", result);
  }
  device->facts.arch = 10 * major + minor;
  const Result result = api.device_name(device->name, sizeof(device->name), device->handle);
  return result == kSuccess ? AFC_OK : fail_driver(AFC_DRIVER_ERROR, "cuDeviceGetName", result);
}

int open_device_locked(int ordinal) {
  if (devices[ordinal].load(std::memory_order_relaxed) != nullptr) return AFC_OK;
  auto device = std::make_unique<DeviceState>();
  Result result = api.device_get(&device->handle, ordinal);
  if (result != kSuccess) {
    int count = 0;
    api.device_count(&count);
    return afc_fail(AFC_BAD_ARGUMENT, "device: expected a CUDA device below %d, got %d", count, ordinal);
  }
  if (int status = read_facts(device.get())) return status;
  result = api.primary_retain(&device->primary, device->handle);
  if (result != kSuccess) return fail_driver(AFC_DRIVER_ERROR, "cuDevicePrimaryCtxRetain", result);
  devices[ordinal].store(device.release(), std::memory_order_release);  // lives as long as the process
  return AFC_OK;
}

int find_device(int ordinal, const DeviceState **out) {
  if (ordinal < 0 || ordinal >= kMaxDevices) {
    return afc_fail(AFC_BAD_ARGUMENT, "device: expected a CUDA device in 0..%d, got %d", kMaxDevices - 1,
                    ordinal);
  }
  if (int status = initialize()) return status;
  DeviceState *device = devices[ordinal].load(std::memory_order_acquire);
  if (device == nullptr) {
    std::lock_guard<std::mutex> guard(lock);
    if (int status = open_device_locked(ordinal)) return status;
    device = devices[ordinal].load(std::memory_order_relaxed);
  }
  *out = device;
  return AFC_OK;
}

// Makes a context of the device current while it lives; leaves one that already fits.
class ContextGuard {
 public:
  explicit ContextGuard(const DeviceState &device) {
    Context current = nullptr;
    Device current_device = -1;
    if (api.context_current(&current) == kSuccess && current != nullptr &&
        api.context_device(&current_device) == kSuccess && current_device == device.handle) {
      return;
    }
    result_ = api.context_push(device.primary);
    pushed_ = result_ == kSuccess;
  }
  ~ContextGuard() {
    Context popped = nullptr;
    if (pushed_) api.context_pop(&popped);
  }
  ContextGuard(const ContextGuard &) = delete;
  ContextGuard &operator=(const ContextGuard &) = delete;

  int status() const {
    return result_ == kSuccess ? AFC_OK : fail_driver(AFC_DRIVER_ERROR, "cuCtxPushCurrent", result_);
  }

 private:
  Result result_ = kSuccess;
  bool pushed_ = false;
};

// Lets this thread load code while a stream is being captured into a graph.
class RelaxedCapture {
 public:
  RelaxedCapture() { api.exchange_capture_mode(&mode_); }
  ~RelaxedCapture() { api.exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture &) = delete;
  RelaxedCapture &operator=(const RelaxedCapture &) = delete;

 private:
  int mode_ = kCaptureRelaxed;
};

bool runs_on(const afc_gpu_image &image, int arch) {
  if (image.suffix == 'a') return image.arch == arch;
  const bool same_major = image.arch / 10 == arch / 10;
  return image.arch <= arch && (same_major || (image.ptx && image.suffix == 0));
}

// Order of preference among images that run: machine code before PTX, then the nearest capability, then code
// that may use more of its features.
bool better(const afc_gpu_image &one, const afc_gpu_image &other) {
  if (one.ptx != other.ptx) return !one.ptx;
  if (one.arch != other.arch) return one.arch > other.arch;
  if (one.virtual_arch != other.virtual_arch) return one.virtual_arch > other.virtual_arch;
  return (one.suffix == 'a' ? 2 : one.suffix == 'f') > (other.suffix == 'a' ? 2 : other.suffix == 'f');
}

const afc_gpu_image *choose_image(const afc_gpu_images &images, int arch) {
  const afc_gpu_image *best = nullptr;
  for (int i = 0; i < images.count; ++i) {
    const afc_gpu_image &image = images.first[i];
    if (runs_on(image, arch) && (best == nullptr || better(image, *best))) best = &image;
  }
  return best;
}

std::string image_name(const afc_gpu_image &image) {
  std::string name;
  if (!image.ptx && image.virtual_arch != image.arch) {
    name = "compute_" + std::to_string(image.virtual_arch) + ":";
  }
  name += (image.ptx ? "compute_" : "sm_") + std::to_string(image.arch);
  if (image.suffix != 0) name += image.suffix;
  return name;
}

// Whether two images are parts of one.
bool same_image(const afc_gpu_image &one, const afc_gpu_image &other) {
  return one.ptx == other.ptx && one.arch == other.arch && one.virtual_arch == other.virtual_arch &&
         one.suffix == other.suffix;
}

std::string image_names(const afc_gpu_images &images) {
  std::string names;
  for (int i = 0; i < images.count; ++i) {
    bool named = false;
    for (int j = 0; j < i; ++j) named = named || same_image(images.first[i], images.first[j]);
    if (named) continue;
    if (i > 0) names += ", ";
    names += image_name(images.first[i]);
  }
  return names.empty() ? "none" : names;
}

int fail_no_image(const std::string &held, const DeviceState &device) {
  return afc_fail(
      AFC_NO_KERNEL_FOR_DEVICE,
      "no kernel for this device: %s is sm_%d, the module holds %s; build it with 'afc compile --arch sm_%d'",
      device.name, device.facts.arch, held.c_str(), device.facts.arch);
}

// Index of the variant for a device, or -1: the first with machine code, else the first with PTX. `within`:
// only of classes that the device belongs to; otherwise of all, and then the last, which asks for least.
int choose_variant(const afc_gpu_variant *variants, int count, const afc_gpu_device &device, bool within) {
  int chosen = -1;
  const afc_gpu_image *best = nullptr;
  for (int i = 0; i < count; ++i) {
    if (within && variants[i].shared_bytes > device.shared_bytes) continue;
    const afc_gpu_image *image = choose_image(*variants[i].images, device.arch);
    if (image == nullptr) continue;
    const bool better_form = best == nullptr || (best->ptx && !image->ptx);
    if (better_form || (!within && best->ptx == image->ptx)) {
      best = image;
      chosen = i;
    }
  }
  return chosen;
}

std::string variant_names(const afc_gpu_variant *variants, int count) {
  std::string names;
  for (int i = 0; i < count; ++i) names += (i > 0 ? ", " : "") + image_names(*variants[i].images);
  return names;
}

// The driver refuses an image. Machine code runs on an older driver of the same major version, PTX does not.
int fail_load(const afc_gpu_image &image, const DeviceState &device, Result result) {
  const std::string name = image_name(image);
  int version = 0;
  const bool refused = result == kInvalidImage || result == kNoBinaryForGpu || result == kInvalidPtx ||
                       result == kUnsupportedPtxVersion;
  if (refused && api.driver_version(&version) == kSuccess && version < image.toolkit) {
    const std::string other =
        image.ptx ? "for this device: 'afc compile --arch sm_" + std::to_string(device.facts.arch) + "'"
                  : "with an older CUDA compiler";
    return afc_fail(
        AFC_NO_KERNEL_FOR_DEVICE,
        "the driver is too old for this module: it supports CUDA %d.%d, the code for %s was compiled by CUDA "
        "%d.%d; update the driver, or build the module %s",
        version / 1000, version % 1000 / 10, name.c_str(), image.toolkit / 1000, image.toolkit % 1000 / 10,
        other.c_str());
  }
  const std::string what = "loading the code for " + name + " on " + device.name;
  return fail_driver(AFC_DRIVER_ERROR, what.c_str(), result);
}

int find_kernel(const LoadedImage &loaded, const afc_gpu_kernel &kernel, Kernel *out) {
  const size_t part = std::min<size_t>(kernel.part, loaded.libraries.size() - 1);
  const Result result = api.library_kernel(out, loaded.libraries[part], kernel.symbol);
  if (result == kSuccess) return AFC_OK;
  const std::string what = std::string("kernel ") + kernel.symbol;
  return fail_driver(AFC_DRIVER_ERROR, what.c_str(), result);
}

int load_image(const afc_gpu_module &module, const afc_gpu_image &image, const DeviceState &device,
               LoadedImage *out) {
  out->image = &image;
  for (int i = 0; i < module.images->count; ++i) {
    const afc_gpu_image &part = module.images->first[i];
    if (!same_image(part, image)) continue;
    Library library = nullptr;
    const Result result =
        api.library_load(&library, part.begin, nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (result != kSuccess) return fail_load(part, device, result);
    out->libraries.push_back(library);
  }
  out->kernels.resize(module.kernel_count);
  for (int i = 0; i < module.kernel_count; ++i) {
    if (int status = find_kernel(*out, module.kernels[i], &out->kernels[i])) return status;
  }
  return AFC_OK;
}

int fail_shared_memory(const afc_gpu_kernel &kernel, const DeviceState &device) {
  return afc_fail(AFC_NO_KERNEL_FOR_DEVICE,
                  "kernel %s needs %d bytes of shared memory, a block on %s (sm_%d) has at most %d; build "
                  "the module with "
                  "'afc compile --arch sm_%d'",
                  kernel.symbol, kernel.shared_bytes, device.name, device.facts.arch,
                  device.facts.shared_bytes, device.facts.arch);
}

// Per-device preparation. Asking for the function in the current context loads its code now: a lazy load at
// the launch would not be allowed in a graph capture.
int prepare_kernels(const afc_gpu_module &module, const LoadedImage &loaded, const DeviceState &device) {
  for (int i = 0; i < module.kernel_count; ++i) {
    const afc_gpu_kernel &kernel = module.kernels[i];
    if (kernel.shared_bytes > device.facts.shared_bytes) return fail_shared_memory(kernel, device);
    Result result = api.kernel_set_attribute(kMaxDynamicSharedBytes, kernel.shared_bytes, loaded.kernels[i],
                                             device.handle);
    if (result != kSuccess) return fail_driver(AFC_DRIVER_ERROR, "cuKernelSetAttribute", result);
    Function function = nullptr;
    result = api.kernel_function(&function, loaded.kernels[i]);
    if (result != kSuccess) return fail_driver(AFC_DRIVER_ERROR, kernel.symbol, result);
  }
  return AFC_OK;
}

}  // namespace

struct afc_gpu_state {
  std::atomic<const LoadedImage *> per_device[kMaxDevices] = {};
  std::vector<std::unique_ptr<LoadedImage>>
      images;  // one for each image in use, whatever the number of devices
};

namespace {

int image_for_device_locked(afc_gpu_module *module, const DeviceState &device, const LoadedImage **out) {
  const afc_gpu_image *image = choose_image(*module->images, device.facts.arch);
  if (image == nullptr) return fail_no_image(image_names(*module->images), device);
  for (const auto &loaded : module->state->images) {
    if (loaded->image == image) {
      *out = loaded.get();
      return AFC_OK;
    }
  }
  auto loaded = std::make_unique<LoadedImage>();
  if (int status = load_image(*module, *image, device, loaded.get())) return status;
  *out = loaded.get();
  module->state->images.push_back(std::move(loaded));
  return AFC_OK;
}

// First launch of a module on a device; the device's context is current.
int prepare(afc_gpu_module *module, int ordinal, const DeviceState &device, const LoadedImage **out) {
  std::lock_guard<std::mutex> guard(lock);
  if (module->state == nullptr) __atomic_store_n(&module->state, new afc_gpu_state, __ATOMIC_RELEASE);
  *out = module->state->per_device[ordinal].load(std::memory_order_relaxed);
  if (*out != nullptr) return AFC_OK;
  RelaxedCapture relaxed;
  if (int status = image_for_device_locked(module, device, out)) return status;
  if (int status = prepare_kernels(*module, **out, device)) return status;
  module->state->per_device[ordinal].store(*out, std::memory_order_release);
  return AFC_OK;
}

const LoadedImage *prepared(afc_gpu_module *module, int ordinal) {
  afc_gpu_state *state = __atomic_load_n(&module->state, __ATOMIC_ACQUIRE);
  return state == nullptr ? nullptr : state->per_device[ordinal].load(std::memory_order_acquire);
}

int fail_launch(const afc_gpu_kernel &kernel, const LaunchConfig &config, int device, Result result) {
  char what[384];
  snprintf(what, sizeof(what),
           "launch of %.128s with grid (%u, %u, %u), %d threads, %d bytes of shared memory on device %d",
           kernel.symbol, config.grid_x, config.grid_y, config.grid_z, kernel.threads, kernel.shared_bytes,
           device);
  return fail_driver(AFC_DRIVER_ERROR, what, result);
}

}  // namespace

extern "C" {

int afc_gpu_launch(afc_gpu_module *module, int kernel_index, unsigned x, unsigned y, unsigned z,
                   const afc_args *args, int dependent_launch) {
  if (x == 0 || y == 0 || z == 0) return AFC_OK;
  const DeviceState *device = nullptr;
  if (int status = find_device(args->device, &device)) return status;
  ContextGuard context(*device);
  if (int status = context.status()) return status;
  const LoadedImage *loaded = prepared(module, args->device);
  if (loaded == nullptr) {
    if (int status = prepare(module, args->device, *device, &loaded)) return status;
  }
  const afc_gpu_kernel &kernel = module->kernels[kernel_index];
  LaunchAttribute dependent = {};
  dependent.id = kProgrammaticStreamSerialization;
  dependent.value.programmatic_stream_serialization_allowed = 1;
  // Only code that may contain the wait instruction can be started early.
  const bool early = dependent_launch != 0 && loaded->image->virtual_arch >= kFirstDependentLaunchArch;
  const LaunchConfig config = {x,
                               y,
                               z,
                               static_cast<unsigned>(kernel.threads),
                               1,
                               1,
                               static_cast<unsigned>(kernel.shared_bytes),
                               static_cast<Stream>(args->stream),
                               &dependent,
                               early ? 1u : 0u};
  void *parameters[] = {const_cast<afc_args *>(args)};
  const Result result =
      api.launch(&config, reinterpret_cast<Function>(loaded->kernels[kernel_index]), parameters, nullptr);
  return result == kSuccess ? AFC_OK : fail_launch(kernel, config, args->device, result);
}

int afc_gpu_choose(const afc_gpu_variant *variants, int count, int ordinal, int *chosen) {
  const DeviceState *device = nullptr;
  if (int status = find_device(ordinal, &device)) return status;
  *chosen = choose_variant(variants, count, device->facts, true);
  if (*chosen < 0) *chosen = choose_variant(variants, count, device->facts, false);
  return *chosen < 0 ? fail_no_image(variant_names(variants, count), *device) : AFC_OK;
}

int afc_gpu_query(int device, afc_gpu_device *out) {
  const DeviceState *state = nullptr;
  if (int status = find_device(device, &state)) return status;
  *out = state->facts;
  return AFC_OK;
}

}  // extern "C"
