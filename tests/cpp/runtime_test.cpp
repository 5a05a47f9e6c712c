// SPDX-License-Identifier: Apache-2.0
//
// The host runtime from C++: layout of the call structure, the guard of entry functions, runs of indices, 16-bit types.
// Prints each failure; the exit code is their number.
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>

#include "abi/afc_abi.h"
#include "abi/afc_run.h"
#include "cpu/element.hpp"
#include "cpu/walk.hpp"
#include "host/status.h"

extern "C" const char *afc_last_error(void);

static int failures = 0;

#define CHECK(condition)                                                         \
  do {                                                                           \
    if (!(condition)) {                                                          \
      std::printf("%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);      \
      ++failures;                                                                \
    }                                                                            \
  } while (0)

static int succeed(const afc_args *) { return AFC_OK; }
static int give_up(const afc_args *) { return afc_fail(AFC_BAD_ARGUMENT, "%s: expected %d", "q", 3); }
static int throw_out(const afc_args *) { throw std::string("out"); }

static afc_args minimal() {
  afc_args args;
  std::memset(&args, 0, sizeof args);
  args.version = AFC_ABI_VERSION;
  args.bytes = sizeof args;
  args.B = args.Hq = args.Hk = args.M = args.N = 1;
  return args;
}

static bool said(const char *text) { return std::strstr(afc_last_error(), text) != nullptr; }

static void test_guard() {
  afc_args args = minimal();
  CHECK(afc_call(succeed, &args) == AFC_OK && *afc_last_error() == 0);
  CHECK(afc_call(give_up, &args) == AFC_BAD_ARGUMENT && said("q: expected 3"));
  CHECK(afc_call(succeed, &args) == AFC_OK && *afc_last_error() == 0);
  CHECK(afc_call(throw_out, &args) != AFC_OK);

  args = minimal();
  args.version = AFC_ABI_VERSION + 1;
  CHECK(afc_call(succeed, &args) != AFC_OK && said("version"));
  args = minimal();
  args.Hq = 3, args.Hk = 2;
  CHECK(afc_call(succeed, &args) == AFC_BAD_ARGUMENT && said("Hq"));
  args = minimal();
  args.M = -1;
  CHECK(afc_call(succeed, &args) == AFC_BAD_ARGUMENT && said("M"));
  args = minimal();
  args.flags = 64;
  CHECK(afc_call(succeed, &args) == AFC_UNSUPPORTED && said("flags"));
}

// Every reserved field is refused by its name.
static void test_reserved() {
  const int32_t some = 1;
  const struct {
    const char *name;
    void (*set)(afc_args *, const int32_t *);
  } fields[] = {
      {"cu_seqlens_q", [](afc_args *a, const int32_t *p) { a->cu_seqlens_q = p; }},
      {"cu_seqlens_k", [](afc_args *a, const int32_t *p) { a->cu_seqlens_k = p; }},
      {"seqused_q", [](afc_args *a, const int32_t *p) { a->seqused_q = p; }},
      {"seqused_k", [](afc_args *a, const int32_t *p) { a->seqused_k = p; }},
      {"page_table", [](afc_args *a, const int32_t *p) { a->page_table = p; }},
      {"max_q", [](afc_args *a, const int32_t *) { a->max_q = 1; }},
      {"page_size", [](afc_args *a, const int32_t *) { a->page_size = 1; }},
      {"q_pos", [](afc_args *a, const int32_t *p) { a->q_pos = p; }},
      {"num_splits", [](afc_args *a, const int32_t *) { a->num_splits = 2; }},
      {"out_dtype", [](afc_args *a, const int32_t *) { a->out_dtype = 1; }},
  };
  for (const auto &field : fields) {
    afc_args args = minimal();
    field.set(&args, &some);
    CHECK(afc_call(succeed, &args) == AFC_UNSUPPORTED);
    if (!said(field.name)) std::printf("  %s is not named: %s\n", field.name, afc_last_error()), ++failures;
  }
}

static void test_runs() {
  Limits limits(0, 100);
  limits.at_most(40, 55);   // causal for queries 40..55
  limits.at_least(30, 45);  // a window of 11
  const Run run = limits.run(false);
  CHECK(run.begin == 30 && run.end == 56 && run.full_begin == run.full_end);  // no key is seen by all
  Limits nothing(0, 100);
  nothing.at_most(-5, -1);
  CHECK(nothing.run(false).end == 0);
  int visited = 0, full = 0;
  afc::walk(Run{3, 5, 14, 16}, 4, [&](int, int count, bool whole) { visited += count, full += whole ? count : 0; });
  CHECK(visited == 13 && full == 9);
}

static void test_elements() {
  using afc::bfloat16;
  using afc::float16;
  CHECK(afc::round_to<bfloat16>(1.0f) == 1.0f);
  CHECK(afc::round_to<bfloat16>(1.0f + 1.0f / 256) == 1.0f);  // ties to even
  CHECK(afc::round_to<bfloat16>(1.0f + 3.0f / 256) == 1.0f + 1.0f / 64);
  CHECK(std::isnan(afc::round_to<bfloat16>(NAN)) && std::isinf(afc::round_to<float16>(1e6f)));
}

int main() {
  static_assert(sizeof(afc_args) % 8 == 0 && offsetof(afc_args, version) == 0, "the header of the structure is fixed");
  static_assert(sizeof(afc_args) <= 4096, "passed by value to GPU kernels of every supported compute capability");
  test_guard();
  test_reserved();
  test_runs();
  test_elements();
  std::printf("%d failure(s)\n", failures);
  return failures;
}
