// SPDX-License-Identifier: Apache-2.0
#include "host/status.h"

#include <stdarg.h>
#include <stdio.h>

#include <exception>
#include <new>

namespace {

struct Failure {
  int status;
  char text[2048];
};

thread_local Failure failure;

constexpr int64_t kLargestPosition = (int64_t(1) << 30) - 1;  // so that a difference of two fits 32 bits
constexpr int64_t kSmallestPosition = -kLargestPosition;

struct NamedSize {
  const char *name;
  int64_t value;
};

int check_sizes(const afc_args &args) {
  const NamedSize sizes[] = {{"B", args.B}, {"Hq", args.Hq}, {"Hk", args.Hk}, {"M", args.M}, {"N", args.N}};
  for (const NamedSize &size : sizes) {
    if (size.value < 0 || size.value > INT32_MAX) {
      return afc_fail(AFC_BAD_ARGUMENT, "%s: expected a size in 0..%d, got %lld", size.name, INT32_MAX,
                      static_cast<long long>(size.value));
    }
  }
  const bool divides = args.Hk > 0 ? args.Hq % args.Hk == 0 : args.Hq == 0;
  if (!divides) {
    return afc_fail(AFC_BAD_ARGUMENT,
                    "Hq: expected a multiple of the number of key heads, got Hq = %lld with Hk = %lld",
                    static_cast<long long>(args.Hq), static_cast<long long>(args.Hk));
  }
  return AFC_OK;
}

// Rows origin .. origin + rows are positions; one past the last is included so that loop bounds fit as well.
int check_origin(const char *name, int64_t origin, int64_t rows) {
  if (origin < kSmallestPosition || origin > kLargestPosition - rows) {
    return afc_fail(AFC_BAD_ARGUMENT, "%s: expected positions below 2^30 in size, got origin %lld with %lld rows",
                    name, static_cast<long long>(origin), static_cast<long long>(rows));
  }
  return AFC_OK;
}

// Fields that no module of this version supports.
const char *reserved_field_in_use(const afc_args &args) {
  struct {
    const char *name;
    bool used;
  } const fields[] = {
      {"reserved0", args.reserved0 != 0},
      {"cu_seqlens_q", args.cu_seqlens_q != nullptr},
      {"cu_seqlens_k", args.cu_seqlens_k != nullptr},
      {"seqused_q", args.seqused_q != nullptr},
      {"seqused_k", args.seqused_k != nullptr},
      {"max_q", args.max_q != 0},
      {"max_k", args.max_k != 0},
      {"page_table", args.page_table != nullptr},
      {"page_stride", args.page_stride != 0},
      {"page_size", args.page_size != 0},
      {"q_pos", args.q_pos != nullptr},
      {"k_pos", args.k_pos != nullptr},
      {"num_splits", args.num_splits != 0},
      {"split_index", args.split_index != 0},
      {"o_partial", args.o_partial != nullptr},
      {"lse_partial", args.lse_partial != nullptr},
      {"out_dtype", args.out_dtype != 0},
      {"reserved1", args.reserved1 != 0},
  };
  for (const auto &field : fields) {
    if (field.used) return field.name;
  }
  return nullptr;
}

int check_flags(int32_t flags) {
  const int32_t unknown = flags & ~(AFC_DETERMINISTIC | AFC_ACCUMULATE);
  if (unknown != 0)
    return afc_fail(AFC_UNSUPPORTED, "flags: this module does not know the bits 0x%x", unknown);
  return AFC_OK;
}

int check_args(const afc_args *args) {
  if (args == nullptr) return afc_fail(AFC_BAD_ARGUMENT, "args: expected a structure, got a null pointer");
  if (args->version != AFC_ABI_VERSION || args->bytes != sizeof(afc_args)) {
    return afc_fail(AFC_UNSUPPORTED,
                    "args: expected call interface %d of %zu bytes, got version %u of %u bytes",
                    AFC_ABI_VERSION, sizeof(afc_args), args->version, args->bytes);
  }
  if (const char *name = reserved_field_in_use(*args)) {
    return afc_fail(AFC_UNSUPPORTED, "%s: not supported by this module, must be zero", name);
  }
  if (int status = check_flags(args->flags)) return status;
  if (int status = check_sizes(*args)) return status;
  if (int status = check_origin("q_origin", args->q_origin, args->M)) return status;
  return check_origin("k_origin", args->k_origin, args->N);
}

// To be called in a catch block.
int fail_with_current_exception() {
  try {
    throw;
  } catch (const std::bad_alloc &) {
    return afc_fail(AFC_DRIVER_ERROR, "out of memory on the host");
  } catch (const std::exception &error) {
    return afc_fail(AFC_DRIVER_ERROR, "unexpected C++ exception: %s", error.what());
  } catch (...) {
    return afc_fail(AFC_DRIVER_ERROR, "unexpected C++ exception of unknown type");
  }
}

}  // namespace

extern "C" {

int afc_fail(int status, const char *format, ...) {
  failure.status = status;
  va_list values;
  va_start(values, format);
  vsnprintf(failure.text, sizeof(failure.text), format, values);
  va_end(values);
  return status;
}

int afc_last_status(void) { return failure.status; }

void afc_clear_error(void) {
  failure.status = AFC_OK;
  failure.text[0] = '\0';
}

int afc_call(int (*function)(const afc_args *args), const afc_args *args) {
  afc_clear_error();
  if (int status = check_args(args)) return status;
  try {
    return function(args);
  } catch (...) {
    return fail_with_current_exception();
  }
}

int64_t afc_call_workspace(int64_t (*function)(const afc_args *args, int backward), const afc_args *args,
                           int backward) {
  afc_clear_error();
  if (check_args(args) != AFC_OK) return -1;
  if (function == nullptr) return 0;
  try {
    return function(args, backward);
  } catch (...) {
    fail_with_current_exception();
    return -1;
  }
}

__attribute__((visibility("default"))) const char *afc_last_error(void) { return failure.text; }

}  // extern "C"
